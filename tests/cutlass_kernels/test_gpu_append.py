# SPDX-License-Identifier: Apache-2.0
"""append and its metadata on a Hopper GPU: the same bits as the reference, whatever the method."""

import pytest
import torch
from attention_cases import needs_sm90
from capture import captured

import cutlass_kernels as ck
from cutlass_kernels import reference

pytestmark = needs_sm90


def cache(B=3, H=2, T=16, D=128, C=20, dtype=torch.bfloat16, paged=False, seed=0):
    gen = torch.Generator().manual_seed(seed)
    S = C + 2
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(dtype)
    table = torch.stack([torch.randperm(S, generator=gen)[:C] for _ in range(B * H)]).view(B, H, C).int()
    return draw(B, H, D), draw(B, H, D), draw(B, H, S, T, D), draw(B, H, S, T, D), table if paged else None, draw


def both(op, tensors, *rest):
    """The op on copies on the GPU, and the reference's on the CPU: every tensor must come out with the same bits."""
    ours = [None if x is None else x.cuda() for x in tensors]
    rest_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in rest]
    getattr(ck, op)(*ours, *rest_gpu)
    wanted = [None if x is None else x.clone() for x in tensors]
    getattr(reference, op)(*wanted, *rest, None, None, None, False, None)
    for i, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        assert torch.equal(a.cpu(), b), f"argument {i}"


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("T, D, dtype", [(16, 128, torch.bfloat16), (64, 64, torch.float16)])
@pytest.mark.parametrize("lens", [(1, 16, 17), (0, 64, 65), (300, 0, 1)])
def test_append_and_quest(lens, T, D, dtype, paged):
    k_new, v_new, k, v, table, draw = cache(T=T, D=D, dtype=dtype, paged=paged)
    lens = torch.tensor(lens, dtype=torch.int32)
    both("append", (k_new, v_new, k, v), lens, table)
    kmin, kmax = draw(3, 2, 20, D), draw(3, 2, 20, D)
    both("append_quest", (k_new, v_new, k, v, kmin, kmax), lens, table)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("lens", [(31, 32, 33), (128, 48, 0), (192, 256, 191), (16, 1, 320)])
