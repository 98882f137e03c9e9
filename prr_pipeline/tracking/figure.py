# SPDX-License-Identifier: Apache-2.0
"""What all plots share: style and colours, axes and legends, and means over records."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation

log = logging.getLogger(__name__)

Record = Mapping[str, Any]

DPI = 200  # 8 inches are 1600 pixels
STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.4",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "0.9",
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "legend.frameon": False,
}
# Okabe and Ito's palette: told apart with every common colour vision, and in grey by lightness.
BLUE, ORANGE, RED, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#D55E00",
    "#56B4E9",
    "#BBBBBB",
)
BAND = (10, 90)  # percentiles over the samples that a band spans
BAND_NOTE = f"line: mean over the samples; band: percentiles {BAND[0]} to {BAND[1]}"


def new_figure(title: str, subtitle: str, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an 8 x 4.8 inch figure with its two lines of title, and its axes, row by row."""
    figure = Figure(figsize=(8, 4.8), dpi=DPI, layout="constrained")
    head = figure.suptitle(f"{title}\n ", x=0.012, ha="left", fontsize=12.5, weight="bold")
    under = Annotation(subtitle, (0, 0), xycoords=head, va="bottom", color="0.35", fontsize=10)
    under.set_in_layout(False)  # the second line of the title keeps its place
    figure.add_artist(under)
    axes = figure.subplots(rows, columns, sharex=rows > 1, sharey=columns > 1, squeeze=False)
    return figure, list(axes.flat)


def legend(figure: Figure, axes: Axes, note: str | None = None) -> None:
    """Put the legend of one of the axes under all of them, with a note."""
    handles, labels = axes.get_legend_handles_labels()
    style: dict[str, Any] = {"title": note, "title_fontsize": 8.5, "fontsize": 9.5}
    figure.legend(handles=handles, labels=labels, loc="outside lower center", ncols=6, **style)


def line(axes: Axes, records: Sequence[Record], by: str, column: str, **style: Any) -> None:
    """Draw a column's mean (a fraction, drawn in percent) against `by`, and its band."""
    at, *bands = means(records, by, column, least=0.5)
    if not len(at):
        return
    mean, low, high = (100 * band for band in bands)
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(at, mean, linewidth=1.8, markersize=5, **style)


def note(axes: Axes, text: str, at: tuple[float, float], by: tuple[float, float], **kw: Any) -> None:
    """Write a text beside a point, shifted by points of the page, legible over lines."""
    note = axes.annotate(text, at, by, textcoords="offset points", fontsize=9.5, **kw)
    note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def log_axis(axes: Axes, values: Sequence[float], text: Callable[[Any], str]) -> None:
    """Tick a logarithmic x axis at the values; labels that would touch are left out."""
    axes.set_xscale("log", base=2)
    span = np.log(values[-1] / values[0])
    labels, last = [], -np.inf
    for value in values:
        fits = np.log(value) - last >= 0.07 * span
        labels.append(text(value) if fits else "")
        last = np.log(value) if fits else last
    axes.set_xticks(values, labels)


def digits(ms: float) -> str:
    """Return milliseconds with three significant digits, two decimals at most."""
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"


def tokens(count: int) -> str:
    """Return a count of tokens, in K (1024) where it is whole."""
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def count_samples(records: Iterable[Record]) -> int:
    """Return how many samples the records are of."""
    return len({record["id"] for record in records})


def of_what(model: str, dsa: str, records: Sequence[Record]) -> str:
    """Return what a plot is of: the model, the method, and how many samples."""
    n = count_samples(records)
    return f"{model} x {dsa}, n = {n} sample{'s' * (n != 1)}"


def values(records: Iterable[Record], column: str) -> list[float]:
    """Return the known numbers of a column."""
    values = [record.get(column) for record in records]
    return [value for value in values if value is not None and np.isfinite(value)]


def weighted(records: Iterable[Record], column: str) -> float | None:
    """Return the mean of a column's known numbers, weighted by the steps of each record."""
    known = [(record, value) for record in records for value in values([record], column)]
    return float(np.average([v for _, v in known], weights=[r["steps"] for r, _ in known])) if known else None


def means(
    records: Iterable[Record], by: str, column: str, least: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the values of `by`, in order, and the column's mean, low and high band at each.

    Values of `by` with fewer records than the share `least` of the fullest are left out.
    """
    groups: dict[float, list[float]] = {}
    for record in records:
        groups.setdefault(record[by], []).extend(values([record], column))
    most = max(map(len, groups.values()), default=0)
    kept = {at: own for at, own in sorted(groups.items()) if own and len(own) >= least * most}
    bands = np.array([np.percentile(own, BAND) for own in kept.values()]).reshape(-1, 2)
    means = np.array([np.mean(own) for own in kept.values()])
    return np.array(list(kept)), means, bands[:, 0], bands[:, 1]


def save(
    build: Callable[[Sequence[Record], str, str], Figure | None],
    records: Sequence[Record],
    folder: Path,
    name: str,
    model: str,
    dsa: str,
) -> list[Path]:
    """Write what `build` makes of the records to <folder>/<name>.png; nothing to draw is a log line and no file."""
    figure = build(records, model, dsa)
    if figure is None:
        log.info("no plot %s: the %d records hold nothing to draw", name, len(records))
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    FigureCanvasAgg(figure).print_png(path)
    return [path]
