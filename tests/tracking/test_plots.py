# SPDX-License-Identifier: Apache-2.0
"""Figures hold the numbers of the records, and the savers write PNG files or say why not."""

import itertools
import logging
import struct

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from prr_pipeline.tracking import plots, profile_plots

pytestmark = pytest.mark.filterwarnings("error")

OF = {"model": "tiny", "dsa": "quest"}


def step(mode, index=0, sample="a", task="t", **values):
    return {"id": sample, "task": task, "mode": mode, "step": index, **values}


def curve(axes, label):
    """The x and y values of the line of that label."""
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return list(line.get_xdata()), list(line.get_ydata())


def bars(axes, label):
    (container,) = [each for each in axes.containers if each.get_label().startswith(label)]
    return [round(bar.get_height(), 6) for bar in container]


def heading(figure):
    (under,) = [artist for artist in figure.artists if hasattr(artist, "get_text")]
    return figure.get_suptitle().strip(), under.get_text()


@pytest.fixture
def steps():
    parts = {"select_ms": 2.0, "attend_ms": 4.0, "other_ms": 1.0}
    return [
        step("prr", 0, ms=5.0, repair_ms=0.5, predict_ms=0.5, **parts),
        step("prr", 1, ms=6.0, repair_ms=1.5, predict_ms=None, **parts),
        step("serial", 0, sample="b", ms=7.0, repair_ms=None, predict_ms=None, **parts),
    ]


def test_breakdown_stacks_the_mean_parts_in_canonical_order(steps):
    figure = plots.breakdown_figure(steps, "tiny", "quest")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["serial", "prr"]
    expected = {"select": [2, 2], "attend": [4, 4], "merge and repair": [0, 1], "predict": [0, 0.5]}
    for part, heights in (expected | {"other": [1, 1]}).items():
        assert bars(axes, part) == heights
    (wall,) = [each for each in axes.collections if each.get_label() == "wall time"]
    assert [segment[0][1] for segment in wall.get_segments()] == [7.0, 5.5]
    texts = {text.get_text() for text in axes.texts}
    assert {"7.00 ms", "5.50 ms", "3.00 hidden"} <= texts
    assert heading(figure) == (
        "Where the time of a decode step goes",
        "tiny x quest, n = 2 samples, 1 to 2 steps a mode",
    )
    assert axes.get_ylabel() == "mean time per decode step, ms"


def test_breakdown_counts_the_steps_of_one_mode_and_numbers_every_segment_that_is_seen():
    thin = {"select_ms": 0.3, "attend_ms": 0.2, "repair_ms": 0.1, "predict_ms": 0.001, "other_ms": 9.399}
    steps = [step(mode, i, ms=10.0, **thin) for mode in ("serial", "reuse", "prr") for i in range(1200)]
    figure = plots.breakdown_figure(steps, "tiny", "quest")
    (axes,) = figure.axes
    assert heading(figure)[1] == "tiny x quest, n = 1 sample, 1,200 steps a mode"
    numbers = [text for text in axes.texts if not isinstance(text, Annotation)]
    assert [text.get_text() for text in numbers] == [x for x in ("0.30", "0.20", "0.10", "9.40") for _ in range(3)]
    *thins, thick = numbers[::3]  # of the first bar
    assert all(text.get_position()[0] > 0.3 for text in thins), "beside the bar, whose half width is 0.3"
    assert thick.get_position()[0] == 0
    heights = [text.get_position()[1] for text in thins]
    assert min(np.diff(heights)) > 0.4, "one above another"


