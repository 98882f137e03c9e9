# SPDX-License-Identifier: Apache-2.0
"""Launches overlap. What that rests on is where a kernel waits and lets the next one start, which its PTX tells."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

BUILD = """
from cutlass_kernels.compile import build
from cutlass_kernels.templates import append, attend, infllm_scores, linear, merge, norm, norm_linear
from cutlass_kernels.templates import predict, quest_scores, rank_infllm, repair, select, silu_linear
from cutlass_kernels.templates.topk import shape_of
half = dict(dtype="bfloat16", head_dim=64)
block = dict(half, group=4, block=64, paged=False)
build(append.Append, **half, block=64, paged=False, quest=True, rope="half", rotated=64, group=4)
build(quest_scores.QuestScores, **half, group=4, early=True)
build(infllm_scores.InfllmScores, **half, group=4, per_block=4, reach=1)
build(select.Select, **shape_of(8192), vector=True)
build(attend.Attend, **block)
build(rank_infllm.RankInfllm, **half, group=4, per_block=4, reach=1, cluster=8, per_thread=4, owners=16, coarse=64,
      vector=True)
build(repair.Repair, **block, capacity=64)
build(merge.Merge, **half, group=4, early=True)
build(predict.Predict, **shape_of(2048), vector=True)
build(linear.Linear, dtype="bfloat16", k=1024, rows=1, split=1, bias=False)
build(norm.Norm, dtype="bfloat16", k=4096, adds=True)
build(norm_linear.NormLinear, dtype="bfloat16", k=2048, split=2, bias=False)
build(silu_linear.SiluLinear, dtype="bfloat16", k=25600, split=1, bias=False)
"""
WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """PTX of each kernel by its template's name, and the name of its function where there are two."""
    folder = tmp_path_factory.mktemp("ptx")
    env = os.environ | {"CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(folder), "CUTE_DSL_ARCH": "sm_90a"}
    subprocess.run([sys.executable, "-c", BUILD], env=env, check=True, capture_output=True)
    found = {}
    for path in folder.glob("*.ptx"):
        for body in path.read_text().split(".visible .entry ")[1:]:
            named = re.match(r"kernel_cutlass_(\w+?)_cutlass_kernelstemplates[a-z_]+?([A-Z]\w*?)_object", body)
            function, template = named.groups()
            found[template if function == "kernel" else f"{template}.{function}"] = body
    return found


def places(ptx, pattern):
    return [m.start() for m in re.finditer(pattern, ptx)]


def marks(ptx):
    """Waits and starts in their order; those of branches one behind another."""
    return [what for _, what in sorted((at, what) for what in (WAIT, START) for at in places(ptx, what))]


def test_every_kernel_waits_before_it_lets_the_next_one_start(kernels):
    """Attention over P reads, without waiting, what stands further in front: this is why that is there."""
    assert len(kernels) == 14
    for name, ptx in kernels.items():
        order = marks(ptx)
        assert START in order, name
        assert all(order[i - 1] == WAIT for i, what in enumerate(order) if i and what == START), name
        assert order[0] == WAIT, name


def test_attention_that_waits_last_waits_behind_all_that_it_writes(kernels):
    ptx = kernels["Attend"]
    assert places(ptx, WAIT)[-1] > places(ptx, r"st\.global")[-1]


@pytest.mark.parametrize("name", ["Select", "RankInfllm"])
def test_a_selection_lets_attention_start_beside_all_that_it_does(kernels, name):
    """What is next starts when all CTAs let it: they have waited by then, and read and write only behind that."""
    ptx = kernels[name]
    assert marks(ptx) == [WAIT, START]
    assert all(at > places(ptx, START)[0] for at in places(ptx, r"(ld|st)\.global|cp\.async\.cg"))


def test_a_ranking_asks_for_all_windows_before_it_knows_how_many_are_complete(kernels):
    """64 blocks a CTA, 257 windows and 64 coarse ones of 128 bytes, 32 at a time, and the queries."""
    ptx = kernels["RankInfllm"]
    copies, loads = places(ptx, r"cp\.async\.cg"), places(ptx, r"ld\.global")
    assert len(copies) == 1 + 2 + 9 and copies[-1] < loads[0]
    assert all(at > copies[-1] for at in places(ptx, r"bar\.sync|barrier\.cluster\.wait|cp\.async\.wait_group"))


def test_early_scores_ask_for_extrema_in_front_of_the_wait_and_for_the_newest_block_past_the_l1_behind_it(kernels):
    """The second wait is of tiles without tokens."""
    ptx = kernels["QuestScores"]
    (wait, other), barrier = places(ptx, WAIT), places(ptx, r"bar\.sync")[0]
    loads, again = places(ptx, r"ld\.global\.v4"), places(ptx, r"ld\.global\.cg\.v4")
    assert sum(at < wait for at in loads) == len(again) == 2 * 4 and all(wait < at < barrier < other for at in again)


def test_an_early_merge_lets_the_next_one_start_before_it_reads_partials(kernels):
    ptx = kernels["Merge"]
    wait, start = (places(ptx, what)[0] for what in (WAIT, START))
    behind = [at for at in places(ptx, r"ld\.global") if at > wait]
    assert behind and start < behind[0]


def test_a_norm_asks_for_its_weight_in_front_of_the_wait_and_for_its_rows_behind_it_past_the_l1(kernels):
    ptx = kernels["Norm"]
    wait, start, barrier = (places(ptx, what)[0] for what in (WAIT, START, r"bar\.sync"))
    early, late = places(ptx, r"ld\.global\.v4"), places(ptx, r"ld\.global\.cg\.v4")
    assert len(places(ptx, r"ld\.global")) == 3 and len(early) == 1 and len(late) == 2
    assert early[0] < wait < start < late[0] < late[1] < barrier
    assert wait < places(ptx, r"st\.global")[0]


def test_a_norm_in_a_linear_layer_leaves_the_copies_of_weights_in_front_of_the_wait(kernels):
    """As many as in the layer alone, none of which x has to wait for; one sum of squares is between x and the MMAs."""
    ptx = kernels["NormLinear"]
    wait, start = (places(ptx, what)[0] for what in (WAIT, START))
    copies = [[at < places(x, WAIT)[0] for at in places(x, r"cp\.async\.cg")] for x in (ptx, kernels["Linear"])]
    assert sum(copies[0]) == sum(copies[1]) == 9 * 4 and len(copies[0]) == len(copies[1]) - 1 == 10 * 4
    weight, rows = places(ptx, r"ld\.global\.v4"), places(ptx, r"ld\.global\.cg\.v4")
    assert len(places(ptx, r"ld\.global")) == 6 and len(weight) == 2 and len(rows) == 4
    first, second, _ = places(ptx, r"bar\.sync")
    assert weight[-1] < wait < start < rows[0] and rows[-1] < first < second < places(ptx, r"mma\.sync")[0]
    assert all(wait < at < first for at in places(ptx, r"st\.global\.v4"))
    assert all(at > second for at in places(ptx, r"cp\.async\.wait_group"))


@pytest.mark.parametrize("name", ["Linear", "NormLinear", "SiluLinear"])
def test_weights_are_the_first_to_leave_the_l2_and_x_is_not(kernels, name):
    hinted = re.findall(r"cp\.async\.cg\.shared\.global\.L2::cache_hint \[.*?\], \[.*?\], 16, (.*?);", kernels[name])
    assert len(hinted) == 10 * 4 and {int(x) for x in hinted} == {0x12F0000000000000}
    others = len(places(kernels[name], r"cp\.async\.cg")) - len(hinted)
    assert (others > 0) == (name == "Linear"), "the others make x in registers"


def test_an_mlp_s_product_is_made_behind_the_copies_of_weights_from_loads_that_are_all_on_their_way(kernels):
    """13 pieces a thread, of gate and of up, are two batches: 7 and 6. No copy of weights is waited for in between."""
    ptx = kernels["SiluLinear"]
    wait, start = (places(ptx, what)[0] for what in (WAIT, START))
    assert [at < wait for at in places(ptx, r"cp\.async\.cg")] == [True] * 9 * 4 + [False] * 4
    loads, stores = places(ptx, r"ld\.global"), places(ptx, r"st\.shared\.v4")
    assert loads == places(ptx, r"ld\.global\.cg\.v4") and len(loads) == 2 * 13 and len(stores) == 13
    first, second, last, _ = places(ptx, r"bar\.sync")
    assert wait < start < loads[0] and loads[13] < first < loads[14] and loads[25] < second
    work = [sorted(places(ptx, what)) for what in (r"ex2\.approx", r"rcp\.approx\.ftz")]
    assert all(len(x) == 8 * 13 and first < x[0] and x[55] < loads[14] and second < x[56] < x[-1] < last for x in work)
    assert first < stores[0] and second < stores[7] and stores[12] < last < places(ptx, r"mma\.sync")[0]
    assert all(at > last for at in places(ptx, r"cp\.async\.wait_group"))
