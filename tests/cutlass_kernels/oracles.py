# SPDX-License-Identifier: Apache-2.0
"""Problems with poison in every unused place, and oracles in float64 that share no code with what they check."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

GROUPS = (1, 3, 4, 5, 8, 16)  # query heads a KV head
BLOCKS = (16, 32, 64, 128, 256)  # tokens a block
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_BLOCKS = {16: 6, 32: 5, 64: 4, 128: 3, 256: 2}
INF, NAN = math.inf, math.nan
seeds = st.integers(0, 2**20)


def examples(n: int) -> settings:
    """The same n examples on every run."""
    return settings(max_examples=n, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bit patterns: NaN equals itself, -0.0 differs from 0.0."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def close(actual: Tensor, expected: Tensor, tol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tol, rtol=tol, equal_nan=False)


@dataclass(repr=False)
class Problem:
    """A ragged batch in a paged cache, beside the plain tokens that it holds."""

    q: Tensor  # [B, H * G, D]
    k: Tensor  # [B, H, S, T, D]
    v: Tensor
    seq_lens: Tensor  # [B] int32
    page_table: Tensor | None
    keys: list[Tensor]  # a row: [H, tokens, D]
    values: list[Tensor]
    scale: float

    def __repr__(self) -> str:
        return (
            f"Problem(q {tuple(self.q.shape)}, k {tuple(self.k.shape)} {self.k.dtype}, {self.seq_lens.tolist()} tokens)"
        )

    @property
    def B(self) -> int:
        return len(self.keys)

    @property
    def H(self) -> int:
        return self.k.shape[1]

    @property
    def G(self) -> int:
        return self.q.shape[1] // self.H

    @property
    def T(self) -> int:
        return self.k.shape[3]

    @property
    def capacity(self) -> int:
        """Blocks that a row may have."""
        return self.k.shape[2] if self.page_table is None else self.page_table.shape[2]

    def blocks(self, b: int) -> int:
        return math.ceil(self.keys[b].shape[1] / self.T)

    def pairs(self) -> list[tuple[int, int]]:
        return [(b, h) for b in range(self.B) for h in range(self.H)]

    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def tail(self) -> tuple[Tensor, float, Tensor | None]:
        return self.seq_lens, self.scale, self.page_table


def lay_out(
    rows: list[Tensor], T: int, spare: int, paged: bool, seed: int, poison: float
) -> tuple[Tensor, Tensor | None]:
    """Tokens into blocks, in slots shuffled a row and head if paged; the same seed, the same slots."""
    H, _, D = rows[0].shape
    N = max(math.ceil(x.shape[1] / T) for x in rows) + spare
    S = max(1, N + spare if paged else N)
    cache = torch.full((len(rows), H, S, T, D), poison).to(rows[0].dtype)
    table = torch.full((len(rows), H, N), -1, dtype=torch.int32) if paged else None
    gen = torch.Generator().manual_seed(seed)
    for b, tokens in enumerate(rows):
        n = math.ceil(tokens.shape[1] / T)
        for h in range(H):
            slots = torch.randperm(S, generator=gen)[:n] if paged else torch.arange(n)
            if table is not None:
                table[b, h, :n] = slots.int()
            for at, x in zip(slots.tolist(), tokens[h].split(T), strict=True) if n else ():
                cache[b, h, at, : len(x)] = x
    return cache, table


def make(
    seed: int,
    lengths: list[int],
    T: int,
    H: int = 2,
    G: int = 4,
    D: int = 16,
    dtype: torch.dtype = torch.float32,
    paged: bool = True,
    spare: int = 1,
    gain: float = 1.0,
    poison: float = NAN,
) -> Problem:
    """A problem of random normal tokens; gain multiplies the queries."""
    gen = torch.Generator().manual_seed(seed)
    keys, values = ([torch.randn(H, n, D, generator=gen).to(dtype) for n in lengths] for _ in range(2))
    q = (torch.randn(len(lengths), H * G, D, generator=gen) * gain).to(dtype)
    k, table = lay_out(keys, T, spare, paged, seed, poison)
    v, _ = lay_out(values, T, spare, paged, seed, poison)
    return Problem(q, k, v, torch.tensor(lengths, dtype=torch.int32), table, keys, values, D**-0.5)


def moved(p: Problem, paged: bool, seed: int, spare: int = 0, poison: float = NAN) -> Problem:
    """The same tokens in another layout, with other things in the unused places."""
    k, table = lay_out(p.keys, p.T, spare, paged, seed, poison)
    v, _ = lay_out(p.values, p.T, spare, paged, seed, poison)
    return replace(p, k=k, v=v, page_table=table)


def alone(p: Problem, b: int, h: int, g: int | None = None) -> Problem:
    """One row and KV head of a problem (and one query head of it), without a page table."""
    first = h * p.G + (g or 0)
    q = p.q[b : b + 1, first : first + (p.G if g is None else 1)].clone()
    one = replace(p, q=q, keys=[p.keys[b][h : h + 1]], values=[p.values[b][h : h + 1]], seq_lens=p.seq_lens[b : b + 1])
    return moved(one, paged=False, seed=0, poison=7.0)


def edges(T: int) -> list[int]:
    """Lengths around the edges of blocks; an empty row."""
    around = {m * T + d for m in range(1, MOST_BLOCKS[T] + 1) for d in (-1, 0, 1)}
    return [0, 1, *sorted(n for n in around if 1 < n <= MOST_BLOCKS[T] * T)]


@st.composite
def _shaped(draw: st.DrawFn, gain: float) -> Problem:
    T = draw(st.sampled_from(BLOCKS))
    lengths = draw(st.lists(st.sampled_from(edges(T)), min_size=1, max_size=3))
    G, D = draw(st.sampled_from(GROUPS)), draw(st.sampled_from((16, 64)))
    H, dtype = draw(st.integers(1, 2)), draw(st.sampled_from(DTYPES))
    paged, spare = draw(st.booleans()), draw(st.integers(0, 2))
    return make(draw(seeds), lengths, T, H, G, D, dtype, paged, spare, gain)


def _rolled(seed: int, gain: float) -> Problem:
    roll = random.Random(seed)
    T = roll.choice(BLOCKS)
    lengths = [roll.choice(edges(T)) for _ in range(roll.randint(2, 3))]
    G, D, dtype = roll.choice(GROUPS), roll.choice((16, 16, 64)), roll.choice(DTYPES)
    return make(seed, lengths, T, roll.randint(1, 2), G, D, dtype, roll.random() < 0.6, roll.randint(0, 2), gain)


def problems(gain: float = 1.0) -> st.SearchStrategy[Problem]:
    """Shapes that hypothesis shrinks, and twice as often dice: it repeats itself where it chooses every size."""
    rolled = st.builds(_rolled, seeds, st.just(gain))
    return st.one_of(_shaped(gain), rolled, rolled)


def id_table(lists: dict[tuple[int, int], list[int]], B: int, H: int, width: int) -> Tensor:
    """Lists of ids a (row, head) -> [B, H, width] int32, -1 padded."""
    table = torch.full((B, H, width), -1, dtype=torch.int32)
    for (b, h), ids in lists.items():
        table[b, h, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table


def id_lists(table: Tensor) -> dict[tuple[int, int], list[int]]:
    """[B, H, width] -> the ids of each (row, head) without padding."""
    B, H, _ = table.shape
    return {(b, h): [i for i in table[b, h].tolist() if i >= 0] for b in range(B) for h in range(H)}


def attention(p: Problem, b: int, h: int, blocks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Softmax attention over the tokens of a set of blocks: o [G, D], lse [G], float64."""
    n = p.keys[b].shape[1]
    tokens = [t for i in sorted(set(blocks)) if i >= 0 for t in range(i * p.T, min((i + 1) * p.T, n))]
    q = p.q[b, h * p.G : (h + 1) * p.G].double()
    if not tokens:
        return torch.zeros_like(q), torch.full((p.G,), -INF, dtype=torch.float64)
    s = q @ p.keys[b][h, tokens].double().T * p.scale
    return s.softmax(-1) @ p.values[b][h, tokens].double(), s.logsumexp(-1)


def expect(p: Problem, sets: dict[tuple[int, int], list[int]]) -> tuple[Tensor, Tensor]:
    """attention() for every row and head: [B, Hq, D], [B, Hq]."""
    parts = [[attention(p, b, h, sets[b, h]) for h in range(p.H)] for b in range(p.B)]
    return (
        torch.stack([torch.cat([o for o, _ in row]) for row in parts]),
        torch.stack([torch.cat([lse for _, lse in row]) for row in parts]),
    )


def rule(scores: list[float], n: int, K: int, sink: int, local: int) -> list[int]:
    """The selection rule, told plainly: scores of the first n blocks -> ascending ids."""
    if n <= K:
        return list(range(n))
    if K == 0:
        return []
    forced = {i for i in range(n) if i < sink or i >= n - local}
    able = [i for i in range(n) if i not in forced and scores[i] > -INF]  # False for NaN
    best = sorted(able, key=lambda i: (-scores[i], i))
    return sorted(forced | set(best[: K - len(forced)]))