def test_overlap_is_the_mean_over_samples_with_a_panel_a_task():
    records = []
    for task, low, high in (("t1", 0.6, 0.8), ("t2", 0.5, 0.5)):
        for sample, hit in (("a", low), ("b", high)):
            last = 4 if sample == "a" else 3
            for index in range(last):
                records.append(
                    step(
                        *("prr", index, f"{task}/{sample}", task),
                        hit_dynamic=0.9 + 0.01 * index,
                        overlap_last=hit if index else None,
                    )
                )
    records.append(step("serial", 0, hit_dynamic=None, overlap_last=0.1))  # prr has its own A
    figure = plots.overlap_figure(records, "tiny", "quest")
    first, second = figure.axes
    assert (first.get_title("left"), second.get_title("left")) == ("t1, n = 2", "t2, n = 2")
    at, percent = curve(first, "P (forecast) with A")
    assert at == [0, 1, 2, 3] and percent == pytest.approx([90, 91, 92, 93])
    at, percent = curve(first, "A with the A of the step before")
    assert at == [1, 2, 3] and percent == pytest.approx([70, 70, 60])
    assert curve(second, "A with the A of the step before")[1] == pytest.approx([50, 50, 50])
    assert [text.get_text() for text in first.texts] == ["mean of all steps 91.3 %", "mean of all steps 68.0 %"]
    assert heading(figure)[1] == "tiny x quest, n = 4 samples"


@pytest.mark.parametrize("low", [0.0, 0.5, 1.0])
def test_overlap_has_no_tick_that_is_no_percentage(low):
    records = [step("prr", i, hit_dynamic=1.0, overlap_last=low) for i in range(4)]
    (axes,) = plots.overlap_figure(records, "tiny", "quest").axes
    ticks = axes.get_yticks()
    assert len(ticks) > 2 and min(ticks) >= 0 and max(ticks) == 100
    bottom, top = axes.get_ylim()
    assert 0 <= bottom <= 100 * low and top == 101, "an axis of percentages ends at none"


@pytest.mark.parametrize(("tasks", "names"), [(1, ["task0"]), (2, ["task0, n = 1", "task1, n = 1"]), (6, ["6 tasks"])])
def test_overlap_names_the_tasks_and_writes_means_above_the_axes(tasks, names):
    records = [
        step("prr", i, f"s{t}", f"task{t}", hit_dynamic=0.5, overlap_last=0.25) for i in range(4) for t in range(tasks)
    ]
    figure = plots.overlap_figure(records, "tiny", "quest")
    assert [axes.get_title("left") for axes in figure.axes] == names
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        written = [text.get_window_extent() for text in axes.texts]
        assert len(written) == 2 and min(box.y0 for box in written) >= axes.get_window_extent().y1
        (title,) = [child for child in axes.get_children() if isinstance(child, Text) and child.get_text() in names]
        boxes = [title.get_window_extent(), *written]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_overlap_of_many_tasks_is_one_panel_and_of_few_samples_ends_early():
    records = [
        step("serial", index, f"s{i}", f"task{i}", overlap_last=0.5, hit_dynamic=None)
        for i in range(6)
        for index in range(10 if i == 0 else 4)
    ]
    (axes,) = plots.overlap_figure(records, "tiny", "quest").axes
    assert curve(axes, "A with the A of the step before") == ([0, 1, 2, 3], [50.0] * 4)
    assert len(axes.get_lines()) == 1


def test_a_long_decode_is_drawn_in_groups_of_steps():
    count = 3 * plots.MAX_POINTS
    records = [step("prr", i, hit_dynamic=(i % 3) / 2, overlap_last=None) for i in range(count)]
    figure = plots.overlap_figure(records, "tiny", "quest")
    at, percent = curve(figure.axes[0], "P (forecast) with A")
    assert at == list(range(0, count, 3)) and set(percent) == {50.0}
    assert "a point: 3 steps" in figure.legends[0].get_title().get_text()


def test_hit_rate_by_delta_and_predictor():
    def sample(name, extra):
        ema = [(1.0, 0.90), (1.5, 0.96), (2.0, 0.98)]
        locality = [{"predictor": "ema", "delta": d, "hit_dynamic": h + extra, "hit_all": 1.0} for d, h in ema]
        last = {"predictor": "last_a", "delta": 1.0, "hit_dynamic": 0.7, "hit_all": 0.8}
        return {"id": name, "locality": [*locality, last]}

    figure = plots.hit_rate_figure([sample("a", 0.0), sample("b", 0.02)], "tiny", "quest")
    dynamic, everything = figure.axes
    at, percent = curve(dynamic, "EMA with trend")
    assert at == [1.0, 1.5, 2.0] and percent == pytest.approx([91, 97, 99])
    assert curve(everything, "EMA with trend")[1] == [100.0] * 3
    assert curve(dynamic, "last A") == ([1.0, 1.5, 2.0], pytest.approx([70.0] * 3))
    assert [label.get_text() for label in dynamic.get_xticklabels()] == ["1", "1.5", "2"]
    assert dynamic.get_ylabel() == "hit rate, %"