def test_infllm_windows(lens, paged):
    k_new, v_new, k, v, table, draw = cache(paged=paged)
    k1, k2 = draw(3, 2, 19, 128), draw(3, 2, 4, 128)
    lens = torch.tensor(lens, dtype=torch.int32)
    ours = [x.cuda() for x in (k_new, v_new, k, v, k1, k2)]
    ck.append_infllm(*ours, lens.cuda(), page_table=None if table is None else table.cuda())
    wanted = [x.clone() for x in (k_new, v_new, k, v, k1, k2)]
    reference.append_infllm(*wanted, lens, 32, 16, 128, 64, table, None, None, None, False, None)
    for a, b in zip(ours, wanted, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "D, R, G, dtype",
    [
        (128, 128, 16, torch.bfloat16),
        (128, 64, 1, torch.float16),
        (64, 32, 8, torch.bfloat16),
        (64, 16, 3, torch.float16),
    ],
)
@pytest.mark.parametrize("lens", [(1, 32, 33), (0, 64, 128), (300, 0, 256)])
def test_rope_on_the_way(lens, D, R, G, dtype, interleaved, paged):
    """Keys, metadata and queries are the reference's, bit for bit; a row of no tokens has its queries rotated."""
    k_new, v_new, k, v, table, draw = cache(D=D, dtype=dtype, paged=paged)
    turn = torch.randn(3, R // 2, generator=torch.Generator().manual_seed(1)).mul(3).repeat(1, 2)
    rotary = (draw(3, 2 * G, D), turn.cos().to(dtype), turn.sin().to(dtype))
    meta = {"append": (), "append_quest": (20, 20), "append_infllm": (19, 4)}
    sizes = {"append_infllm": (32, 16, 128, 64)}
    lens = torch.tensor(lens, dtype=torch.int32)
    for op, rows in meta.items():
        tensors = (k_new, v_new, k, v, *(draw(3, 2, n, D) for n in rows))
        ours, wanted = [x.cuda() for x in tensors], [x.clone() for x in tensors]
        out = torch.full((3, 2 * G, D), float("nan"), dtype=dtype)
        found = out.cuda()
        given = ck.Rotary(*(x.cuda() for x in rotary), interleaved, found)
        getattr(ck, op)(*ours, lens.cuda(), page_table=None if table is None else table.cuda(), rotary=given)
        getattr(reference, op)(*wanted, lens, *sizes.get(op, ()), table, *rotary, interleaved, out)
        for a, b in zip((*ours, found), (*wanted, out), strict=True):
            assert torch.equal(a.cpu(), b), op


def test_a_sequence_grown_token_by_token_in_one_graph():
    B, H, T, D, tokens = 2, 2, 16, 128, 150
    _, _, k, v, _, draw = cache(B=B, H=H)
    k.fill_(float("nan"))
    keys, values = draw(tokens, B, H, D), draw(tokens, B, H, D)
    new_k, new_v = keys[0].cuda(), values[0].cuda()
    gk, gv = k.cuda(), k.cuda()
    k1, k2 = (torch.full((B, H, w, D), float("nan"), dtype=k.dtype, device="cuda") for w in (9, 2))
    kmin, kmax = (torch.full((B, H, 10, D), float("nan"), dtype=k.dtype, device="cuda") for _ in range(2))
    lens = torch.zeros(B, dtype=torch.int32, device="cuda")

    def step():
        ck.append_quest(new_k, new_v, gk, gv, kmin, kmax, lens)
        ck.append_infllm(new_k, new_v, gk, gv, k1, k2, lens)

    graph, _ = captured(step)
    for n in range(tokens):
        new_k.copy_(keys[n])
        new_v.copy_(values[n])
        lens += 1
        graph.replay()
    flat = keys.permute(1, 2, 0, 3)
    assert torch.equal(gk.cpu().flatten(2, 3)[:, :, :tokens], flat)
    assert torch.equal(gv.cpu().flatten(2, 3)[:, :, :tokens], values.permute(1, 2, 0, 3))
    full = flat[:, :, : tokens // T * T].unflatten(2, (-1, T))
    assert torch.equal(kmin.cpu()[:, :, : tokens // T], full.amin(3))
    assert torch.equal(kmax.cpu()[:, :, : tokens // T], full.amax(3))
    for means, size, stride in ((k1, 32, 16), (k2, 128, 64)):
        windows = flat.unfold(2, size, stride).mT
        wanted = reference.window_mean(windows).to(k.dtype)
        assert torch.equal(means.cpu()[:, :, : wanted.shape[2]], wanted)


def test_doors():
    k_new, v_new, k, v, _, _ = (x.cuda() if isinstance(x, torch.Tensor) else x for x in cache())
    lens = torch.ones(3, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="append: k has strides"):
        ck.append(k_new, v_new, k.transpose(3, 4).contiguous().transpose(3, 4), v, lens)
    with pytest.raises(NotImplementedError, match="append_infllm: no CUDA kernel for window 24; served: 8, 16, 32"):
        means = k_new[:, :, None].contiguous()
        ck.append_infllm(k_new, v_new, k, v, means, means, lens, window=24, stride=8)
    with pytest.raises(
        NotImplementedError, match="append: no CUDA kernel for dtype float32; served: bfloat16, float16"
    ):
        ck.append(k_new.float(), v_new.float(), k.float(), v.float(), lens)
    with pytest.raises(NotImplementedError, match="append: no CUDA kernel for rotated channels 24; served: 16, 32"):
        turn = k_new[:, 0, :24].contiguous()
        ck.append(k_new, v_new, k, v, lens, rotary=ck.Rotary(k_new, turn, turn, False, k_new.clone()))
    ck.append(k_new[:0], v_new[:0], k[:0], v[:0], lens[:0])  # nothing to do
