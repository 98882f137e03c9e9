# SPDX-License-Identifier: Apache-2.0
"""The records of a job as PNG plots; each is a builder of a figure and a saver, so that both test.

Builders take the records that the stages write, as lists of dicts, and return a matplotlib figure,
or None where the records hold nothing to draw. Neither a display nor a network is needed.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator

from prr_pipeline.config import MODES

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
PARTS = {
    "select": ("select", BLUE),
    "attend": ("attend", SKY),
    "repair": ("merge and repair", RED),  # modes without speculation merge too
    "predict": ("predict", ORANGE),
    "other": ("other", GREY),
}
PREDICTORS = {
    "ema": ("EMA with trend", BLUE, "o"),
    "last_scores": ("last scores", ORANGE, "s"),
    "last_a": ("last A", "0.45", "^"),
}
BAND = (10, 90)  # percentiles over the samples that a band spans
MAX_PANELS = 4
MAX_POINTS = 200  # of a line


# ---- savers ----


def plot_breakdown(steps: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw the step records of decode to breakdown.png: the parts of a decode step by mode."""
    return _save(breakdown_figure, steps, folder, "breakdown", model, dsa)


def plot_overlap(steps: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw the step records of decode to overlap.png: A with the A before, and P with A, by step."""
    return _save(overlap_figure, steps, folder, "overlap", model, dsa)


def plot_hit_rate(samples: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw calibrate/samples.jsonl to hit_rate.png: hit rate against delta by predictor."""
    return _save(hit_rate_figure, samples, folder, "hit_rate", model, dsa)


def plot_layers(layers: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw the layer records of decode to layers.png: missed and wasted blocks a layer."""
    return _save(layers_figure, layers, folder, "layers", model, dsa)


def plot_latency(profile: Record, folder: Path) -> list[Path]:
    """Draw profile/profile.json to latency.png: selection and speculation against context."""

    def build(rows: Sequence[Record], model: str, dsa: str) -> Figure | None:
        return latency_figure(profile)

    return _save(build, profile["rows"], folder, "latency", profile["model"], profile["dsa"])


def _save(
    build: Callable[[Sequence[Record], str, str], Figure | None],
    records: Sequence[Record],
    folder: Path,
    name: str,
    model: str,
    dsa: str,
) -> list[Path]:
    figure = build(records, model, dsa)
    if figure is None:
        log.info("no plot %s: the %d records hold nothing to draw", name, len(records))
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    FigureCanvasAgg(figure).print_png(path)
    return [path]


# ---- figures ----


@rc_context(STYLE)
def breakdown_figure(steps: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Stack the mean busy time of each part of a step, a bar a mode, with its wall time as a line.

    Parts that run beside each other add up to more than the wall time: the difference is hidden.
    """
    by_mode = {mode: [step for step in steps if step["mode"] == mode] for mode in MODES}
    by_mode = {mode: own for mode, own in by_mode.items() if _values(own, "ms")}
    if not by_mode:
        return None
    subtitle = f"{_of(model, dsa, steps)}, {sum(map(len, by_mode.values())):,} steps"
    figure, (axes,) = _figure("Where the time of a decode step goes", subtitle)
    wall = np.array([np.mean(_values(own, "ms")) for own in by_mode.values()])
    at = np.arange(len(wall))
    top = np.zeros(len(wall))
    for part, (label, colour) in PARTS.items():
        times = np.array([np.mean(_values(own, f"{part}_ms") or [0]) for own in by_mode.values()])
        if times.any():
            bars = axes.bar(at, times, 0.6, top, color=colour, label=label)
            texts = [_digits(time) if time > 0.06 * wall.max() else "" for time in times]
            ink = "white" if colour in (BLUE, RED) else "black"
            axes.bar_label(bars, texts, label_type="center", fontsize=8.5, color=ink)
            top += times
    axes.hlines(wall, at - 0.38, at + 0.38, color="black", linewidth=2.2, label="wall time")
    for x, time, busy in zip(at, wall, top, strict=True):
        above = (float(x), float(max(time, busy)))
        hidden = f"{_digits(busy - time)} hidden" if busy > 1.01 * time else ""
        _note(axes, hidden, above, (0, 5), ha="center", color="0.35")
        _note(axes, f"{_digits(time)} ms", above, (0, 18 if hidden else 5), ha="center", weight="bold")
    axes.set_xticks(at, list(by_mode))
    axes.set_ylabel("mean time per decode step, ms")
    axes.set_ylim(0, 1.15 * max(top.max(), wall.max()))
    _legend(figure, axes)
    return figure


@rc_context(STYLE)
def overlap_figure(steps: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Draw the overlap of P with A, and of A with the A before, by step (dynamic blocks, percent).

    Means over the samples and a band; a panel a task, or one in all where there are more than four.
    The A before is that of prr, or of serial where prr was not run. Each line ends at the last step
    that at least half of its samples reached; of a long decode, a point is the mean of some steps.
    The mean that is written is the results table's: over all steps of all samples, those after the
    line's end too, each step with the same weight.
    """
    group = 1 + max((step["step"] for step in steps), default=0) // MAX_POINTS
    steps = [{**step, "step": step["step"] // group * group} for step in steps]
    prr = [step for step in steps if step["mode"] == "prr"]
    base = prr or [step for step in steps if step["mode"] == "serial"]
    curves = (
        ("P (forecast) with A", "hit_dynamic", prr, BLUE),
        ("A with the A of the step before", "overlap_last", base, RED),
    )
    if not any(_values(records, column) for _, column, records, _ in curves):
        return None
    tasks = sorted({step["task"] for step in base})
    panels = tasks if 1 < len(tasks) <= MAX_PANELS else [""]
    title = "How much of a selection was known before the step"
    figure, all_axes = _figure(title, _of(model, dsa, base), columns=len(panels))
    for axes, task in zip(all_axes, panels, strict=True):
        for index, (label, column, records, colour) in enumerate(curves):
            own = [record for record in records if task in ("", record["task"])]
            _line(axes, own, "step", column, label=label, color=colour)
            if values := _values(own, column):
                mean = f"mean of all steps {100 * np.mean(values):.1f} %"
                text = axes.text(0.98, 0.10 - 0.07 * index, mean, transform=axes.transAxes)
                text.set(color=colour, ha="right", fontsize=9.5)
        if task:
            axes.set_title(task, loc="left", fontsize=10)
        axes.set_xlabel("decode step")
        axes.margins(x=0)
    all_axes[0].set_ylabel("overlap of dynamic blocks, %")
    low = all_axes[0].get_ylim()[0]
    all_axes[0].set_yticks([tick for tick in all_axes[0].get_yticks() if 0 <= tick <= 100])
    all_axes[0].set_ylim(low - 0.22 * (101 - low), 101)  # room for the means under the lines
    _legend(figure, all_axes[0], _BAND_NOTE + f"; a point: {group} steps" * (group > 1))
    return figure


@rc_context(STYLE)
def hit_rate_figure(samples: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Draw the hit rate of each predictor against delta, of dynamic and of all blocks (percent).

    A predictor that was measured at one delta only (the last A has no more blocks) is level.
    """
    flat = [{"id": sample["id"], **entry} for sample in samples for entry in sample.get("locality", ())]
    if not _values(flat, "hit_dynamic"):
        return None
    title = "Share of the selected blocks that was predicted"
    figure, all_axes = _figure(title, _of(model, dsa, flat), columns=2)
    kinds = (("dynamic blocks", "hit_dynamic"), ("all blocks, forced ones too", "hit_all"))
    deltas = sorted({entry["delta"] for entry in flat})
    for axes, (name, column) in zip(all_axes, kinds, strict=True):
        for predictor, (label, colour, marker) in PREDICTORS.items():
            own = [entry for entry in flat if entry["predictor"] == predictor]
            style = {"marker": marker}
            if len({entry["delta"] for entry in own}) == 1:
                own = [{**entry, "delta": delta} for entry in own for delta in deltas]
                style = {"linestyle": "--"}
            _line(axes, own, "delta", column, label=label, color=colour, **style)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("budget delta = |P| / |A|")
        _log_axis(axes, deltas, "{:g}".format)
    all_axes[0].set_ylabel("hit rate, %")
    all_axes[0].set_ylim(top=101)
    _legend(figure, all_axes[0], _BAND_NOTE)
    return figure


@rc_context(STYLE)
def layers_figure(layers: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Draw the missed and the wasted blocks of each layer, prr beside reuse_repair.

    A record counts as often as it has steps. A mode that predicted nothing has no bars; the subtitle says so.
    """
    colours = {"reuse_repair": ORANGE, "prr": BLUE}
    modes = {mode: [record for record in layers if record["mode"] == mode] for mode in colours}
    shown = {mode: own for mode, own in modes.items() if _values(own, "missed")}
    if not shown:
        return None
    title = "Missed blocks (to repair) and wasted blocks, by layer"
    idle = "".join(f", {mode} predicted nothing" for mode, own in modes.items() if own and mode not in shown)
    figure, all_axes = _figure(title, _of(model, dsa, [r for own in shown.values() for r in own]) + idle, rows=2)
    width = 0.84 / len(shown)
    for axes, name in zip(all_axes, ("missed", "wasted"), strict=True):
        for index, (mode, own) in enumerate(shown.items()):
            by_layer = {layer: [r for r in own if r["layer"] == layer] for layer in sorted({r["layer"] for r in own})}
            means = {layer: mean for layer, r in by_layer.items() if (mean := _weighted(r, name)) is not None}
            shift = (index - (len(shown) - 1) / 2) * width
            total = f"{mode} (mean {_weighted(own, name):.2f})"
            axes.bar(np.array(list(means)) + shift, list(means.values()), width, color=colours[mode], label=total)
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        axes.set_ylabel(f"{name} blocks\nper KV head and step")
        axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), fontsize=9)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    all_axes[1].set_xlabel("layer")
    return figure


@rc_context(STYLE)
def latency_figure(profile: Record) -> Figure | None:
    """Draw selection, and speculative attention by delta, against context; star the safe deltas.

    The safe delta is the largest whose attention fits into the selection; one that is off the
    measured grid is placed between its neighbours.
    """
    rows = profile["rows"]
    if not _values(rows, "attend_us"):
        return None
    contexts = sorted({row["context"] for row in rows})
    deltas = sorted({row["delta"] for row in rows})
    subtitle = f"{profile['model']} x {profile['dsa']}, {profile['device']}"
    subtitle += f", {len(contexts)} contexts x {len(deltas)} deltas"
    figure, (axes,) = _figure("What can be attended while the selection runs", subtitle)
    for index, delta in reversed(list(enumerate(deltas))):
        own = [row for row in rows if row["delta"] == delta]
        context, mean, *_ = _means(own, "context", "attend_us")
        colour = colormaps["Blues"](0.35 + 0.6 * index / max(1, len(deltas) - 1))
        axes.plot(context, mean, "o-", color=colour, markersize=4, label=f"attend, delta {delta:g}")
    context, select, *_ = _means(rows, "context", "select_us")
    axes.plot(context, select, "s--", color=RED, linewidth=2.2, label="select")
    _safe_deltas(axes, rows, profile.get("safe_delta", ()))
    _log_axis(axes, contexts, _tokens)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("time per layer and step, \u00b5s")
    axes.set_ylim(0, 1.08 * max(*_values(rows, "attend_us"), *_values(rows, "select_us")))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9.5)
    return figure


def _safe_deltas(axes: Axes, rows: Sequence[Record], safe: Iterable[Record]) -> None:
    """Mark each safe delta on the attention that it costs, and a cross on a selection too short."""
    points: dict[str, list[tuple[float, float]]] = {"safe delta": [], "no safe delta": []}
    for entry in safe:
        here = [row for row in rows if row["context"] == entry["context"]]
        delta, attend, *_ = _means(here, "delta", "attend_us")
        if entry["delta"] > 0 and len(delta):
            point = (entry["context"], float(np.interp(entry["delta"], delta, attend)))
            points["safe delta"].append(point)
            _note(axes, f"{entry['delta']:.3g}", point, (0, 9), ha="center", weight="bold")
        elif select := _values(here, "select_us"):
            points["no safe delta"].append((entry["context"], float(np.mean(select))))
    for (label, own), marker in zip(points.items(), ("*", "X"), strict=True):
        if own:
            style: dict[str, Any] = {"color": "black", "markeredgecolor": "white"}
            size = 15 if marker == "*" else 10
            axes.plot(
                *zip(*own, strict=True),
                marker,
                markersize=size,
                label=label,
                linestyle="none",
                **style,
            )


# ---- parts of a figure ----

_BAND_NOTE = f"line: mean over the samples; band: percentiles {BAND[0]} to {BAND[1]}"


def _figure(title: str, subtitle: str, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, 4.8), dpi=DPI, layout="constrained")
    head = figure.suptitle(f"{title}\n ", x=0.012, ha="left", fontsize=12.5, weight="bold")
    under = Annotation(subtitle, (0, 0), xycoords=head, va="bottom", color="0.35", fontsize=10)
    under.set_in_layout(False)  # the second line of the title keeps its place
    figure.add_artist(under)
    axes = figure.subplots(rows, columns, sharex=rows > 1, sharey=columns > 1, squeeze=False)
    return figure, list(axes.flat)


def _legend(figure: Figure, axes: Axes, note: str | None = None) -> None:
    """Put the legend of one of the axes under all of them, with a note."""
    handles, labels = axes.get_legend_handles_labels()
    style: dict[str, Any] = {"title": note, "title_fontsize": 8.5, "fontsize": 9.5}
    figure.legend(handles=handles, labels=labels, loc="outside lower center", ncols=6, **style)


def _line(axes: Axes, records: Sequence[Record], by: str, column: str, **style: Any) -> None:
    """Draw a column's mean (a fraction, drawn in percent) against `by`, and its band."""
    at, *bands = _means(records, by, column, least=0.5)
    if not len(at):
        return
    mean, low, high = (100 * band for band in bands)
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(at, mean, linewidth=1.8, markersize=5, **style)


def _note(axes: Axes, text: str, at: tuple[float, float], by: tuple[float, float], **kw: Any) -> None:
    """Write a text beside a point, shifted by points of the page, legible over lines."""
    note = axes.annotate(text, at, by, textcoords="offset points", fontsize=9.5, **kw)
    note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _log_axis(axes: Axes, values: Sequence[float], text: Callable[[Any], str]) -> None:
    """Tick a logarithmic x axis at the values; labels that would touch are left out."""
    axes.set_xscale("log", base=2)
    span = np.log(values[-1] / values[0])
    labels, last = [], -np.inf
    for value in values:
        fits = np.log(value) - last >= 0.07 * span
        labels.append(text(value) if fits else "")
        last = np.log(value) if fits else last
    axes.set_xticks(values, labels)


def _digits(ms: float) -> str:
    """Return milliseconds with three significant digits, two decimals at most."""
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def _of(model: str, dsa: str, records: Sequence[Record]) -> str:
    """Return what a plot is of: the model, the method, and how many samples."""
    n = len({record["id"] for record in records})
    return f"{model} x {dsa}, n = {n} sample{'s' * (n != 1)}"


def _values(records: Iterable[Record], column: str) -> list[float]:
    """Return the known numbers of a column."""
    values = [record.get(column) for record in records]
    return [value for value in values if value is not None and np.isfinite(value)]


def _weighted(records: Iterable[Record], column: str) -> float | None:
    """Return the mean of a column's known numbers, weighted by the steps of each record."""
    known = [(record, value) for record in records for value in _values([record], column)]
    return float(np.average([v for _, v in known], weights=[r["steps"] for r, _ in known])) if known else None


def _means(
    records: Iterable[Record], by: str, column: str, least: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the values of `by`, in order, and the column's mean, low and high band at each.

    Values of `by` with fewer records than the share `least` of the fullest are left out.
    """
    groups: dict[float, list[float]] = {}
    for record in records:
        groups.setdefault(record[by], []).extend(_values([record], column))
    most = max(map(len, groups.values()), default=0)
    kept = {at: own for at, own in sorted(groups.items()) if own and len(own) >= least * most}
    bands = np.array([np.percentile(own, BAND) for own in kept.values()]).reshape(-1, 2)
    means = np.array([np.mean(own) for own in kept.values()])
    return np.array(list(kept)), means, bands[:, 0], bands[:, 1]