def test_layers_are_bars_of_the_two_modes():
    records = [
        {"id": sample, "mode": mode, "layer": layer, "missed": missed + layer, "wasted": 5.0, "steps": 4}
        for sample, extra in (("a", 0), ("b", 2))
        for layer in (2, 3)
        for mode, missed in (("prr", extra), ("reuse_repair", 10 + extra), ("serial", 99))
    ]
    figure = plots.layers_figure(records, "tiny", "quest")
    missed, wasted = figure.axes
    assert bars(missed, "prr (mean 3.50)") == [3, 4]
    assert bars(missed, "reuse_repair") == [13, 14]
    assert bars(wasted, "prr") == [5, 5]
    assert len(missed.containers) == 2
    assert wasted.get_xlabel() == "layer (0 and 1 are dense)"


def test_layers_weigh_each_step_the_same():
    records = [
        {"id": i, "mode": "prr", "layer": 2, "missed": missed, "wasted": 0.0, "steps": steps}
        for i, missed, steps in (("a", 1.0, 90), ("b", 11.0, 10))
    ]
    missed, wasted = plots.layers_figure(records, "tiny", "quest").axes
    assert bars(missed, "prr (mean 2.00)") == [2]
    assert wasted.get_ylim()[0] == 0, "no axis goes below none"


@pytest.mark.parametrize("value", [None, np.nan])
def test_a_mode_without_a_budget_has_no_bars_and_the_others_are_whole(value, tmp_path):
    records = [
        {"id": "a", "mode": mode, "layer": layer, "missed": missed, "wasted": missed, "steps": 3}
        for mode, missed in (("reuse_repair", 2.0), ("prr", value))
        for layer in (1, 2)
    ]
    figure = plots.layers_figure(records, "tiny", "quest")
    for axes in figure.axes:
        (container,) = axes.containers
        assert container.get_label() == "reuse_repair (mean 2.00)"
        low, high = axes.get_xlim()
        assert all(low <= bar.get_x() and bar.get_x() + bar.get_width() <= high for bar in container)
        assert [bar.get_x() + bar.get_width() / 2 for bar in container] == pytest.approx([1, 2]), "over their layer"
    assert heading(figure)[1] == "tiny x quest, n = 1 sample, prr predicted nothing"
    assert plots.plot_layers(records, tmp_path, **OF)


def test_a_layer_that_predicted_only_in_some_samples_counts_those(tmp_path):
    records = [
        {"id": "a", "mode": "prr", "layer": layer, "missed": missed, "wasted": missed, "steps": 3}
        for layer, missed in ((1, 2.0), (2, None))
    ]
    missed, _ = plots.layers_figure(records, "tiny", "quest").axes
    assert bars(missed, "prr (mean 2.00)") == [2]


def test_plots_of_steps_without_predictions_raise_no_warning(tmp_path):
    records = [
        step("prr", i, ms=1.0, select_ms=0.5, hit_dynamic=None, overlap_last=0.5 if i else None) for i in range(4)
    ]
    (axes,) = plots.overlap_figure(records, "tiny", "quest").axes
    assert [text.get_text() for text in axes.texts] == ["mean of all steps 50.0 %"]
    assert plots.plot_overlap(records, tmp_path, **OF) and plots.plot_breakdown(records, tmp_path, **OF)


