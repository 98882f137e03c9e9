# SPDX-License-Identifier: Apache-2.0
"""The records of a job as PNG plots; each is a builder of a figure and a saver, so that both test.

Builders take the records that the stages write, as lists of dicts, and return a matplotlib figure,
or None where the records hold nothing to draw. Neither a display nor a network is needed.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from prr_pipeline.config import MODES
from prr_pipeline.tracking.figure import (
    BAND_NOTE,
    BLUE,
    GREY,
    ORANGE,
    RED,
    SKY,
    STYLE,
    Record,
    count_samples,
    digits,
    legend,
    line,
    log_axis,
    new_figure,
    note,
    of_what,
    save,
    values,
    weighted,
)
from prr_pipeline.tracking.profile_plots import plot_latency as plot_latency  # all savers are to be found here
from prr_pipeline.tracking.profile_plots import plot_layer as plot_layer

PARTS = {
    "select": ("select", BLUE),
    "attend": ("attend", SKY),
    "repair": ("merge and repair", RED),  # modes without speculation merge too
    "predict": ("predict", ORANGE),
    "other": ("other", GREY),
    "graph": ("whole step, one CUDA graph", SKY),
}
PREDICTORS = {
    "ema": ("EMA with trend", BLUE, "o"),
    "last_scores": ("last scores", ORANGE, "s"),
    "last_a": ("last A", "0.45", "^"),
}
MAX_PANELS = 4
MAX_POINTS = 200  # of a line


# ---- savers ----


def plot_breakdown(steps: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw the step records of decode to breakdown.png: the parts of a decode step by mode."""
    return save(breakdown_figure, steps, folder, "breakdown", model, dsa)


