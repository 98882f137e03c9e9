# SPDX-License-Identifier: Apache-2.0
"""What an option says of a model's sizes: read, counted and checked before anything is built."""

import copy
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from prr_pipeline.config import ModelConfig
from prr_pipeline.errors import ConfigError
from prr_pipeline.models.tokenizer import BYTE_VOCAB

_POSITIVE = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def architecture(cfg: ModelConfig) -> dict[str, Any]:
    """Returns cfg.architecture as plain containers, whatever composed it."""
    found: Any = cfg.architecture
    if OmegaConf.is_config(found):
        found = OmegaConf.to_container(found, resolve=True)
    return copy.deepcopy(found)


def stated_sizes(cfg: ModelConfig) -> tuple[int, int, int] | None:
    """Query heads, KV heads and head size as cfg.architecture states them; None if it does not."""
    arch = architecture(cfg)
    q_heads = arch.get("num_attention_heads")
    head_dim = arch.get("head_dim") or (arch.get("hidden_size", 0) // q_heads if q_heads else None)
    return (q_heads, arch.get("num_key_value_heads") or q_heads, head_dim) if q_heads and head_dim else None


def parameter_count(arch: Mapping[str, Any]) -> int:
    """Counts the parameters of a dense decoder from its architecture, without building it.

    Serves grouped-query attention with a gated feed-forward network (llama, glm, glm4, qwen3).
    """
    hidden, head_dim = arch["hidden_size"], arch["head_dim"]
    q_width = arch["num_attention_heads"] * head_dim
    kv_width = arch["num_key_value_heads"] * head_dim
    attention = 2 * hidden * (q_width + kv_width)
    if arch.get("attention_bias"):
        attention += q_width + 2 * kv_width
    norms = {"glm4": 4 * hidden, "qwen3": 2 * hidden + 2 * head_dim}
    norm = norms.get(arch["model_type"], 2 * hidden)
    layer = attention + 3 * hidden * arch["intermediate_size"] + norm
    tables = 1 if arch["tie_word_embeddings"] else 2
    return arch["num_hidden_layers"] * layer + hidden + tables * arch["vocab_size"] * hidden


def check_positive(cfg: ModelConfig) -> None:
    """Raise ConfigError for a size of cfg.architecture that is no whole number from 1 on, whatever the weights."""
    arch = architecture(cfg)
    for key in _POSITIVE:
        value = arch.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"model.architecture.{key} = {value!r}, expected a whole number from 1 on")


def check_architecture(cfg: ModelConfig) -> None:
    """Raise ConfigError for an architecture that random weights cannot have."""
    check_positive(cfg)
    arch = architecture(cfg)
    if "model_type" not in arch:
        raise ConfigError(
            f"model.weights=random needs model.architecture with a model_type, and {cfg.name} has "
            "none. The options in conf/model show what to state."
        )
    if arch.get("vocab_size", BYTE_VOCAB) < BYTE_VOCAB:
        raise ConfigError(
            f"model.architecture.vocab_size={arch['vocab_size']} is too small: "
            f"the byte tokenizer of random weights has {BYTE_VOCAB} tokens."
        )
    _check_activation(arch.get("hidden_act"))
    _check_sizes(arch)


def _check_activation(name: Any) -> None:
    from transformers.activations import ACT2FN

    if name is not None and (not isinstance(name, str) or name not in ACT2FN):
        raise ConfigError(f"model.architecture.hidden_act = {name!r} is none of {', '.join(sorted(ACT2FN))}")


def _rotary_share(arch: Mapping[str, Any]) -> float:
    """Of a head, the share that RoPE turns; ConfigError for RoPE that would fail, or make NaN, in the first step."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    where = "model.architecture.rope_parameters"
    rope = arch.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{where} = {rope!r}, expected keys and values, such as {{rope_theta: 10000.0}}")
    kind, known = rope.get("rope_type", "default"), sorted({"default", *ROPE_INIT_FUNCTIONS})
    if kind not in known:
        raise ConfigError(f"{where}.rope_type = {kind!r} is none of {', '.join(known)}")
    theta = rope.get("rope_theta", 1.0)
    if not _number(theta) or theta <= 0:
        raise ConfigError(f"{where}.rope_theta = {theta!r}, expected a number above 0")
    share = rope.get("partial_rotary_factor", arch.get("partial_rotary_factor", 1.0))
    if not _number(share) or not 0 < share <= 1:
        raise ConfigError(f"{where}.partial_rotary_factor = {share!r}, expected a number above 0, at most 1")
    return float(share)


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _check_sizes(arch: Mapping[str, Any]) -> None:
    """Refuses sizes that do not go together; transformers says so of some of them, once it builds one."""
    heads, hidden = arch.get("num_attention_heads"), arch.get("hidden_size")
    if heads and heads % (arch.get("num_key_value_heads") or heads):
        raise ConfigError(
            f"model.architecture.num_attention_heads = {heads} is no multiple of num_key_value_heads = "
            f"{arch['num_key_value_heads']}: each KV head serves as many query heads"
        )
    head_dim = arch.get("head_dim")
    if head_dim is None and heads and hidden:
        if hidden % heads:
            raise ConfigError(
                f"model.architecture.hidden_size = {hidden} is no multiple of num_attention_heads = {heads}; state "
                "head_dim, or change one of them"
            )
        head_dim = hidden // heads
    factor = _rotary_share(arch)
    if head_dim is not None and (int(head_dim * factor) % 2 or not int(head_dim * factor)):
        share = "" if factor == 1 else f" x partial_rotary_factor = {factor}"
        raise ConfigError(
            f"model.architecture.head_dim = {head_dim}{share} gives {int(head_dim * factor)} rotary dimensions, "
            "expected an even number: RoPE turns pairs"
        )
