# SPDX-License-Identifier: Apache-2.0
"""The templates of scores, selection and prediction compile for sm_90a without a GPU."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass_kernels.compile import build
from cutlass_kernels.templates import rank_infllm, replay_hits, topk
from cutlass_kernels.templates.infllm_scores import InfllmScores
from cutlass_kernels.templates.predict import Predict
from cutlass_kernels.templates.quest_scores import QuestScores
from cutlass_kernels.templates.rank_infllm import RankInfllm
from cutlass_kernels.templates.replay_hits import ReplayHits
from cutlass_kernels.templates.select import Select


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(("head_dim", "group"), ((64, 1), (128, 5), (128, 16)))
def test_quest_scores(head_dim, group, dtype):
    for early in (False, True):
        assert build(QuestScores, dtype=dtype, head_dim=head_dim, group=group, early=early)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "per_block", "reach"),
    (("bfloat16", 128, 16, 4, 1), ("float16", 64, 7, 1, 1), ("bfloat16", 64, 3, 16, 0)),
)
def test_infllm_scores(dtype, head_dim, group, per_block, reach):
    assert build(InfllmScores, dtype=dtype, head_dim=head_dim, group=group, per_block=per_block, reach=reach)


@pytest.mark.parametrize(("N", "vector"), ((2048, False), (8192, True), (65536, True)))
def test_select(N, vector):
    assert build(Select, **topk.shape_of(N), vector=vector)


RANKED = (
    ("bfloat16", 128, 16, 4, 1, 544),
    ("bfloat16", 128, 16, 4, 1, 1088),
    ("float16", 128, 8, 4, 1, 1024),
    ("bfloat16", 128, 4, 8, 3, 61),
    ("float16", 64, 7, 2, 0, 2500),
    ("bfloat16", 64, 1, 1, 1, 4500),
)


def ranked(head_dim, group, per_block, reach, N):
    windows = max(1, N * per_block - reach), N - 1
    return rank_infllm.shape_of(N, *windows, head_dim, group, per_block, reach, 2, 132)


@pytest.mark.parametrize(("dtype", "head_dim", "group", "per_block", "reach", "N"), RANKED)
def test_rank_infllm(dtype, head_dim, group, per_block, reach, N, monkeypatch):
    """In as much shared memory as was reckoned with."""
    taken = []

    class Counting(rank_infllm.SmemAllocator):
        def allocate_tensor(self, element, layout, *rest, **named):
            taken.append(rank_infllm.cute.cosize(layout) * element.width // 8)
            return super().allocate_tensor(element, layout, *rest, **named)

    monkeypatch.setattr(rank_infllm, "SmemAllocator", Counting)
    shape = {**ranked(head_dim, group, per_block, reach, N), "vector": N % 4 == 0}
    params = {"dtype": dtype, "head_dim": head_dim, "group": group, "per_block": per_block, "reach": reach, **shape}
    assert build(RankInfllm, **params)
    room = rank_infllm.bytes_of(RankInfllm(**params))
    assert sum(taken) + 512 == room <= rank_infllm.SHARED


@pytest.mark.parametrize("N", (1, 31, 544, 750, 1001, 1024, 1088))
@pytest.mark.parametrize("sizes", ((4, 1), (1, 0), (2, 3)))
def test_a_cluster_of_a_ranking_holds_every_window_and_block_of_a_row(N, sizes):
    per_block, reach = sizes
    shape = ranked(128, 16, per_block, reach, N)
    each = shape["owners"] * shape["per_thread"]
    assert each * shape["cluster"] >= N and shape["owners"] <= rank_infllm.THREADS
    assert shape["coarse"] * shape["cluster"] >= N - 1


def test_rows_that_a_ranking_leaves_to_two_ops():
    given = dict(head_dim=128, group=16, per_block=4, reach=1, rows=2, processors=132)
    shape_of = rank_infllm.shape_of
    assert shape_of(512, 2047, 511, **given) and shape_of(1088, 4351, 1087, **given)
    assert shape_of(1152, 4607, 1151, **given) and shape_of(1156, 4623, 1155, **given) is None  # too long
    small = given | {"head_dim": 64}
    assert shape_of(2304, 9215, 2303, **small) and shape_of(2308, 9231, 2307, **small) is None
    assert shape_of(64, 2047, 63, **given | {"per_block": 32, "reach": 0})
    assert shape_of(64, 2047, 63, **given | {"per_block": 32, "reach": 1}) is None  # too many windows touch a block
    assert shape_of(512, 2047, 511, **given | {"rows": 17}) is None  # too many
    assert shape_of(512, 2049, 511, **given) is None  # windows beyond the blocks
    assert shape_of(1, 0, 0, **given) is None  # none


@pytest.mark.parametrize(("N", "vector"), ((4096, True), (32768, False)))
def test_predict(N, vector):
    assert build(Predict, **topk.shape_of(N), vector=vector)


@pytest.mark.parametrize("N", (250, 4096))
def test_replay_hits(N):
    assert build(ReplayHits, **replay_hits.shape_of(N))


@pytest.mark.parametrize("N", (0, 1, 256, 257, 1024, 1025, 1030, 4096, 5000, 8193, 12289, replay_hits.CAPACITY))
def test_registers_hold_every_block_of_a_row(N):
    warps, per_lane = replay_hits.shape_of(N).values()
    assert N <= 32 * warps * per_lane < N + 256 * max(warps, 1) + 1 and per_lane <= replay_hits.MOST


@pytest.mark.parametrize("N", (1, 7, 2048, 2049, 4096, 8191, 8192, 8193, 16384, 20000, 32768, 32769, topk.CAPACITY))
def test_a_cluster_holds_every_block_of_a_row(N):
    shape = topk.shape_of(N)
    assert shape["cluster"] * shape["threads"] * shape["per_thread"] >= N
    assert shape["per_thread"] % 4 == 0 and shape["per_thread"] <= 32  # vectors of four; bits of a mask
    assert shape["threads"] * shape["per_thread"] < 1 << 16  # a CTA's counts fit into half an integer


def test_rows_that_cannot_be_read_16_bytes_at_a_time():
    assert topk.wide(torch.zeros(2, 3, 8))
    assert not topk.wide(torch.zeros(2, 3, 7))
    assert not topk.wide(torch.zeros(2, 3, 0))
    assert not topk.wide(torch.zeros(25)[1:].view(1, 3, 8))
