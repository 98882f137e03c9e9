# SPDX-License-Identifier: Apache-2.0
"""Sizes of models that tests build, and layers that are none of ours."""

from torch import nn

LAYERS = 2
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}


class Quantised(nn.Linear):
    """Weights that only its own forward can read."""
