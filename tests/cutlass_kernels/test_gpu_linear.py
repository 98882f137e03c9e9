# SPDX-License-Identifier: Apache-2.0
"""linear on a Hopper GPU: the matrices of every model, against float64 on the same inputs; the same bits every time."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import needs_sm90
from capture import captured

import cutlass_kernels as ck

pytestmark = needs_sm90
BF16, FP16 = torch.bfloat16, torch.float16
# [N, K] of the models' layers: GLM-4 and GLM-Z1, Llama-3 and R1's distillate, Qwen3-14B and 32B, SmolLM2
SHAPES = {
    *((4096, 4096), (512, 4096), (256, 4096), (27392, 4096), (4096, 13696), (151552, 4096)),
    *((1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)),
    *((5120, 5120), (1024, 5120), (17408, 5120), (5120, 17408), (151936, 5120)),
    *((8192, 5120), (5120, 8192), (25600, 5120), (5120, 25600)),
    *((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)),
}


def draw(*shape, dtype=BF16, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=gen, device="cuda").to(dtype)


def exact(x, w, b=None):
    y = torch.cat([x.double() @ part.double().T for part in w.split(16384)], 1)
    return y if b is None else y + b.double()


def check(x, w, b=None):
    """Each element within a rounding of its own, and what float32 sums lose of the terms; then the same bits again."""
    y = ck.linear(x, w, b)
    wanted = exact(x, w, b)
    rounding = 2**-8 if x.dtype == BF16 else 2**-11
    terms = exact(x.abs(), w.abs())
    assert bool(((y.double() - wanted).abs() <= rounding * wanted.abs() + 2**-20 * terms).all())
    assert all(torch.equal(ck.linear(x, w, b), y) for _ in range(3))


@pytest.mark.parametrize("N, K", sorted(SHAPES))
def test_every_matrix_of_the_models(N, K):
    check(draw(1, K), draw(N, K, seed=1), draw(N, seed=2) if K == 4096 else None)


@pytest.mark.parametrize("M", range(1, 9))
@pytest.mark.parametrize("N, K, dtype", [(512, 1024, FP16), (4096, 512, BF16), (16, 64, BF16), (48, 3136, FP16)])
def test_few_rows(M, N, K, dtype):
    x, w, b = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    check(x, w, b)
    check(x, w)


def test_what_has_no_kernel_is_torchs():
    for M, N, K in ((1, 50, 512), (1, 64, 520), (9, 64, 512), (1, 32, 65536)):
        x, w, b = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
        assert torch.equal(ck.linear(x, w, b), F.linear(x, w, b))
    x, w = draw(1, 512), draw(512, 64, seed=1)
    assert torch.equal(ck.linear(x, w.T), F.linear(x, w.T))
    assert torch.equal(ck.linear(x.float(), w.T.float()), F.linear(x.float(), w.T.float()))


def test_nothing_outside_of_the_tensors_is_read_into_a_sum():
    N, K = 528, 640
    room = torch.full((N * K + 2048,), float("nan"), device="cuda", dtype=BF16)
    w = room[1024 : 1024 + N * K].view(N, K)
    w.copy_(draw(N, K, seed=1))
    edge = torch.full((K + 128,), float("nan"), device="cuda", dtype=BF16)
    x = edge[64 : 64 + K].view(1, K)
    x.copy_(draw(1, K))
    check(x, w)
    assert bool(room[:1024].isnan().all()) and bool(room[1024 + N * K :].isnan().all())


def test_a_chain_in_a_graph_is_the_eager_one():
    """Each launch starts before the one in front of it has ended, and must still see all of what that one wrote."""
    x = draw(1, 4096)
    up, down = (draw(13696, 4096, seed=1) * 0.02), (draw(4096, 13696, seed=2) * 0.02)
    small, back, bias = draw(512, 4096, seed=3), draw(4096, 512, seed=4), draw(512, seed=5)

    def chain():
        y = ck.linear(ck.linear(x, up), down)
        return ck.linear(ck.linear(y, small, bias) * 0.01, back)

    graph, written = captured(chain)
    for seed in range(20):
        x.copy_(draw(1, 4096, seed=seed))
        graph.replay()
        got = written.clone()
        torch.cuda.synchronize()
        assert torch.equal(got, chain()) and bool(got.isfinite().all())
