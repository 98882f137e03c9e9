# SPDX-License-Identifier: Apache-2.0
"""profile/profile.json as PNG plots: what fits beside a selection, and where the time of a layer goes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prr_pipeline.tracking.figure import (
    BLUE,
    GREY,
    RED,
    SKY,
    STYLE,
    Record,
    digits,
    legend,
    log_axis,
    means,
    new_figure,
    note,
    save,
    tokens,
    values,
)

LAYER_PARTS = {
    "qkv": ("projections", GREY),
    "select": ("select", BLUE),
    "attend": ("attend and merge, A", SKY),
    "ffn": ("rest of the layer", "0.88"),
}


def plot_latency(profile: Record, folder: Path) -> list[Path]:
    """Draw profile/profile.json to latency.png: selection and speculation against context."""

    def build(rows: Sequence[Record], model: str, dsa: str) -> Figure | None:
        return latency_figure(profile)

    return save(build, profile["rows"], folder, "latency", profile["model"], profile["dsa"])


def plot_layer(profile: Record, folder: Path) -> list[Path]:
    """Draw profile/profile.json to layer.png: the parts of a serial layer by context."""

    def build(rows: Sequence[Record], model: str, dsa: str) -> Figure | None:
        return layer_figure(profile)

    return save(build, profile["breakdown"], folder, "layer", profile["model"], profile["dsa"])


@rc_context(STYLE)
def layer_figure(profile: Record) -> Figure | None:
    """Stack the parts of a layer of a serial step by context, with the share of selection and attention (figure 2b)."""
    rows = profile["breakdown"]
    if not rows:
        return None
    subtitle = f"{profile['model']} x {profile['dsa']}, {profile['device']}; each part timed alone"
    figure, (axes,) = new_figure("Where the time of a serial layer goes", subtitle)
    at, top = np.arange(len(rows)), np.zeros(len(rows))
    for part, (label, colour) in LAYER_PARTS.items():
        times = np.array([row[f"{part}_us"] for row in rows])
        axes.bar(at, times, 0.6, top, color=colour, label=label)
        top += times
    for x, (row, total) in enumerate(zip(rows, top, strict=True)):
        share = (row["select_us"] + row["attend_us"]) / total
        note(axes, f"{digits(total)} \u00b5s, {100 * share:.0f} %", (x, total), (0, 5), ha="center")
    axes.set_xticks(at, [tokens(row["context"]) for row in rows])
    axes.set_xlabel("context, tokens; %: selection and attention")
    axes.set_ylabel("time per layer and step, \u00b5s")
    axes.set_ylim(0, 1.12 * top.max())
    legend(figure, axes)
    return figure


@rc_context(STYLE)
def latency_figure(profile: Record) -> Figure | None:
    """Draw selection, and speculative attention by delta, against context; star the safe deltas.

    The safe delta is what the budget policy found; one that is off the measured grid is placed between its neighbours.
    """
    rows = profile["rows"]
    if not values(rows, "attend_us"):
        return None
    contexts = sorted({row["context"] for row in rows})
    deltas = sorted({row["delta"] for row in rows})
    subtitle = f"{profile['model']} x {profile['dsa']}, {profile['device']}"
    subtitle += f", {len(contexts)} context{'s' * (len(contexts) != 1)} x {len(deltas)} delta{'s' * (len(deltas) != 1)}"
    figure, (axes,) = new_figure("What can be attended while the selection runs", subtitle)
    for index, delta in reversed(list(enumerate(deltas))):
        own = [row for row in rows if row["delta"] == delta]
        context, mean, *_ = means(own, "context", "attend_us")
        colour = colormaps["Blues"](0.35 + 0.6 * index / max(1, len(deltas) - 1))
        axes.plot(context, mean, "o-", color=colour, markersize=4, label=f"attend, delta {delta:g}")
    context, select, *_ = means(rows, "context", "select_us")
    axes.plot(context, select, "s--", color=RED, linewidth=2.2, label="select")
    _safe_deltas(axes, rows, profile.get("safe_delta", ()))
    log_axis(axes, contexts, tokens)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("time per layer and step, \u00b5s")
    axes.set_ylim(0, 1.08 * max(*values(rows, "attend_us"), *values(rows, "select_us")))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9.5)
    return figure


def _safe_deltas(axes: Axes, rows: Sequence[Record], safe: Iterable[Record]) -> None:
    """Mark each safe delta on the attention that it costs, and a cross on a selection too short."""
    points: dict[str, list[tuple[float, float]]] = {"safe delta": [], "no safe delta": []}
    for entry in safe:
        here = [row for row in rows if row["context"] == entry["context"]]
        delta, attend, *_ = means(here, "delta", "attend_us")
        if entry["delta"] > 0 and len(delta):
            point = (entry["context"], float(np.interp(entry["delta"], delta, attend)))
            points["safe delta"].append(point)
            note(axes, f"{entry['delta']:.3g}", point, (9, 0), ha="left", va="center", weight="bold")
        elif select := values(here, "select_us"):
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
