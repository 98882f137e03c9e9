# SPDX-License-Identifier: Apache-2.0
"""What a sparse attention method is: metadata of the cache, scores of the blocks, and a selection rule.

To add a method, subclass SparseMethod in one file (three functions: metadata, append, score; and rebuild, from which
tests check append) and name the class by `_target_` in conf/dsa/<name>.yaml. Everything else (selection, prediction,
repair, the cache) works on scores and block ids alone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.reference import rotate, rotated
from prr_pipeline.errors import ConfigError

Metadata = dict[str, Tensor]


@dataclass(kw_only=True)
class SparseMethod(ABC):
    """The selection rule and its metadata.

    top_k blocks are attended, `sink` first and `local` last ones (the current one among them) always. The first
    dense_layers layers, and contexts shorter than dense_len tokens, are dense by the method's own rule.
    """

    name: str
    block_size: int  # tokens
    top_k: int  # blocks, forced ones included
    sink: int = 0  # blocks
    local: int = 1  # blocks
    dense_layers: int = 0
    dense_len: int = 0  # tokens

    def check(self) -> None:
        """Raise ConfigError for values that no step could run with."""
        for key, low in (
            ("block_size", 1),
            ("top_k", 1),
            ("sink", 0),
            ("local", 1),
            ("dense_layers", 0),
            ("dense_len", 0),
        ):
            if getattr(self, key) < low:
                raise ConfigError(f"dsa.{key} = {getattr(self, key)}, expected at least {low}")
        if type(self).selects is not SparseMethod.selects:
            raise ConfigError(
                f"{type(self).__name__} has a `selects` of its own; a step selects in all layers behind the first "
                "dense_layers, or in none (dense_len): set those"
            )
        if self.sink + self.local > self.top_k:
            raise ConfigError(
                f"dsa.top_k = {self.top_k} blocks cannot hold dsa.sink = {self.sink} and dsa.local = {self.local} "
                "forced blocks; raise top_k or lower the others"
            )

    @property
    def budget_tokens(self) -> int:
        """Tokens attended a step and KV head."""
        return self.top_k * self.block_size

    def blocks(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_size)

    def selects(self, layer: int, tokens: int) -> bool:
        """Whether a decode step at this length selects in this layer (else it is dense)."""
        return layer >= self.dense_layers and tokens >= self.dense_len and self.blocks(tokens) > self.top_k

    def forced(self, blocks: int) -> int:
        """Forced blocks among that many."""
        return min(blocks, self.sink + self.local)

    @abstractmethod
    def metadata(self, k: Tensor) -> Metadata:
        """Empty metadata for a cache k [B, H_kv, N, block, D], poisoned with NaN."""

    @abstractmethod
    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor) -> None:
        """Write the newest token [B, H_kv, D], its key after RoPE, and update the metadata, in place.

        The token is at position seq_lens - 1.
        """

    def append_rotary(
        self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor, rotary: ck.Rotary
    ) -> None:
        """RoPE of the newest key and of the step's queries, and append. Here, one behind the other.

        A method whose op does both may have its own, of the same bits.
        """
        self.append(rotated(k_new, *rotary), v_new, k, v, meta, seq_lens)

    @abstractmethod
    def rebuild(self, k: Tensor, meta: Metadata, tokens: int) -> None:
        """Write the metadata of the first `tokens` tokens of every row from the keys alone, bit for bit as append."""

    @abstractmethod
    def score(self, q: Tensor, meta: Metadata, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        """Scores of all blocks into out [B, H_kv, N] float32; -inf for blocks without tokens, and only for them.

        The same arguments give the same bits; q is left as it is. See probe.

        Args:
            q: [B, Hq, D].
            meta: of B sequences, or of one that all queries ask.
        """

    def rank_blocks(
        self,
        q: Tensor,
        meta: Metadata,
        seq_lens: Tensor,
        scale: float,
        scores: Tensor,
        predicted: Tensor | None = None,
        out: ck.Selection | None = None,
    ) -> ck.Selection:
        """What a step asks: the scores of all blocks, and from them A, held against P. Here, score and select.

        A method whose kernel does both may have its own: A must be that of the scores which it writes, and its last
        launch one that attention may run beside, see cutlass_kernels.attend.

        Args:
            q, meta: as for score; of B sequences.
            scores: [B, H_kv, N] float32, written.
            predicted: P, [B, H_kv, P] int32; None: the empty set.
            out: buffers to write, allocated when None.
        """
        self.score(q, meta, seq_lens, scale, scores)
        return ck.select(scores, seq_lens, self.block_size, self.top_k, self.sink, self.local, predicted, out)


def probe(
    method: SparseMethod, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str | torch.device
) -> None:
    """Run a method once on random keys, at a length where it selects, and hold what it does against its contract.

    Modes are compared bit for bit, so what a method leaves unwritten or does anew each time would show as their fault.

    Args:
        q_heads, kv_heads, head_dim, dtype: of the model.
        device: of the job; on a GPU two queries ask one sequence, as the rows of a prompt do there.

    Raises:
        ConfigError: says what was wrong, and names the class.
    """
    tokens = max(method.dense_len, method.budget_tokens + 1, _PROBED) + method.block_size // 2
    gen = torch.Generator().manual_seed(tokens)
    rows = 2 if torch.device(device).type == "cuda" else 1

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    def wrong(what: str) -> ConfigError:
        cls = type(method)
        return ConfigError(f"dsa._target_ = {cls.__module__}.{cls.__qualname__} (dsa={method.name}): {what}")

    n = method.blocks(tokens)
    room = -(-(tokens + method.block_size) // _ROOMY) * _ROOMY  # the last blocks stay empty
    shape = (1, kv_heads, method.blocks(room), method.block_size, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    for x in (k, v):
        flat_tokens(x, tokens - 1)[:] = noise(1, kv_heads, tokens - 1, head_dim)
    meta = method.metadata(k)
    if not (isinstance(meta, dict) and all(isinstance(x, Tensor) for x in meta.values())):
        raise wrong(f"metadata() gave {type(meta).__name__}, expected tensors by name")
    method.rebuild(k, meta, tokens - 1)
    lens = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    k_new, v_new = noise(1, kv_heads, head_dim), noise(1, kv_heads, head_dim)
    method.append(k_new, v_new, k, v, meta, lens[:1])
    for name, x, token in (("k", k, k_new), ("v", v, v_new)):
        if not torch.equal(flat_tokens(x, tokens)[:, :, -1], token):
            raise wrong(f"append() did not write the new token into {name}")
    q = noise(rows, q_heads, head_dim)
    found = []
    for before in (float("nan"), _UNWRITTEN):
        out = torch.full((rows, *shape[1:3]), before, dtype=torch.float32, device=device)
        asked = q.clone()
        method.score(asked, meta, lens, head_dim**-0.5, out)
        if not torch.equal(asked, q):
            raise wrong("score() changed q, which attention reads after it")
        found.append(out[:, :, :n])
    if fault := _fault(method, *found):
        raise wrong(f"score() {fault}")
    if fault := _ranking_fault(method, q[:1], meta, lens[:1], kv_heads, shape[2]):
        raise wrong(f"rank_blocks() {fault}")
    if fault := _rotary_fault(method, q[:1], (k_new, v_new), (k, v, meta), lens[:1]):
        raise wrong(f"append_rotary() {fault}")


_PROBED = 4096  # tokens at least: below the length of its windows a method may have no scores
_ROOMY = 2048  # tokens that a cache on a GPU is a multiple of
_UNWRITTEN = 1.2345678e33  # no score


def _fault(method: SparseMethod, first: Tensor, second: Tensor) -> str | None:
    """What is wrong with scores [B, H_kv, N] of blocks with tokens; written over NaN, and over _UNWRITTEN again."""
    untouched = first.isnan() & (second == torch.tensor(_UNWRITTEN, dtype=torch.float32))
    whole = first.numel()
    if n := int(untouched.sum()):
        return f"left {n} of {whole} scores in out unwritten; out [B, H_kv, N] gets the scores of all blocks"
    if n := int(first.isnan().sum()):
        return f"gave NaN for {n} of {whole} blocks with tokens"
    if not torch.equal(first, second):
        return "gave other scores for the same query and keys; modes could not be compared"
    free = first[:, :, method.sink : first.shape[2] - method.local]
    if n := int((~free.isfinite()).sum()):
        return f"gave scores that are not finite for {n} of {free.numel()} blocks that no rule forces into A"
    return None


def _ranking_fault(
    method: SparseMethod, q: Tensor, meta: Metadata, lens: Tensor, heads: int, capacity: int
) -> str | None:
    """What is wrong with the ranking of a row, which must be that of the scores that it writes."""
    n = method.blocks(int(lens))
    P = torch.arange(min(n, method.top_k), dtype=torch.int32, device=q.device).repeat(1, heads, 1)
    rule, found = (method.block_size, method.top_k, method.sink, method.local), []
    for before in (float("nan"), _UNWRITTEN):
        scores = torch.full((1, heads, capacity), before, dtype=torch.float32, device=q.device)
        out = ck.Selection.empty(1, heads, method.top_k, q.device)
        A = method.rank_blocks(q, meta, lens, q.shape[2] ** -0.5, scores, P, out)
        if not (isinstance(A, tuple) and all(x is y for x, y in zip(A, out, strict=True))):
            return "did not give back the buffers of out"
        if not all(map(torch.equal, A, ck.select(scores, lens, *rule, P))):
            return "gave an A, or a comparison with P, that is not that of the scores which it wrote"
        found.append(scores[:, :, :n])
    return _fault(method, *found)


def _rotary_fault(
    method: SparseMethod,
    q: Tensor,
    token: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor, Metadata],
    lens: Tensor,
) -> str | None:
    """What is wrong with append_rotary, which must be append behind RoPE, bit for bit."""
    angles = torch.linspace(0, 3, q.shape[2] // 2, device=q.device).repeat(1, 2)
    turn, out, kept = (angles.cos().to(q), angles.sin().to(q), False), torch.empty_like(q), []
    for inside in (True, False):
        k, v, meta = cache[0].clone(), cache[1].clone(), {name: x.clone() for name, x in cache[2].items()}
        if inside:
            method.append_rotary(*token, k, v, meta, lens, ck.Rotary(q, *turn, out))
        else:
            method.append(rotate(token[0], *turn), token[1], k, v, meta, lens)
        kept.append((k, v, *meta.values()))
    if not torch.equal(out, rotate(q, *turn)):
        return "left other queries in rotary.out than RoPE of q"
    same = all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(*kept, strict=True))
    return None if same else "left another key, value or metadata than append behind RoPE"


def poison(k: Tensor, rows: int) -> Tensor:
    """[B, H_kv, rows, D] of k's dtype, full of NaN."""
    return k.new_full((*k.shape[:2], rows, k.shape[4]), float("nan"))


def flat_tokens(k: Tensor, tokens: int) -> Tensor:
    """[B, H_kv, N, block, D] -> the first tokens as [B, H_kv, tokens, D], a view."""
    return k.flatten(2, 3)[:, :, :tokens]


def positions(k: Tensor, tokens: int) -> Tensor:
    """[N, block] bool: the place holds one of the first tokens."""
    N, block = k.shape[2:4]
    return (torch.arange(N * block, device=k.device) < tokens).view(N, block)
