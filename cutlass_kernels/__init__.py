# SPDX-License-Identifier: Apache-2.0
"""Block-sparse decode attention with prediction and repair: tensors in, tensors out.

One decode step of a layer, for B sequences of ragged length, one query token each:

    append_quest(k_new, v_new, k, v, kmin, kmax, seq_lens)
    scores = quest_scores(q, kmin, kmax, seq_lens, block)
    A = select(scores, seq_lens, block, K, sink, local, P)
    attend(q, k, v, P, seq_lens, scale, out=partials, beside=True)  # beside the selection of A
    out, lse = repair(q, k, v, A, *partials, seq_lens, scale)       # bit for bit merge(attend(A))
    predict(scores, level, trend, theta, seq_lens, block, sink, local, out=P)

rank_infllm is the scores of InfLLM-v2 and the selection in one. attend_missed and merge_repaired are the halves of
repair, faster where much is missed. Without P, select, attend_missed and merge are a serial step. replay_hits says what
predict would have hit in a window of rows. LSE is the natural log; the empty set is o = 0, lse = -inf. The rest of a
layer is linear, rms_norm, add_rms_norm and, in one launch each, add_norm_linear, which is linear behind add_rms_norm,
and silu_mul_linear, which is linear behind silu(gate) * up. See each op for shapes, dtypes and errors.
"""

import cutlass_kernels.cuda  # noqa: F401  (CUDA tensors are served by the templates)
from cutlass_kernels.checks import debug
from cutlass_kernels.layer_ops import add_norm_linear, add_rms_norm, linear, rms_norm, silu_mul_linear
from cutlass_kernels.ops import (
    OPS,
    Replayed,
    Rotary,
    Selection,
    append,
    append_infllm,
    append_quest,
    attend,
    attend_missed,
    infllm_scores,
    merge,
    merge_repaired,
    predict,
    quest_scores,
    rank_infllm,
    repair,
    repair_union,
    replay_hits,
    select,
)

__all__ = [
    "OPS",
    "Replayed",
    "Rotary",
    "Selection",
    "add_norm_linear",
    "add_rms_norm",
    "append",
    "append_infllm",
    "append_quest",
    "attend",
    "attend_missed",
    "debug",
    "infllm_scores",
    "linear",
    "merge",
    "merge_repaired",
    "predict",
    "quest_scores",
    "rank_infllm",
    "repair",
    "repair_union",
    "replay_hits",
    "rms_norm",
    "select",
    "silu_mul_linear",
]
