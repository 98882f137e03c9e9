# SPDX-License-Identifier: Apache-2.0
"""Problems and a float64 reference for the attention ops, for tests that need a GPU."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels import reference

SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# a test module says: pytestmark = needs_sm90
needs_sm90 = [pytest.mark.gpu, pytest.mark.skipif(not SM90, reason="needs a Hopper GPU (compute capability 9.0)")]
INF = float("inf")

SHAPES = [
    dict(H=2, G=16, T=64),
    dict(H=8, G=4, T=64, B=2, lens=(5000, 777), N=40, paged=True),
    dict(H=2, G=16, T=16, N=67, lens=(4001,)),
    dict(H=8, G=4, T=16, N=64, lens=(4001,), dtype=torch.float16),
    dict(H=3, G=3, T=32, N=21, lens=(2000,), paged=True),
    dict(H=1, G=7, T=128, N=5, lens=(1111, 300), B=2),
    dict(H=2, G=5, T=256, N=7, lens=(2047,)),
    dict(H=8, G=1, T=32, D=64, N=300, lens=(12000,)),
    dict(H=3, G=8, T=16, D=64, N=33, lens=(1000, 16, 1), B=3, paged=True),
    dict(H=2, G=16, T=128, D=64, N=9, lens=(1500,), dtype=torch.float16),
    dict(H=2, G=4, T=256, D=64, N=3, lens=(800,), dtype=torch.float16, paged=True),
    dict(H=8, G=4, T=256, N=40, lens=(12000,)),
]
name = lambda d: "-".join(f"{k}{v}" for k, v in d.items()).replace("torch.", "").replace(" ", "")


@dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor
    lens: Tensor
    scale: float
    table: Tensor | None = None

    def attend(self, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ids = self.ids if ids is None else ids
        G = self.q.shape[1] // self.k.shape[1]
        o = torch.full((*ids.shape, G, self.q.shape[2]), float("nan"), device=ids.device)
        lse = torch.full((*ids.shape, G), float("nan"), device=ids.device)
        return ck.attend(self.q, self.k, self.v, ids, self.lens, self.scale, self.table, out=(o, lse))

    def outputs(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        nan = float("nan")
        return torch.full_like(self.q, nan, dtype=dtype), torch.full_like(self.q[..., 0], nan, dtype=torch.float32)

    def serial(self, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ck.merge(*self.attend(ids), self.outputs())

    def with_ids(self, ids: Tensor) -> "Problem":
        return replace(self, ids=ids)


def random_ids(B: int, H: int, N: int, blocks: list[int], gen: torch.Generator, full: bool = False) -> Tensor:
    """Ascending random block ids, -1 padded; the last block of each row is among them."""
    ids = torch.full((B, H, N), -1, dtype=torch.int32)
    for b in range(B):
        for h in range(H):
            n = min(N if full else max(1, N - h), blocks[b])
            if n and N:
                pick = torch.randperm(blocks[b] - 1, generator=gen)[: n - 1].tolist()
                ids[b, h, :n] = torch.tensor(sorted([*pick, blocks[b] - 1]), dtype=torch.int32)
    return ids


def problem(
    B=1, H=2, G=4, D=128, T=64, N=9, lens=(1000,), dtype=torch.bfloat16, paged=False, seed=0, spread=1.0, full=False
) -> Problem:
    """NaN stands in every slot and row that holds no token; slots are shuffled where there is a page table."""
    gen = torch.Generator().manual_seed(seed)
    lens = (list(lens) * B)[:B]
    blocks = [-(-n // T) for n in lens]
    C = max(max(blocks), 1)
    S = C + 3
    q = (torch.randn(B, H * G, D, generator=gen) * spread).to(dtype)
    k = torch.full((B, H, S, T, D), float("nan"), dtype=dtype)
    v = torch.full((B, H, S, T, D), float("nan"), dtype=dtype)
    table = torch.full((B, H, C), -1, dtype=torch.int32)
    for b in range(B):
        for h in range(H):
            slots = torch.randperm(S, generator=gen)[:C] if paged else torch.arange(C)
            table[b, h] = slots.int()
            keys, values = (torch.randn(C * T, D, generator=gen).to(dtype) for _ in range(2))
            keys[lens[b] :] = float("nan")
            values[lens[b] :] = float("nan")
            k[b, h, slots], v[b, h, slots] = keys.view(C, T, D), values.view(C, T, D)
    ids = random_ids(B, H, N, blocks, gen, full)
    place = lambda x: x.cuda()
    lens_ = place(torch.tensor(lens, dtype=torch.int32))
    return Problem(place(q), place(k), place(v), place(ids), lens_, D**-0.5, place(table) if paged else None)


def exact(p: Problem, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Partials in float64 from the same half-precision inputs."""
    ids = p.ids if ids is None else ids
    B, H, S, T, D = p.k.shape
    G = p.q.shape[1] // H
    live, slot = reference._locate(ids, p.lens, p.table, T, S)
    at = (torch.arange(B, device=ids.device)[:, None, None], torch.arange(H, device=ids.device)[:, None], slot)
    dead = (torch.arange(T, device=ids.device) >= live[..., None])[..., None]
    keys, values = (x[at].masked_fill(dead, 0).double() for x in (p.k, p.v))
    s = torch.einsum("bhgd,bhntd->bhngt", p.q.double().view(B, H, G, D), keys) * p.scale
    s = s.masked_fill(dead[:, :, :, None, :, 0], -INF)
    lse = torch.logsumexp(s, -1)
    weight = torch.exp(s - torch.where(lse > -INF, lse, 0.0)[..., None])
    return torch.einsum("bhngt,bhntd->bhngd", weight, values), lse


def merged(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all parts, in float64: [B, Hq, D], [B, Hq]."""
    o, lse = o.double(), lse.double()
    full = torch.logsumexp(lse, 2)
    weight = torch.exp(lse - torch.where(full > -INF, full, 0.0)[:, :, None])
    out = torch.where(weight[..., None] > 0, weight[..., None] * o, 0.0).sum(2)
    return out.flatten(1, 2), full.flatten(1, 2)


def distance(x: Tensor, wanted: Tensor) -> float:
    """||x - wanted|| / ||wanted||, NaN where x holds a NaN."""
    return float((x.double() - wanted).norm() / wanted.norm().clamp(min=1e-300))


def check_lse(lse: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert torch.equal(lse == -INF, wanted == -INF)
    some = wanted > -INF
    error = (lse[some].double() - wanted[some]).abs() / wanted[some].abs().clamp(min=1.0)
    assert not error.numel() or float(error.max()) < tolerance, float(error.max())


def selection(A: Tensor, P: Tensor) -> ck.Selection:
    """A against P, without the op select: the buffers hold rubbish where nothing may be read."""
    position = reference._find(A, P)
    lost = (position < 0) & (A >= 0)
    big = torch.iinfo(torch.int32).max
    ascending = torch.where(lost, A, big).sort(dim=2).values
    missed = torch.where(ascending < big, ascending, -1)
    counts = torch.stack(((A >= 0).sum(2), lost.sum(2)), 2).int()
    return ck.Selection(A, position, missed.int(), counts)