def plot_overlap(steps: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw the step records of decode to overlap.png: A with the A before, and P with A, by step."""
    return save(overlap_figure, steps, folder, "overlap", model, dsa)


def plot_hit_rate(samples: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw calibrate/samples.jsonl to hit_rate.png: hit rate against delta by predictor."""
    return save(hit_rate_figure, samples, folder, "hit_rate", model, dsa)


def plot_layers(layers: Sequence[Record], folder: Path, *, model: str, dsa: str) -> list[Path]:
    """Draw the layer records of decode to layers.png: missed and wasted blocks a layer."""
    return save(layers_figure, layers, folder, "layers", model, dsa)


# ---- figures ----


@rc_context(STYLE)
def breakdown_figure(steps: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Stack the mean busy time of each part of a step, a bar a mode, with its wall time as a line.

    Parts that run beside each other add up to more than the wall time: the difference is hidden. Steps without parts
    (of a CUDA graph) have a bar of their wall time.
    """
    steps = [step if "other_ms" in step else {**step, "graph_ms": step["ms"]} for step in steps]
    by_mode = {mode: [step for step in steps if step["mode"] == mode] for mode in MODES}
    by_mode = {mode: own for mode, own in by_mode.items() if values(own, "ms")}
    if not by_mode:
        return None
    subtitle = f"{of_what(model, dsa, steps)}, {_counts(map(len, by_mode.values()))} a mode"
    figure, (axes,) = new_figure("Where the time of a decode step goes", subtitle)
    wall = np.array([np.mean(values(own, "ms")) for own in by_mode.values()])
    at, top = np.arange(len(wall)), np.zeros(len(wall))
    parts = {part: np.array([np.mean(values(own, f"{part}_ms") or [0]) for own in by_mode.values()]) for part in PARTS}
    full = float(max(*sum(parts.values(), top), *wall))
    written = np.zeros(len(wall))  # beside each bar, up to there
    for part, times in parts.items():
        if times.any():
            label, colour = PARTS[part]
            axes.bar(at, times, 0.6, top, color=colour, label=label)
            written = _number(axes, top, times, full, "white" if colour in (BLUE, RED) else "black", written)
            top = top + times
    axes.hlines(wall, at - 0.38, at + 0.38, color="black", linewidth=2.2, label="wall time")
    for x, time, busy in zip(at, wall, top, strict=True):
        above = (float(x), float(max(time, busy)))
        hidden = f"{digits(busy - time)} hidden" if busy > 1.01 * time else ""
        note(axes, hidden, above, (0, 5), ha="center", color="0.35")
        note(axes, f"{digits(time)} ms", above, (0, 18 if hidden else 5), ha="center", weight="bold")
    axes.set_xticks(at, list(by_mode))
    axes.set_ylabel("mean time per decode step, ms")
    axes.set_ylim(0, 1.15 * full)
    legend(figure, axes)
    return figure


def _number(
    axes: Axes, bottom: np.ndarray, times: np.ndarray, full: float, ink: str, written: np.ndarray
) -> np.ndarray:
    """Write each time into its segment, or beside the bar where that is too thin; return how far up that is written."""
    line_height = 0.048 * full
    written = written.copy()
    for x, (low, time) in enumerate(zip(bottom, times, strict=True)):
        style: dict[str, Any] = {"va": "center", "fontsize": 8.5}
        middle = float(low + time / 2)
        if time >= line_height:
            axes.text(x, middle, digits(time), color=ink, ha="center", **style)
        elif time >= 0.002 * full:  # less is not to be seen
            at = max(middle, float(written[x]) + line_height / 2)
            axes.text(x + 0.31, at, digits(time), color="0.25", ha="left", **style)
            written[x] = at + line_height / 2
    return written


def _counts(steps: Iterable[int]) -> str:
    low, high = min(known := list(steps)), max(known)
    return f"{low:,} step{'s' * (low != 1)}" if low == high else f"{low:,} to {high:,} steps"


@rc_context(STYLE)
def overlap_figure(steps: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Draw the overlap of P with A, and of A with the A before, by step (dynamic blocks, percent).

    Means over the samples and a band; a panel a task, or one in all where there are more than four.
    The A before is that of prr, or of serial where prr was not run. Each line ends at the last step
    that at least half of its samples reached; of a long decode, a point is the mean of some steps.
    The mean that is written is hit_rate_dynamic or overlap_last of the mode's row of the results: over
    all steps of all samples that have a value (those after the line's end too; a sample's first step
    has no A before), each step with the same weight.
    """
    group = 1 + max((step["step"] for step in steps), default=0) // MAX_POINTS
    steps = [{**step, "step": step["step"] // group * group} for step in steps]
    prr = [step for step in steps if step["mode"] == "prr"]
    base = prr or [step for step in steps if step["mode"] == "serial"]
    curves = (
        ("P (forecast) with A", "hit_dynamic", prr, BLUE),
        ("A with the A of the step before", "overlap_last", base, RED),
    )
    if not any(values(records, column) for _, column, records, _ in curves):
        return None
    tasks = sorted({step["task"] for step in base})
    panels = {task: {task} for task in tasks} if len(tasks) <= MAX_PANELS else {f"{len(tasks)} tasks": set(tasks)}
    title = "How much of a selection was known before the step"
    figure, all_axes = new_figure(title, of_what(model, dsa, base), columns=len(panels))
    for axes, (name, shown) in zip(all_axes, panels.items(), strict=True):
        for index, (label, column, records, colour) in enumerate(curves):
            own = [record for record in records if record["task"] in shown]
            line(axes, own, "step", column, label=label, color=colour)
            if known := values(own, column):
                mean = f"mean of all steps {100 * np.mean(known):.1f} %"
                place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
                axes.annotate(mean, (0, 1), (0, 17 - 13 * index), color=colour, fontsize=9.5, **place)
        n = count_samples(record for record in base if record["task"] in shown)
        of = f"{name}, n = {n}" if len(panels) > 1 else name  # else the subtitle says how many
        axes.set_title(of, loc="left", fontsize=10, pad=32)  # the means stand under it
        axes.set_xlabel("decode step")
        axes.margins(x=0)
    all_axes[0].set_ylabel("overlap of dynamic blocks, %")
    all_axes[0].set_ylim(max(0, all_axes[0].get_ylim()[0]), 101)
    all_axes[0].set_yticks([tick for tick in all_axes[0].get_yticks() if tick <= 100])
    legend(figure, all_axes[0], BAND_NOTE + f"; a point: {group} steps" * (group > 1))
    return figure


@rc_context(STYLE)
def hit_rate_figure(samples: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Draw the hit rate of each predictor against delta, of dynamic and of all blocks (percent).

    A predictor that was measured at one delta only (the last A has no more blocks) is level.
    """
    flat = [{"id": sample["id"], **entry} for sample in samples for entry in sample.get("locality", ())]
    if not values(flat, "hit_dynamic"):
        return None
    title = "Share of the selected blocks that was predicted"
    figure, all_axes = new_figure(title, of_what(model, dsa, flat), columns=2)
    kinds = (("dynamic blocks", "hit_dynamic"), ("all blocks, forced ones too", "hit_all"))
    deltas = sorted({entry["delta"] for entry in flat})
    for axes, (name, column) in zip(all_axes, kinds, strict=True):
        for predictor, (label, colour, marker) in PREDICTORS.items():
            own = [entry for entry in flat if entry["predictor"] == predictor]
            style = {"marker": marker}
            if len({entry["delta"] for entry in own}) == 1:
                own = [{**entry, "delta": delta} for entry in own for delta in deltas]
                style = {"linestyle": "--"}
            line(axes, own, "delta", column, label=label, color=colour, **style)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("budget delta = |P| / |A|")
        log_axis(axes, deltas, "{:g}".format)
    all_axes[0].set_ylabel("hit rate, %")
    all_axes[0].set_ylim(top=101)
    legend(figure, all_axes[0], BAND_NOTE)
    return figure


@rc_context(STYLE)
def layers_figure(layers: Sequence[Record], model: str, dsa: str) -> Figure | None:
    """Draw the missed and the wasted blocks of each layer, prr beside reuse_repair.

    A record counts as often as it has steps. A mode that predicted nothing has no bars; the subtitle says so.
    """
    colours = {"reuse_repair": ORANGE, "prr": BLUE}
    modes = {mode: [record for record in layers if record["mode"] == mode] for mode in colours}
    shown = {mode: own for mode, own in modes.items() if values(own, "missed")}
    if not shown:
        return None
    title = "Missed blocks (to repair) and wasted blocks, by layer"
    idle = "".join(f", {mode} predicted nothing" for mode, own in modes.items() if own and mode not in shown)
    figure, all_axes = new_figure(title, of_what(model, dsa, [r for own in shown.values() for r in own]) + idle, rows=2)
    width = 0.84 / len(shown)
    for axes, name in zip(all_axes, ("missed", "wasted"), strict=True):
        for index, (mode, own) in enumerate(shown.items()):
            by_layer = {layer: [r for r in own if r["layer"] == layer] for layer in sorted({r["layer"] for r in own})}
            heights = {layer: mean for layer, r in by_layer.items() if (mean := weighted(r, name)) is not None}
            shift = (index - (len(shown) - 1) / 2) * width
            total = f"{mode} (mean {weighted(own, name):.2f})"
            axes.bar(np.array(list(heights)) + shift, list(heights.values()), width, color=colours[mode], label=total)
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        axes.set_ylabel(f"{name} blocks\nper KV head and step")
        axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), fontsize=9)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    first = min(record["layer"] for own in shown.values() for record in own)
    dense = {0: "", 1: " (0 is dense)", 2: " (0 and 1 are dense)"}.get(first, f" (0 to {first - 1} are dense)")
    all_axes[1].set_xlabel(f"layer{dense}")
    return figure
