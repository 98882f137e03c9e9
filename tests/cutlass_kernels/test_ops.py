# SPDX-License-Identifier: Apache-2.0
"""The door of every op: what does not fit is refused with both sides named; and the ops are proper torch custom ops."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import INF, NAN, Problem, make, same_bits
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.reference import rotate

LENGTHS = [40, 20]  # tokens; 3 and 2 blocks of 16
META = ("kmin", "kmax", "k1", "k2")


@pytest.fixture
def debugging() -> Iterator[None]:
    ck.debug(True)
    yield
    ck.debug(False)


class Args:
    """Arguments of every op that fit; `ready(op, name=...)` is its call with some replaced."""

    def __init__(self) -> None:
        self.p = p = make(1, LENGTHS, 16, H=2, G=3)
        self.N = p.capacity
        g = torch.Generator().manual_seed(0)
        self.token = torch.randn(2, 2, 16, generator=g)
        self.meta = {key: torch.randn(2, 2, self.N, 16, generator=g) for key in META}
        self.scores = torch.randn(2, 2, self.N, generator=g)
        self.P = torch.tensor([[[0, 2], [0, -1]], [[1, -1], [0, 1]]], dtype=torch.int32)
        self.selection = ck.select(self.scores, p.seq_lens, 16, 2, predicted=self.P)
        self.partials = ck.attend(*p.args(), self.P, *p.tail())
        self.state = ck.merge(*self.partials, (torch.empty_like(p.q), torch.empty(2, 6)))

    def rotary(self, channels: int = 12, **changed: Tensor) -> ck.Rotary:
        cos, sin = (f(torch.arange(2.0)[:, None] + torch.arange(channels)) for f in (torch.cos, torch.sin))
        given = {"q": self.p.q, "cos": cos, "sin": sin, "interleaved": False, "out": torch.empty_like(self.p.q)}
        return ck.Rotary(**given | changed)

    def arguments(self, op: str) -> dict[str, Any]:
        p, m = self.p, self.meta
        cache = {"k_new": self.token, "v_new": self.token, "k": p.k, "v": p.v}
        lens, page = {"seq_lens": p.seq_lens}, {"page_table": p.page_table}
        kv = {"q": p.q, "k": p.k, "v": p.v}
        o, lse = self.partials
        return {
            "append": {**cache, **lens, **page},
            "append_quest": {**cache, "kmin": m["kmin"], "kmax": m["kmax"], **lens, **page},
            "append_infllm": {**cache, "k1": m["k1"], "k2": m["k2"], **lens, **page},
            "quest_scores": {"q": p.q, "kmin": m["kmin"], "kmax": m["kmax"], **lens, "block_size": 16},
            "infllm_scores": {
                "q": p.q, "k1": m["k1"], "k2": m["k2"], **lens, "scale": 0.25, "block_size": 16, "num_blocks": 4
            },
            "select": {"scores": self.scores, **lens, "block_size": 16, "top_k": 2, "predicted": self.P},
            "predict": {
                "scores": self.scores, "level": torch.zeros_like(self.scores), "trend": torch.zeros_like(self.scores),
                "theta": torch.ones(2, 3), **lens, "block_size": 16, "sink": 0, "local": 1, "out": self.P.clone(),
            },
            "rank_infllm": {
                "q": p.q, "k1": m["k1"], "k2": m["k2"], **lens, "scale": 0.25, "scores": self.scores.clone(),
                "top_k": 2, "block_size": 16, "predicted": self.P,
            },
            "attend": {**kv, "ids": self.P, **lens, "scale": 0.25, **page},
            "merge": {"o": o, "lse": lse, "out": (torch.empty(2, 6, 16), torch.empty(2, 6))},
            "attend_missed": {**kv, "selection": self.selection, **lens, "scale": 0.25, **page},
            "merge_repaired": {
                "selection": self.selection, "o": o, "lse": lse, "fresh_o": o, "fresh_lse": lse,
                "out": (torch.empty(2, 6, 16), torch.empty(2, 6)),
            },
            "repair": {
                **kv, "selection": self.selection, "o": o, "lse": lse, **lens, "scale": 0.25, **page,
            },
            "repair_union": {
                **kv, "selection": self.selection, "o": self.state[0], "lse": self.state[1],
                **lens, "scale": 0.25, **page,
            },
        }[op]  # fmt: skip

    def ready(self, op: str, **changed: Any) -> Callable[[], Any]:
        arguments = self.arguments(op) | changed
        return lambda: getattr(ck, op)(**arguments)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


# ---------------------------------------------------------------------------------------------------- the door
_buffers = ck.Selection.empty(2, 2, 2, "cpu")
SHARED = {"predicted": _buffers.ids[:, :, :1], "out": _buffers}
TWICE = {"out": _buffers._replace(missed=_buffers.position)}
TENSORS = {
    "append": ("k_new", "v_new", "k", "v", "seq_lens", "page_table"),
    "append_quest": ("k_new", "v_new", "k", "v", "kmin", "kmax", "seq_lens", "page_table"),
    "append_infllm": ("k_new", "v_new", "k", "v", "k1", "k2", "seq_lens", "page_table"),
    "quest_scores": ("q", "kmin", "kmax", "seq_lens"),
    "infllm_scores": ("q", "k1", "k2", "seq_lens"),
    "select": ("scores", "seq_lens", "predicted"),
    "predict": ("scores", "level", "trend", "theta", "seq_lens", "out"),
    "attend": ("q", "k", "v", "ids", "seq_lens", "page_table"),
    "rank_infllm": ("q", "k1", "k2", "seq_lens", "scores", "predicted"),
    "merge": ("o", "lse"),
    "attend_missed": ("q", "k", "v", "seq_lens", "page_table"),
    "merge_repaired": ("o", "lse", "fresh_o", "fresh_lse"),
    "repair": ("q", "k", "v", "o", "lse", "seq_lens", "page_table"),
    "repair_union": ("q", "k", "v", "o", "lse", "seq_lens", "page_table"),
}
EVERY = [(op, name) for op, names in TENSORS.items() for name in names]


@pytest.fixture(scope="module")
def args() -> Args:
    return Args()


@pytest.mark.parametrize("op", sorted(TENSORS))
def test_what_fits_is_taken(op: str) -> None:
    Args().ready(op)()


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_wrong_shapes_devices_and_dtypes_are_refused_by_name(args: Args, op: str, name: str) -> None:
    """For every tensor of every op: an axis less, one row less, another device, another dtype."""
    x = args.arguments(op)[name]
    message = refused(args.ready(op, **{name: x[0]}))
    assert message.startswith(f"{op}: ") and name in message and "axes" in message and str(tuple(x[0].shape)) in message

    message = refused(args.ready(op, **{name: x[:1]}))
    assert message.startswith(f"{op}: ") and "B = 1" in message and "B = 2" in message

    message = refused(args.ready(op, **{name: x.to("meta")}))
    assert message.startswith(f"{op}: ") and "meta" in message and "cpu" in message

    integers = x.dtype == torch.int32
    message = refused(args.ready(op, **{name: x.long() if integers else x.double()}))
    assert message.startswith(f"{op}: ")
    assert ("int64" in message and "int32" in message) if integers else "float64" in message or "float32" in message


@pytest.mark.parametrize(
    ("op", "changed", "words"),
    [
        ("attend", {"q": torch.randn(2, 5, 16)}, "attend: 5 query heads are no multiple of 2 KV heads"),
        ("quest_scores", {"q": torch.randn(2, 0, 16)}, "quest_scores: 0 query heads are no multiple of 2 KV heads"),
        ("infllm_scores", {"q": torch.randn(2, 3, 16)}, "infllm_scores: 3 query heads are no multiple of 2 KV heads"),
        ("attend", {"q": torch.randn(2, 6, 8)}, "attend: q (2, 6, 8) has D = 8, k has D = 16"),
        ("append", {"k_new": torch.randn(2, 3, 16)}, "append: k_new (2, 3, 16) has H = 3, k has H = 2"),
        ("attend", {"out": (torch.empty(2, 2, 2, 3, 16), torch.empty(2, 2, 2, 4))}, "expected [B, H, N, 3]"),
        ("attend", {"beside": True}, "attend: beside another op it needs out, allocated before that one was called"),
        ("rank_infllm", {"q": torch.randn(2, 3, 16)}, "rank_infllm: 3 query heads are no multiple of 2 KV heads"),
        (
            "rank_infllm",
            {"out": ck.Selection.empty(2, 3, 2, "cpu")},
            "rank_infllm: out.ids (2, 3, 2) has H = 3, k1 has H = 2",
        ),
        ("rank_infllm", {"sink": 2}, "rank_infllm: 2 sink + 1 local blocks are forced, but K is 2"),
        ("rank_infllm", {"window": 40}, "rank_infllm: block 16 and window 40, expected multiples of stride 16"),
        ("rank_infllm", {"stride": 0}, "rank_infllm: stride 0, expected at least 1"),
        ("select", SHARED, "select: predicted and out.ids share memory, and one is written while the other is read"),
        ("rank_infllm", SHARED, "rank_infllm: predicted and out.ids share memory, and one is written while"),
        ("select", TWICE, "select: out.position and out.missed share memory"),
        ("repair", {"o": torch.zeros(2, 2, 2, 4, 16)}, "repair: o is (2, 2, 2, 4, 16), expected [B, H, P, 3, D]"),
        ("repair", {"lse": torch.zeros(2, 2, 5, 3)}, "repair: lse (2, 2, 5, 3) has P = 5, o has P = 2"),
        (
            "repair",
            {"out": (torch.empty(2, 6, 8), torch.empty(2, 6))},
            "repair: out[0] (2, 6, 8) has D = 8, k has D = 16",
        ),
        (
            "merge",
            {"out": (torch.empty(2, 4, 16), torch.empty(2, 6))},
            "merge: out[0] is (2, 4, 16), expected [B, 6, D]",
        ),
        ("predict", {"theta": torch.ones(2, 4)}, "predict: theta is (2, 4), expected [B, 3]"),
        ("select", {"out": ck.Selection.empty(2, 2, 4, "cpu")}, "select: out.ids is (2, 2, 4), expected [B, H, 2]"),
        ("select", {"sink": 2, "local": 1}, "select: 2 sink + 1 local blocks are forced, but K is 2"),
        ("predict", {"sink": 3}, "predict: 3 sink + 1 local blocks are forced, but K is 2"),
        ("select", {"top_k": -1}, "select: K -1, sink 0 and local 1 blocks, expected none below 0"),
        ("select", {"local": -1}, "select: K 2, sink 0 and local -1 blocks, expected none below 0"),
        ("select", {"block_size": 0}, "select: block size 0, expected at least 1"),
        ("predict", {"block_size": -16}, "predict: block size -16, expected at least 1"),
        ("quest_scores", {"block_size": 0}, "quest_scores: block size 0, expected at least 1"),
        ("infllm_scores", {"stride": 0}, "infllm_scores: stride 0, expected at least 1"),
        ("infllm_scores", {"coarse_stride": -1}, "infllm_scores: coarse stride -1, expected at least 1"),
        ("append_infllm", {"window": 0}, "append_infllm: window 0, expected at least 1"),
        ("infllm_scores", {"block_size": 24}, "block 24 and window 32, expected multiples of stride 16"),
        ("infllm_scores", {"window": 40}, "block 16 and window 40, expected multiples of stride 16"),
        ("infllm_scores", {"num_blocks": None}, "infllm_scores: pass out or num_blocks"),
    ],
)
def test_sizes_and_rules_are_checked(args: Args, op: str, changed: dict[str, Any], words: str) -> None:
    assert words in refused(args.ready(op, **changed))


def test_a_selection_is_checked_by_its_parts(args: Args) -> None:
    wrong = args.selection._replace(position=args.selection.position[..., :1])
    assert "selection.position (2, 2, 1) has K = 1, selection.ids has K = 2" in refused(
        args.ready("repair", selection=wrong)
    )
    wrong = args.selection._replace(missed=args.selection.missed.long())
    assert "selection.missed is int64, expected int32" in refused(args.ready("repair_union", selection=wrong))


# ---------------------------------------------------------------------------------------------------- ids out of range
OUT_OF_RANGE = (3, 10**6, 2**31 - 1, -2, -(2**31))


@pytest.mark.parametrize("bad", OUT_OF_RANGE)
def test_debug_mode_names_an_id_out_of_range(args: Args, debugging: None, bad: int) -> None:
    ids = args.P.clone()
    ids[0, 1, 1] = bad
    words = f"attend: id {bad} at [0, 1, 1] is out of range, row 0 has 3 blocks"
    assert refused(args.ready("attend", ids=ids)) == words
    wrong = args.selection._replace(ids=ids, missed=ids)
    assert refused(args.ready("repair", selection=wrong)) == words.replace("attend", "repair")
    assert refused(args.ready("repair_union", selection=wrong)) == words.replace("attend", "repair_union")


def test_debug_mode_takes_padding_and_what_is_in_range(args: Args, debugging: None) -> None:
    for op in ("attend", "repair", "repair_union"):
        args.ready(op)()
    short = args.P.clone()
    short[1, 0, 0] = 2  # row 1 has but 2 blocks
    assert "id 2 at [1, 0, 0] is out of range, row 1 has 2 blocks" in refused(args.ready("attend", ids=short))


@pytest.mark.parametrize("bad", OUT_OF_RANGE)
def test_without_debug_mode_ids_out_of_range_are_padding(args: Args, bad: int) -> None:
    ids = args.P.clone()
    ids[0, 0, 1] = bad
    o, lse = args.ready("attend", ids=ids)()
    assert bool((o[0, 0, 1] == 0).all()) and bool((lse[0, 0, 1] == -INF).all())
    padded = ids.clone()
    padded[0, 0, 1] = -1
    for op in ("repair", "repair_union"):
        wrong, right = (
            args.selection._replace(ids=x, missed=x, position=torch.full_like(x, -1)) for x in (ids, padded)
        )
        pairs = zip(args.ready(op, selection=wrong)(), args.ready(op, selection=right)(), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------- append
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_writes_one_token_a_row_and_nothing_else(paged: bool, dtype: torch.dtype) -> None:
    p = make(2, [16, 33, 0, 15], 16, H=2, dtype=dtype, paged=paged)
    before = p.k.clone(), p.v.clone()
    at = [16, 15, None, 3]  # the newest position of each row
    if p.page_table is not None:  # a block that opens gets a slot that is free
        for h in range(2):
            used = p.page_table[0, h].tolist()
            p.page_table[0, h, 1] = next(s for s in range(p.k.shape[2]) if s not in used)
    lengths = torch.tensor([17, 16, 0, 4], dtype=torch.int32)
    new = torch.randn(2, 4, 2, 16).to(dtype)
    ck.append(new[0], new[1], p.k, p.v, lengths, p.page_table)
    for cache, old, token in zip((p.k, p.v), before, new, strict=True):
        want = old.clone()
        for b, position in enumerate(at):
            for h in range(2):
                if position is not None:
                    block = position // 16
                    slot = block if p.page_table is None else int(p.page_table[b, h, block])
                    want[b, h, slot, position % 16] = token[b, h]
        assert same_bits(cache, want)


@pytest.mark.parametrize("op", ["append_quest", "append_infllm"])
def test_metadata_is_kept_by_block_whatever_slots_the_page_table_gives(op: str) -> None:
    """Ragged rows grow in a shuffled cache and in a plain one: the same metadata, bit for bit; a row of 0 has none."""
    starts, steps = [0, 13, 30, 0], 150
    keys = torch.randn(steps, 4, 2, 16, generator=torch.Generator().manual_seed(1))
    slots = torch.stack([torch.randperm(14, generator=torch.Generator().manual_seed(i))[:12] for i in range(8)])
    table, runs = slots.int().view(4, 2, 12), []
    for page_table in (None, table):
        k = torch.full((4, 2, 14, 16, 16), NAN)
        v, low, high = k.clone(), torch.full((4, 2, 12, 16), NAN), torch.full((4, 2, 12, 16), NAN)
        for b in (1, 2):  # a prompt of zeros
            for n in range(1, starts[b] + 1):
                lens = torch.tensor([n if i == b else 0 for i in range(4)], dtype=torch.int32)
                getattr(ck, op)(
                    torch.zeros(4, 2, 16), torch.zeros(4, 2, 16), k, v, low, high, lens, page_table=page_table
                )
        for t in range(steps):
            lens = torch.tensor([n + t + 1 for n in starts[:3]] + [0], dtype=torch.int32)
            getattr(ck, op)(keys[t], keys[t], k, v, low, high, lens, page_table=page_table)
        runs.append((low, high))
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    assert bool(runs[0][0][:3, :, 0].isfinite().all()) and bool(runs[0][0][3].isnan().all())
    written = runs[0][0][:3, :, :, 0].isfinite().sum(2)
    tokens = [n + steps for n in starts[:3]]
    want = [-(-n // 16) if op == "append_quest" else (n - 32) // 16 + 1 for n in tokens]
    assert written.tolist() == [[n, n] for n in want]


# ---------------------------------------------------------------------------------------------------- RoPE
APPENDS = ("append", "append_quest", "append_infllm")


def angles(x: Tensor, R: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos, sin [B, R] of x's rows, of R / 2 angles twice."""
    turn = torch.randn(x.shape[0], R // 2, generator=torch.Generator().manual_seed(seed)).mul(3).repeat(1, 2)
    return turn.cos().to(dtype), turn.sin().to(dtype)


heads = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16]), st.integers(1, 4), st.booleans())


