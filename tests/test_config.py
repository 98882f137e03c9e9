# SPDX-License-Identifier: Apache-2.0
"""The schema: every option composes and validates, values are checked before any work, and who wins over whom."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from prr_pipeline import config, overrides
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.errors import ConfigError

Compose = Callable[..., DictConfig]

OPTIONS = [(group, name) for group, names in overrides.groups().items() for name in names]
EXPERIMENTS = overrides.groups()["experiment"]
MODELS = ("glm4", "glmz1", "deepseek_r1", "llama3", "qwen3_14b", "qwen3_32b")


def refused(cfg: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config.validate(cfg)
    return str(error.value)


@pytest.mark.parametrize(("group", "name"), [o for o in OPTIONS if o[0] != "hydra/launcher"])
def test_every_option_composes_and_validates(group: str, name: str, composed: Compose) -> None:
    cfg = composed(f"{group}={name}")
    config.validate(cfg)
    if group in config.TARGET_GROUPS:
        cls = get_class(cfg[group]._target_)
        assert {str(k) for k in cfg[group]} - {"_target_"} <= {f.name for f in fields(cls)}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_on_a_cpu_with_debug_tiny(name: str, composed: Compose) -> None:
    own, tiny = composed(f"+experiment={name}"), composed(f"+experiment={name}", "debug=tiny")
    config.validate(own)
    config.validate(tiny)
    assert own.experiment == tiny.experiment == name
    assert (tiny.model.weights, tiny.runtime.device, tiny.model.architecture.hidden_size) == ("random", "cpu", 64)
    assert tiny.model.architecture.model_type == own.model.architecture.model_type
    assert (tiny.dsa._target_, tiny.dsa.block_size) == (own.dsa._target_, own.dsa.block_size)
    assert tiny.dsa.top_k * tiny.dsa.block_size < tiny.benchmark.length


def test_the_experiments_are_those_of_the_paper_and_two_that_run_anywhere() -> None:
    wanted = {f"{m}_{d}" for m in (*MODELS, "smollm2") for d in ("quest", "infllm")} | {"ablation"}
    assert wanted <= set(EXPERIMENTS)


def test_the_default_job(composed: Compose) -> None:
    """What a user gets who says nothing; a change here is a change of results."""
    cfg = composed()
    config.validate(cfg)
    assert OmegaConf.to_container(cfg.dsa) == {
        "_target_": "prr_pipeline.dsa.quest.Quest",
        "name": "quest",
        "block_size": 16,
        "top_k": 32,
        "sink": 0,
        "local": 1,
        "dense_layers": 2,
        "dense_len": 0,
    }
    assert (cfg.model.name, cfg.model.weights, cfg.benchmark.name, cfg.benchmark.length) == (
        "smollm2",
        "gguf",
        "ruler",
        2048,
    )
    assert list(cfg.benchmark.tasks) == ["niah_single_1", "vt"]
    assert (cfg.budget.name, cfg.budget.delta, cfg.predictor.name, cfg.predictor.theta) == ("fixed", 1.5, "ema", None)
    assert list(cfg.runtime.modes) == list(config.MODES) and cfg.runtime.repair == "exact"
    assert list(cfg.stages) == list(config.STAGES) and not cfg.force and cfg.seed == 0


def test_debug_wins_over_the_experiment_and_the_command_line_over_both(composed: Compose) -> None:
    for words in (("+experiment=glm4_infllm", "debug=tiny"), ("debug=tiny", "+experiment=glm4_infllm")):
        cfg = composed(*words)
        assert (cfg.benchmark.length, cfg.runtime.device, cfg.dsa.top_k) == (1536, "cpu", 8)
    assert composed("+experiment=glm4_infllm").benchmark.length == 32768
    cfg = composed("benchmark.length=700", "debug=tiny", "dsa.top_k=9", "+experiment=glm4_infllm")
    assert (cfg.benchmark.length, cfg.dsa.top_k, cfg.benchmark.num_samples) == (700, 9, 2)


def test_groups_of_an_experiment_can_be_replaced(composed: Compose) -> None:
    cfg = composed("+experiment=glm4_infllm", "dsa=quest", "model=llama3")
    assert (cfg.dsa.name, cfg.model.name, cfg.experiment) == ("quest", "llama3", "glm4_infllm")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("stages=[]", "stages is empty, expected some of calibrate, profile, decode, evaluate"),
        ("stages=[decod]", "stages: unknown 'decod'. Did you mean decode? There are: calibrate, profile, decode, ev"),
        ("runtime.modes=[prr,dens]", "runtime.modes: unknown 'dens'. Did you mean dense?"),
        ("runtime.modes=[]", "runtime.modes is empty, expected some of dense, serial, reuse, reuse_repair, prr"),
        ("runtime.repair=exct", "runtime.repair: unknown 'exct'. Did you mean exact? There are: exact, union."),
        ("model.weights=hug", "model.weights: unknown 'hug'. Did you mean hub? There are: hub, local, gguf, random."),
        ("runtime.prefill_chunk=0", "runtime.prefill_chunk = 0, expected at least 1"),
        ("runtime.profile_repeats=0", "runtime.profile_repeats = 0, expected at least 1"),
        ("model.max_context=0", "model.max_context = 0 tokens, expected at least 1"),
        ("model.max_context=-1", "model.max_context = -1 tokens, expected at least 1"),
        ("runtime.burst=0", "runtime.burst = 0, expected at least 1"),
        ("runtime.temperature=-0.1", "runtime.temperature = -0.1, expected at least 0.0"),
        ("runtime.top_p=0", "runtime.top_p = 0.0, expected a value in (0, 1]"),
        ("runtime.top_p=1.1", "runtime.top_p = 1.1, expected a value in (0, 1]"),
        ("runtime.threads=0", "runtime.threads = 0, expected 1 to 1024, or null for torch's default"),
        ("runtime.threads=100000", "runtime.threads = 100000, expected 1 to 1024, or null for torch's default"),
        ("runtime.step_threads=1025", "runtime.step_threads = 1025, expected 1 to 1024"),
        ("runtime.temperature=nan", "runtime.temperature = nan, expected a finite number"),
        ("runtime.temperature=inf", "runtime.temperature = inf, expected a finite number"),
        ("runtime.temperature='nan'", "runtime.temperature = nan, expected a finite number"),
        ("runtime.top_p=nan", "runtime.top_p = nan, expected a finite number"),
        ("model.architecture.initializer_range=nan", "model.architecture.initializer_range = nan, expected a finite"),
        ("budget.delta=-inf", "budget.delta = -inf, expected a finite number"),
        ("predictor.alphas=[0.2,nan]", "predictor.alphas[1] = nan, expected a finite number"),
        ("model.hub_id=a/b/c", "model.hub_id = 'a/b/c', expected OWNER/NAME as on the Hugging Face hub"),
        ("model.hub_id=''", "model.hub_id = '', expected OWNER/NAME"),
        ("model.hub_id='a b/c'", "model.hub_id = 'a b/c', expected OWNER/NAME"),
        ("model.hub_id=../x", "model.hub_id = '../x', expected OWNER/NAME"),
        ("seed=-1", "seed = -1, expected a value in 0 ... 4294967295"),
        ("seed=4294967296", "seed = 4294967296, expected a value in 0 ... 4294967295"),
        ("+foo=1", "foo is unknown. There are: experiment, stages, seed"),
        ("+sead=1", "sead is unknown. Did you mean seed?"),
        ("+model.nme=x", "model.nme is unknown. Did you mean name?"),
        ("+runtime.mode=prr", "runtime.mode is unknown. Did you mean modes?"),
        ("+dsa.topk=3", "dsa.topk is unknown. Did you mean top_k?"),
        ("dsa.top_k=abc", "dsa.top_k: Value 'abc' of type 'str' could not be converted to Integer"),
        ("dsa.top_k=1.5", "dsa.top_k: Value '1.5' of type 'float' could not be converted to Integer"),
        ("budget.delta=null", "budget.delta: Incompatible value 'None' for field of type 'float'"),
        ("budget.delta=much", "budget.delta: Value 'much' of type 'str' could not be converted to Float"),
        ("benchmark.tasks=vt", "benchmark.tasks = vt is a single value, expected a list: benchmark.tasks=[vt]"),
        ("predictor.alphas=[0.1,x]", "predictor.alphas[1]: Value 'x' of type 'str' could not be converted to Float"),
        ("~dsa", "dsa: no value; each group needs an option, and each key of it a value"),
        ("model.max_context=???", "model.max_context: no value;"),
        ("model.path=${oc.env:PRR_NOT_SET}", "model.path: KeyError raised while resolving interpolation"),
        (
            "dsa._target_=prr_pipeline.dsa.quest.Qest",
            "dsa._target_ = prr_pipeline.dsa.quest.Qest cannot be imported (A",
        ),
        (
            "dsa._target_=prr_pipeline.config.config_dir",
            "dsa._target_ = prr_pipeline.config.config_dir is no class; an op",
        ),
        ("dsa._target_=collections.OrderedDict", "dsa._target_ = collections.OrderedDict is no dataclass; an opt"),
        ("~dsa._target_", "dsa: the option has no _target_; it must name a class of prr_pipeline"),
    ],
)
def test_wrong_values_are_refused_before_any_work(word: str, expected: str, composed: Compose) -> None:
    assert refused(composed(word)).startswith(expected)


def test_the_borders_of_ranges_pass(composed: Compose) -> None:
    for words in (
        ("seed=4294967295",),
        ("seed=0", "runtime.top_p=1.0"),
        ("runtime.threads=1",),
        ("runtime.top_p=0.01",),
        ("runtime.threads=1024",),
        ("model.hub_id=gpt2",),
        ("model.hub_id=Some-One/Name_1.5B",),
    ):
        config.validate(composed(*words))


def test_all_of_a_job_is_checked_whatever_stages_run(composed: Compose) -> None:
    assert "budget.delta" in refused(composed("stages=[calibrate]", "budget.delta=x"))


@pytest.mark.parametrize(
    "word",
    ["budget=profiled budget.slack=X", "benchmark=locality benchmark.drift=X", "benchmark=locality benchmark.noise=X"],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_option_takes_a_number_that_is_not_finite(word: str, value: str, composed: Compose) -> None:
    words = word.replace("X", value).split()
    assert refused(composed(*words)) == f"{words[1].split('=')[0]} = {value}, expected a finite number"


@pytest.mark.parametrize(("group", "name"), [o for o in OPTIONS if o[0] in config.TARGET_GROUPS])
def test_an_option_s_file_leaves_no_argument_out(group: str, name: str, composed: Compose) -> None:
    """One that it left out could not be overridden without a plus."""
    option = composed(f"{group}={name}")[group]
    assert {str(k) for k in option} - {"_target_"} == {f.name for f in fields(get_class(option._target_))}


def test_near_names_are_offered_only_where_there_are_some() -> None:
    assert config.near("quset", ["quest", "infllm_v2"]) == " Did you mean quest? There are: quest, infllm_v2."
    assert config.near("xyz", ["quest"]) == " There are: quest."


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nomodule.Own", "ModuleNotFoundError: No module named 'nomodule'"),
        ("nomodule.sub.Own", "ModuleNotFoundError: No module named 'nomodule'"),
        ("prr_pipeline.dsa.qest.Quest", "AttributeError: module 'prr_pipeline.dsa' has no attribute 'qest'"),
        ("Own", "ValueError: Empty module name"),
    ],
)
def test_an_option_that_cannot_be_imported_is_said_once_in_one_line(
    target: str, why: str, composed: Compose, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(composed(f"dsa._target_={target}")) == (
        f"dsa._target_ = {target} cannot be imported ({why}); install its package, or put its folder on PYTHONPATH"
    )
    assert caplog.records == []


def test_what_a_module_lacks_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composed: Compose
) -> None:
    (tmp_path / "lacks_something.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "No module named 'not_there_at_all'" in refused(composed("dsa._target_=lacks_something.Own"))


def test_a_class_inside_a_class_is_found() -> None:
    assert config.located("test_config.Outer.Inner") is Outer.Inner


class Outer:
    """Holds one."""

    class Inner:
        """Held."""


def test_text_that_reads_as_a_number_that_is_none_is_refused(composed: Compose) -> None:
    for key in ("dsa.name", "predictor.name"):
        with pytest.raises(ConfigError, match=f"{key} = nan, expected text; put it in quotes"):
            config.validate(composed(f"{key}=nan"))


@pytest.mark.parametrize(
    ("group", "name", "said"),
    [
        (
            "dsa",
            "prr_pipeline.benchmarks.locality.Locality",
            "is no SparseMethod: an option of dsa is a subclass of it",
        ),
        ("dsa", "test_config.Half", "does not define append, metadata, rebuild, score; see SparseMethod"),
        ("benchmark", "test_config.Half", "is no Benchmark: an option of benchmark is a subclass of it"),
        ("predictor", "test_config.Half", "is no EmaPredictor: an option of predictor is a subclass of it"),
        ("budget", "test_config.Half", "is no BudgetPolicy: an option of budget is a subclass of it"),
        ("tracker", "test_config.Half", "is no Tracker: an option of tracker is a subclass of it"),
        ("tracker", "prr_pipeline.tracking.tracker.Tracker", "does not define run; see Tracker"),
    ],
)
def test_a_class_of_another_kind_is_named(group: str, name: str, said: str, composed: Compose) -> None:
    with pytest.raises(ConfigError) as error:
        config.validate(composed(f"{group}._target_={name}"))
    assert str(error.value) == f"{group}._target_ = {name} {said}"


@dataclass(kw_only=True)
class Half(SparseMethod):
    """A method that forgot its functions."""
