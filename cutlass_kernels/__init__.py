# SPDX-License-Identifier: Apache-2.0
"""Block-sparse decode attention with prediction and repair: tensors in, tensors out.

One decode step of a layer, for B sequences of ragged length, one query token each:

    append_quest(k_new, v_new, k, v, kmin, kmax, seq_lens)
    partials = attend(q, k, v, P, seq_lens, scale)                # beside the next two lines
    scores = quest_scores(q, kmin, kmax, seq_lens, block)
    A = select(scores, seq_lens, block, top_k, sink, local, predicted=P)
    out, lse = repair(q, k, v, A, *partials, seq_lens, scale)     # bit for bit merge(attend(A))
    predict(scores, level, trend, theta, seq_lens, block, sink, local, out=P)

LSE is the natural log; the empty set is o = 0, lse = -inf. See each op for shapes, dtypes and errors.
"""

import cutlass_kernels.cuda  # noqa: F401  (CUDA tensors are served by the templates)
from cutlass_kernels.ops import (
    OPS,
    Selection,
    append,
    append_infllm,
    append_quest,
    attend,
    debug,
    infllm_scores,
    merge,
    predict,
    quest_scores,
    repair,
    repair_union,
    select,
)

__all__ = [
    "OPS",
    "Selection",
    "append",
    "append_infllm",
    "append_quest",
    "attend",
    "debug",
    "infllm_scores",
    "merge",
    "predict",
    "quest_scores",
    "repair",
    "repair_union",
    "select",
]