@given(heads, st.integers(0, 99))
def test_rotation_keeps_norms_and_what_is_beyond_its_channels(
    shape: tuple[int, int, int, int, bool], seed: int
) -> None:
    B, H, D, quarter, interleaved = shape
    R = D * quarter // 4
    x = torch.randn(B, H, D, generator=torch.Generator().manual_seed(seed))
    y = rotate(x, *angles(x, R, seed), interleaved)
    assert same_bits(y[..., R:], x[..., R:])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    still = torch.ones(B, R), torch.zeros(B, R)
    assert torch.equal(rotate(x, *still, interleaved), x)


@given(heads, st.integers(0, 99))
def test_rotations_add_up_and_scores_see_their_difference(shape: tuple[int, int, int, int, bool], seed: int) -> None:
    B, H, D, _, interleaved = shape
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, B, H, D, generator=g, dtype=torch.float64).float()
    first, second = torch.randn(2, B, D // 2, generator=g).repeat(1, 1, 2)
    turned = lambda z, a: rotate(z, a.cos(), a.sin(), interleaved)
    torch.testing.assert_close(turned(turned(x, first), second), turned(x, first + second), atol=1e-5, rtol=1e-5)
    want = (turned(x, first - second) * y).sum(-1)
    torch.testing.assert_close((turned(x, first) * turned(y, second)).sum(-1), want, atol=1e-4, rtol=1e-4)


@given(heads, st.integers(0, 99))
def test_the_two_kinds_of_pairs_differ_by_the_order_of_channels(
    shape: tuple[int, int, int, int, bool], seed: int
) -> None:
    B, H, D, quarter, _ = shape
    R = D * quarter // 4
    x = torch.randn(B, H, D, generator=torch.Generator().manual_seed(seed)).bfloat16()
    order = torch.cat((torch.arange(R).view(2, -1).T.flatten(), torch.arange(R, D)))
    turn = angles(x, R, seed, torch.bfloat16)
    assert same_bits(rotate(x[..., order], *turn, True), rotate(x, *turn, False)[..., order])


@pytest.mark.parametrize("op", APPENDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_with_rope_is_append_behind_rope(op: str, interleaved: bool) -> None:
    runs = []
    for inside in (True, False):
        a = Args()
        given, rotary = a.arguments(op), a.rotary(interleaved=interleaved)
        turn = rotary[1:4]
        if inside:
            getattr(ck, op)(**given, rotary=rotary)
        else:
            rotary.out.copy_(rotate(a.p.q, *turn))
            getattr(ck, op)(**given | {"k_new": rotate(a.token, *turn)})
        runs.append([rotary.out, a.p.k, a.p.v, *a.meta.values()])
    assert all(same_bits(x, y) for x, y in zip(*runs, strict=True))
    assert not torch.equal(runs[0][0], Args().p.q)


@pytest.mark.parametrize("op", APPENDS)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": (both := torch.ones(2, 6, 16)), "out": both}, "q and out share memory"),
        ({"q": torch.ones(2, 6, 8)}, "q (2, 6, 8) has D = 8, k has D = 16"),
        ({"out": torch.ones(2, 4, 16)}, "out (2, 4, 16) has Hq = 4, q has Hq = 6"),
        ({"q": torch.ones(2, 5, 16), "out": torch.ones(2, 5, 16)}, "5 query heads are no multiple of 2 KV heads"),
        ({"cos": torch.ones(1, 12)}, "cos (1, 12) has B = 1, k has B = 2"),
        ({"sin": torch.ones(2, 8)}, "sin (2, 8) has R = 8, cos has R = 12"),
        ({"cos": torch.ones(2, 12).bfloat16()}, "cos is bfloat16, expected float32"),
        ({"cos": torch.ones(2, 7), "sin": torch.ones(2, 7)}, "cos and sin are of 7 channels, expected an even"),
        ({"cos": torch.ones(2, 18), "sin": torch.ones(2, 18)}, "cos and sin are of 18 channels, expected an even"),
    ],
)  # fmt: skip
def test_rope_that_does_not_fit_is_refused(args: Args, op: str, changed: dict[str, Tensor], words: str) -> None:
    assert refused(args.ready(op, rotary=args.rotary(**changed))).startswith(f"{op}: {words}")


