# SPDX-License-Identifier: Apache-2.0
"""repair, its two halves, and repair_union: attend over the missed blocks, then merge, started early (PDL).

They have no kernels of their own, and that is what makes `exact` exact: a missed block is computed by the kernel that
computed the predicted ones, and merged by the kernel that merges a serial step. One launch of both, in a cluster that
selects, attends and merges, was built and measured: it takes whole SMs, so that it starts late, and it lost 2 us.
"""

import torch

from cutlass_kernels.templates import attend, merge


def _fresh(q, ids):
    """Room for the partials of `ids`: attend writes what the merge will read of it."""
    G, D = q.shape[1] // ids.shape[1], q.shape[2]
    n = ids.numel() * G
    room = q.new_empty(n * (D + 1), dtype=torch.float32)
    return room[: n * D].view(*ids.shape, G, D), room[n * D :].view(*ids.shape, G)


def attend_missed(q, k, v, ids, position, seq_lens, scale, page_table, o, lse):
    """The op."""
    attend.launch(q, k, v, ids, position, seq_lens, page_table, o, lse, attend.MISSED, scale, "attend_missed")


def merge_repaired(position, o, lse, fresh_o, fresh_lse, out, out_lse):
    """The op."""
    position = position if position.numel() else None
    merge.launch(o, lse, (fresh_o, fresh_lse), position, 0, out, out_lse, "merge_repaired")


def repair(q, k, v, ids, position, o, lse, seq_lens, scale, page_table, out, out_lse):
    """The op: exact. Bit for bit merge(attend(ids))."""
    fresh = _fresh(q, ids)
    attend.launch(q, k, v, ids, position, seq_lens, page_table, *fresh, attend.MISSED, scale, "repair")
    merge.launch(o, lse, fresh, position if ids.numel() else None, 0, out, out_lse, "repair")


def repair_union(q, k, v, missed, o, lse, seq_lens, scale, page_table, out, out_lse):
    """The op: the paper's. The running state of P is one more part, the first."""
    B, H, _ = missed.shape
    fresh = _fresh(q, missed)
    attend.launch(q, k, v, missed, missed, seq_lens, page_table, *fresh, attend.FRESH, scale, "repair_union")
    state = o.view(B, H, 1, -1, q.shape[2]), lse.view(B, H, 1, -1)
    merge.launch(*state, fresh, None, 1, out, out_lse, "repair_union")
