# SPDX-License-Identifier: Apache-2.0
"""The templates of scores, selection and prediction compile for sm_90a without a GPU."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass_kernels.compile import build
from cutlass_kernels.templates import replay_hits, speculate, topk
from cutlass_kernels.templates.infllm_scores import InfllmScores
from cutlass_kernels.templates.predict import Predict
from cutlass_kernels.templates.quest_scores import QuestScores
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


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "block", "paged", "N"),
    (
        ("bfloat16", 128, 16, 64, False, 544),
        ("float16", 64, 5, 16, True, speculate.MOST),
        ("bfloat16", 128, 4, 32, True, 1),
    ),
)
def test_speculate(dtype, head_dim, group, block, paged, N):
    shape = {"dtype": dtype, "head_dim": head_dim, "group": group, "block": block, "paged": paged}
    assert build(speculate.Speculate, **shape, per_thread=topk.held(N, 128), vector=not paged)


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


@pytest.mark.parametrize("N", (1, 512, 513, speculate.MOST))
def test_a_cta_holds_every_block_of_a_row(N):
    each = topk.held(N, 128)
    assert N <= 128 * each < N + 512 and each % 4 == 0 and each <= 32


def test_rows_that_cannot_be_read_16_bytes_at_a_time():
    assert topk.wide(torch.zeros(2, 3, 8))
    assert not topk.wide(torch.zeros(2, 3, 7))
    assert not topk.wide(torch.zeros(2, 3, 0))
    assert not topk.wide(torch.zeros(25)[1:].view(1, 3, 8))
