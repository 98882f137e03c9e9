# SPDX-License-Identifier: Apache-2.0
"""What the ops check at their door: sizes, dtypes and devices of tensors that belong together; on demand, their values.

Messages begin with the op's name and give both sides of what does not agree.
"""

from itertools import combinations

import torch
from torch import Tensor

from cutlass_kernels import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_debug = False


def debug(on: bool) -> None:
    """Raise on block ids and slots out of range (costs host syncs); see attend and append for what happens without."""
    global _debug
    _debug = on


class Dims:
    """Named sizes, bound at first use; a second use must agree."""

    def __init__(self, op: str):
        self.op = op
        self.sizes: dict[str, tuple[int, str]] = {}
        self.device: tuple[torch.device, str] | None = None

    def __call__(self, name: str, x: Tensor | None, axes: str, *dtypes: torch.dtype) -> None:
        """Check one tensor: `axes` names its sizes ("B H N D"), a digit is a literal size."""
        if x is None:
            return
        names = axes.split()
        if x.dim() != len(names):
            raise ValueError(f"{self.op}: {name} has {x.dim()} axes {tuple(x.shape)}, expected [{', '.join(names)}]")
        for axis, size in zip(names, x.shape, strict=True):
            if axis.isdigit():
                if int(axis) != size:
                    raise ValueError(f"{self.op}: {name} is {tuple(x.shape)}, expected [{', '.join(names)}]")
                continue
            bound, owner = self.sizes.setdefault(axis, (size, name))
            if bound != size:
                raise ValueError(
                    f"{self.op}: {name} {tuple(x.shape)} has {axis} = {size}, {owner} has {axis} = {bound}"
                )
        if dtypes and x.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(f"{self.op}: {name} is {str(x.dtype).removeprefix('torch.')}, expected {wanted}")
        device, owner = self.device or (x.device, name)
        self.device = (device, owner)
        if x.device != device:
            raise ValueError(f"{self.op}: {name} is on {x.device}, {owner} on {device}")

    def groups(self) -> int:
        """Query heads a KV head."""
        hq, h = self.sizes["Hq"][0], self.sizes["H"][0]
        if h == 0 or hq == 0 or hq % h:
            raise ValueError(f"{self.op}: {hq} query heads are no multiple of {h} KV heads")
        return hq // h


def check_ids(op: str, ids: Tensor, seq_lens: Tensor, block_size: int) -> None:
    """Hold listed blocks [B, H_kv, n], -1 padded, against the blocks that a row has."""
    if _debug:
        n = reference.num_blocks(seq_lens, block_size)[:, None, None]
        bad = (ids < -1) | (ids >= n)
        if bool(bad.any()):
            b, h, i = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{op}: id {int(ids[b, h, i])} at [{b}, {h}, {i}] is out of range, row {b} has {int(n[b])} blocks"
            )


def check_slots(op: str, name: str, x: Tensor, blocks: Tensor, page_table: Tensor | None = None) -> None:
    """Hold blocks [B, H_kv, n] (below 0: none) against the slots that x [B, H_kv, S, ...] has, by the page table."""
    if not _debug or not blocks.numel():
        return
    entries = x.shape[2] if page_table is None else page_table.shape[2]
    slots, bad = blocks, blocks >= entries
    if page_table is not None and entries:
        slots = page_table.gather(2, blocks.clamp(0, entries - 1).long())
    bad = (blocks >= 0) & (bad | (slots < 0) | (slots >= x.shape[2]))
    if bool(bad.any()):
        b, h, i = bad.nonzero()[0].tolist()
        block, slot = int(blocks[b, h, i]), int(slots[b, h, i])
        paged = "" if page_table is None else f", the page table {entries} entries"
        at = f" ({slot} by the page table)" if page_table is not None and block < entries else ""
        raise ValueError(
            f"{op}: block {block} of row {b}, head {h} has no slot{at}: {name} has {x.shape[2]} slots{paged}"
        )


def check_newest(
    op: str, name: str, x: Tensor, seq_lens: Tensor, size: int, stride: int, table: Tensor | None = None
) -> None:
    """Hold what the newest token completes, entry (seq_lens - size) // stride, against x [B, H_kv, S, ...]."""
    if _debug:
        entry = torch.where(seq_lens >= size, (seq_lens - size) // stride, -1)
        check_slots(op, name, x, entry[:, None, None].expand(-1, x.shape[1], 1), table)


def check_apart(op: str, **tensors: Tensor) -> None:
    """Refuse tensors that share memory, of which one is written while another is read; not where they are traced."""
    if torch.compiler.is_compiling():
        return
    spans = {name: _span(x) for name, x in tensors.items() if type(x) is Tensor and x.numel() and not x.is_meta}
    for (one, (first, end)), (other, (start, last)) in combinations(spans.items(), 2):
        if first < last and start < end:
            raise ValueError(f"{op}: {one} and {other} share memory, and one is written while the other is read")


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_positive(op: str, **sizes: int) -> None:
    """Refuse a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{op}: {name.replace('_', ' ')} {size}, expected at least 1")


def windows(window: int, stride: int, coarse_window: int, coarse_stride: int) -> dict[str, int]:
    """InfLLM-v2's sizes by name, for check_positive."""
    return {"window": window, "stride": stride, "coarse_window": coarse_window, "coarse_stride": coarse_stride}


def check_rule(op: str, K: int, sink: int, local: int, block_size: int) -> None:
    """Refuse a selection rule that no A can meet."""
    check_positive(op, block_size=block_size)
    if min(K, sink, local) < 0:
        raise ValueError(f"{op}: K {K}, sink {sink} and local {local} blocks, expected none below 0")
    if sink + local > K > 0:
        raise ValueError(f"{op}: {sink} sink + {local} local blocks are forced, but K is {K}")