# ---------------------------------------------------------------------------------------------------- nothing to do
@pytest.mark.parametrize("axis", ["B", "S", "N", "K", "P", "tokens"])
def test_an_axis_of_nothing_gives_nothing(axis: str) -> None:
    """No sequences, no slots, no blocks, an A or a P of none, no tokens: of every op that has the axis."""
    n = {"B": 2, "S": 4, "N": 4, "K": 2, "P": 3, "tokens": 50} | {axis: 0}
    B, S, N, K, P = (n[key] for key in ("B", "S", "N", "K", "P"))
    H, G, D, T = 2, 3, 16, 16
    blocks = lambda count: torch.randn(B, H, count, D)
    tokens = min(n["tokens"], S * T, N * T)
    lens, q, k = torch.full((B,), tokens, dtype=torch.int32), torch.randn(B, H * G, D), torch.randn(B, H, S, T, D)
    windows = [blocks(max(0, (N * T - size) // step + 1)) for size, step in ((32, 16), (128, 64))]
    P_, A, rule = torch.full((B, H, P), -1, dtype=torch.int32), ck.Selection.empty(B, H, K, "cpu"), (0, min(1, K))
    if K:
        A.ids[..., 0] = 0

    scores = torch.full((B, H, N), NAN)
    assert ck.quest_scores(q, blocks(N), blocks(N), lens, T, scores).shape == (B, H, N) and not scores.isnan().any()
    scores.fill_(NAN)
    assert not ck.infllm_scores(q, *windows, lens, 0.2, T, out=scores).isnan().any()
    chosen = ck.select(scores, lens, T, K, *rule, P_)
    assert chosen.counts.amax() <= K if B else chosen.ids.shape == (0, H, K)
    state = torch.full_like(scores, NAN), torch.zeros_like(scores), torch.rand(B, 3)
    assert ck.predict(scores, *state, lens, T, 0, min(1, P), P_.clone()).shape == (B, H, P)

    o, lse = ck.attend(q, k, k, A.ids, lens, 0.2)
    alive = lse > -torch.inf
    assert bool(alive.any()) == (axis == "P"), "all others leave no token to attend to"
    assert not o.isnan().any() and bool((o[~alive] == 0).all())
    wanted, log = ck.merge(o, lse, (torch.empty_like(q), torch.empty(B, H * G)))
    ahead = ck.attend(q, k, k, P_, lens, 0.2)
    repaired = ck.repair(q, k, k, A, *ahead, lens, 0.2)
    assert torch.equal(repaired[0], wanted) and torch.equal(repaired[1], log)


# ---------------------------------------------------------------------------------------------------- torch custom ops
@pytest.mark.parametrize("op", sorted(TENSORS))
def test_opcheck(op: str) -> None:
    """Schema (what is mutated), fake tensors, autograd registration, AOT with dynamic shapes."""
    a = Args()
    p, m, ids = a.p, a.meta, a.P
    outputs = torch.empty_like(p.q), torch.empty(2, 6)
    kv, tail = (p.q, p.k, p.v), (p.seq_lens, 0.25, p.page_table)
    cache = a.token, a.token, p.k.nan_to_num(), p.v.nan_to_num()
    state = (torch.zeros_like(a.scores), torch.zeros_like(a.scores), torch.ones(2, 3))
    sizes = (16, 32, 16, 128, 64)
    given: dict[str, tuple] = {
        "append": (*cache, p.seq_lens, p.page_table, *a.rotary()),
        "append_quest": (*cache, m["kmin"], m["kmax"], p.seq_lens, p.page_table, *a.rotary()),
        "append_infllm": (*cache, m["k1"], m["k2"], p.seq_lens, *sizes[1:], p.page_table, *a.rotary()),
        "quest_scores": (p.q, m["kmin"], m["kmax"], p.seq_lens, 16, False, torch.empty_like(a.scores)),
        "infllm_scores": (p.q, m["k1"], m["k2"], p.seq_lens, 0.25, *sizes, False, torch.empty_like(a.scores)),
        "select": (a.scores, p.seq_lens, 16, 0, 1, ids, *a.selection),
        "rank_infllm": (
            p.q, m["k1"], m["k2"], p.seq_lens, 0.25, *sizes, False, 0, 1, ids, a.scores.clone(), *a.selection
        ),
        "predict": (a.scores, *state, p.seq_lens, 16, 0, 1, ids.clone()),
        "attend": (*kv, ids, *tail, *(torch.empty_like(x) for x in a.partials), True),
        "merge": (*a.partials, *outputs),
        "attend_missed": (*kv, *a.selection[:2], *tail, *(torch.empty_like(x) for x in a.partials)),
        "merge_repaired": (a.selection.position, *a.partials, *(x.clone() for x in a.partials), *outputs),
        "repair": (*kv, a.selection.ids, a.selection.position, *a.partials, *tail, *outputs),
        "repair_union": (*kv, a.selection.missed, *a.state, *tail, *outputs),
    }  # fmt: skip
    torch.library.opcheck(ck.OPS[op], given[op])


def step(q: Tensor, new: Tensor, p: Problem, kmin: Tensor, kmax: Tensor, lens: Tensor, P: Tensor) -> list[Tensor]:
    """One decode step of a layer: append, score, select, repair."""
    ck.append_quest(new, -new, p.k, p.v, kmin, kmax, lens)
    partials = ck.attend(q, p.k, p.v, P, lens, 0.25)
    A = ck.select(ck.quest_scores(q, kmin, kmax, lens, 16), lens, 16, 3, sink=1, predicted=P)
    return [*ck.repair(q, p.k, p.v, A, *partials, lens, 0.25), *A]


def test_a_compiled_step_is_one_graph_and_gives_the_same_bits() -> None:
    runs = []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        p = make(6, [90, 64], 16, H=2, G=4, paged=False, spare=2)
        kmin, kmax = torch.full((2, 2, p.capacity, 16), NAN), torch.full((2, 2, p.capacity, 16), NAN)
        for b, x in enumerate(p.keys):
            for i, block in enumerate(x.split(16, 1)):
                kmin[b, :, i], kmax[b, :, i] = block.amin(1), block.amax(1)
        P = torch.tensor([0, 1, -1], dtype=torch.int32).repeat(2, 2, 1)
        got = []
        for t in range(2):
            new = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(t))
            q = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(9 + t))
            got += f(q, new, p, kmin, kmax, p.seq_lens + 1 + t, P)
        runs.append([*got, p.k, p.v, kmin, kmax])
    assert all(same_bits(x, y) for x, y in zip(*runs, strict=True))
    assert bool(runs[0][0].isfinite().all())