def test_plots_of_one_context_and_one_delta_raise_no_warning(tmp_path):
    row = {"context": 4096, "delta": 1.0, "select_us": 1.0, "attend_us": 2.0}
    safe = [{"context": 4096, "delta": 0.0}]
    profile = {"model": "m", "dsa": "d", "device": "cpu", "rows": [row], "safe_delta": safe}
    assert plots.plot_latency(profile, tmp_path)
    entry = {"predictor": "last_a", "delta": 1.0, "hit_dynamic": 1.0, "hit_all": 1.0}
    assert plots.plot_hit_rate([{"id": "a", "locality": [entry]}], tmp_path, **OF)


def test_latency_marks_the_safe_deltas():
    select = {4096: 5.0, 8192: 15.0, 16384: 40.0}
    profile = {
        "model": "tiny",
        "dsa": "quest",
        "device": "gpu",
        "rows": [
            {"context": c, "delta": d, "select_us": s, "attend_us": 10 * d}
            for c, s in select.items()
            for d in (1.0, 2.0)
        ],
        "safe_delta": [
            {"context": 4096, "delta": 0.0},
            {"context": 8192, "delta": 1.5},
            {"context": 16384, "delta": 2.0},
        ],
    }
    figure = profile_plots.latency_figure(profile)
    (axes,) = figure.axes
    assert curve(axes, "select") == ([4096, 8192, 16384], [5.0, 15.0, 40.0])
    assert curve(axes, "attend, delta 2")[1] == [20.0] * 3
    assert curve(axes, "safe delta") == ([8192, 16384], [15.0, 20.0])
    assert curve(axes, "no safe delta") == ([4096], [5.0])
    assert [text.get_text() for text in axes.texts] == ["1.5", "2"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4K", "8K", "16K"]
    assert heading(figure)[1] == "tiny x quest, gpu, 3 contexts x 2 deltas"
    first = [row for row in profile["rows"] if (row["context"], row["delta"]) == (8192, 2.0)]
    assert heading(profile_plots.latency_figure(profile | {"rows": first}))[1].endswith("1 context x 1 delta")


def test_savers_write_png_files_of_a_legible_size(steps, tmp_path):
    (path,) = plots.plot_breakdown(steps, tmp_path / "plots", **OF)
    assert path == tmp_path / "plots" / "breakdown.png"
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">2I", head[16:]) == (1600, 960)


@pytest.mark.parametrize(
    "save",
    [plots.plot_breakdown, plots.plot_overlap, plots.plot_hit_rate, plots.plot_layers],
)
def test_nothing_to_draw_is_a_log_line_and_no_file(save, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert save([], tmp_path, **OF) == []
    unknown = [step("prr", ms=None, missed=np.nan, layer=0, locality=[])]
    assert save(unknown, tmp_path, **OF) == []
    assert list(tmp_path.iterdir()) == []
    assert "the 1 records hold nothing to draw" in caplog.text


def test_an_empty_profile_is_no_plot(tmp_path):
    profile = {"model": "m", "dsa": "d", "device": "cpu", "rows": [], "safe_delta": []}
    assert plots.plot_latency(profile, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_layer_is_stacked_by_context_and_says_the_share_of_attention() -> None:
    rows = [
        {"context": c, "qkv_us": 30.0, "select_us": s, "attend_us": 10.0, "ffn_us": 50.0}
        for c, s in ((8192, 10.0), (131072, 60.0))
    ]
    profile = {"model": "m", "dsa": "quest", "device": "g", "breakdown": rows}
    (axes,) = profile_plots.layer_figure(profile).axes
    assert [t.get_text() for t in axes.texts] == ["100 \u00b5s, 20 %", "150 \u00b5s, 47 %"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["8K", "128K"]
    assert profile_plots.layer_figure({**profile, "breakdown": []}) is None


def test_steps_of_a_graph_have_a_bar_of_their_time() -> None:
    steps = [{"id": "a", "task": "t", "mode": m, "step": 0, "ms": ms} for m, ms in (("serial", 7.0), ("prr", 6.5))]
    figure = plots.breakdown_figure(steps, "m", "d")
    (axes,) = figure.axes
    assert heading(figure)[1] == "m x d, n = 1 sample, 1 step a mode"
    assert [b.get_height() for b in axes.patches] == [7.0, 6.5]
    assert "7.00 ms" in [t.get_text() for t in axes.texts]
