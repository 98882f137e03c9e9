# SPDX-License-Identifier: Apache-2.0
"""repair and repair_union: attend over the missed blocks, then merge; two launches, the second started early (PDL).

They have no kernels of their own, and that is what makes `exact` exact: a missed block is computed by the kernel that
computed the predicted ones, and merged by the kernel that merges a serial step. The merge is on the GPU while the
missed blocks are computed, and has read every partial that was at hand when the last of them is done. One launch of
both, with counters or a grid barrier between, costs more than the second launch.
"""

import torch

from cutlass_kernels.templates import attend, merge


def _fresh(q, ids):
    """Room for the partials of `ids`: attend writes what the merge will read of it."""
    G, D = q.shape[1] // ids.shape[1], q.shape[2]
    n = ids.numel() * G
    room = q.new_empty(n * (D + 1), dtype=torch.float32)
    return room[: n * D].view(*ids.shape, G, D), room[n * D :].view(*ids.shape, G)


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
