# SPDX-License-Identifier: Apache-2.0
"""The hook serves full softmax attention alone; a model that asks for more is refused, not run as something else."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from prr_pipeline.errors import ConfigError
from prr_pipeline.models import attention
from prr_pipeline.models.attention import attached, forward

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def model(kind, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def causal(layer, q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("kind", ["llama", "glm", "glm4", "qwen3", "mistral"])
def test_the_hook_gives_the_models_own_logits(kind):
    m = model(kind, **({"sliding_window": None} if kind == "mistral" else {}))
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        expected = m(ids).logits[:, -1]
    with attached(m, causal):
        found = forward(m, ids, 0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert m.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kind", "more", "names"),
    [("mistral", {"sliding_window": 8}, "sliding_window"), ("gemma2", {"attn_logit_softcapping": 50.0}, "softcap")],
)
def test_other_attention_is_refused(kind, more, names):
    m = model(kind, **more)
    with pytest.raises(ConfigError, match="sliding|softcap") as error, attached(m, causal):
        forward(m, torch.arange(1, 9)[None], 0)
    assert names in str(error.value) or "sliding" in str(error.value)
    assert m.config._attn_implementation == "eager"


def test_outside_of_attached_it_says_so():
    m = model("llama")
    attention._register()
    m.config._attn_implementation = "prr"
    with pytest.raises(RuntimeError, match="outside of"):
        forward(m, torch.arange(1, 9)[None], 0)
