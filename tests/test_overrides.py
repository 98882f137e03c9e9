# SPDX-License-Identifier: Apache-2.0
"""Words of the command line: near names for wrong ones, before any work, and the order in which options win."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from prr_pipeline import config, overrides
from prr_pipeline.benchmarks.base import Benchmark
from prr_pipeline.errors import ConfigError


@pytest.fixture(autouse=True)
def known() -> None:
    config.register()
    GlobalHydra.instance().clear()


def refused(*words: str) -> str:
    """The message for a command line that is wrong; no stack of Hydra's is part of it."""
    with pytest.raises(ConfigError) as error:
        overrides.check(overrides.prepare(list(words)))
    text = str(error.value)
    assert "HYDRA_FULL_ERROR" not in text and "Traceback" not in text and "full_key" not in text
    return text


def passes(*words: str) -> list[str]:
    prepared = overrides.prepare(list(words))
    overrides.check(prepared)
    assert not GlobalHydra.instance().is_initialized(), "Hydra's own run finds a clean state"
    return prepared


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dsa=qest", "dsa=qest: no such option. Did you mean quest? There are: infllm_v2, infllm_v2_short, quest"),
        ("+experiment=glm4_infl", "experiment=glm4_infl: no such option. Did you mean glm4_infllm"),
        ("experiment=glm4", "experiment=glm4: no such option. Did you mean glm4_infllm or glm4_quest?"),
        ("debug=tny", "debug=tny: no such option. Did you mean tiny? There are: none, tiny."),
        ("model=smolm2", "model=smolm2: no such option. Did you mean smollm2?"),
        ("budget=zzz", "budget=zzz: no such option. There are: fixed, off, profiled."),
        ("dsa=quest,qest", "dsa=qest: no such option. Did you mean quest?"),
        ("metod=quest", "'metod' is no group and no key. Did you mean model? There are: allow_other_source, b"),
        ("experimnt=x", "'experimnt' is no group and no key. Did you mean experiment?"),
        ("topk=3", "'topk' is no group and no key. There are: allow_other_source, benchmark"),
        ("~trackr", "'trackr' is no group and no key. Did you mean tracker?"),
        ("modl.name=x", "'modl.name' is no group and no key. Did you mean model?"),
        ("=3", "'' is no group and no key."),
    ],
)
def test_a_wrong_group_or_option_gets_near_names(word: str, expected: str) -> None:
    assert refused(word).startswith(expected)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dsa.topk=3", "dsa.topk is unknown. Did you mean top_k? There are: name, block_size, top_k, sink, local"),
        ("model.nme=x", "model.nme is unknown. Did you mean name?"),
        ("runtime.prefil_chunk=1", "runtime.prefil_chunk is unknown. Did you mean prefill_chunk?"),
        ("budget.detla=2", "budget.detla is unknown. Did you mean delta? There are: name, delta."),
        ("model.architecture.hiden_size=3", "model.architecture.hiden_size is unknown. Did you mean hidden_size"),
        ("hydra.run.dr=x", "hydra.run.dr is unknown. Did you mean dir?"),
        ("dsa.top_k.x=3", "dsa.top_k.x is unknown. It has no keys."),
        ("runtime.prefill_chunk=abc", "runtime.prefill_chunk: Value 'abc' of type 'str' could not be converted to I"),
        ("seed=abc", "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        ("runtime.temperature=hot", "runtime.temperature: Value 'hot' of type 'str' could not be converted to Float"),
        ("runtime.prefill_chunk=inf", "runtime.prefill_chunk: Value 'inf' of type 'float' could not be converted to I"),
        ("seed=nan", "seed: Value 'nan' of type 'float' could not be converted to Integer"),
        ("force=perhaps", "force: Value 'perhaps' is not a valid bool"),
        ("stages=evaluate", "stages = evaluate is a single value, expected a list: stages=[evaluate]"),
        ("++stages=evaluate", "stages = evaluate is a single value, expected a list: stages=[evaluate]"),
        ("runtime.modes=", "runtime.modes is empty: no list"),
        ("runtime.modes=prr", "runtime.modes = prr is a single value, expected a list: runtime.modes=[prr]"),
        ("dsa=quest,infllm_v2", "Ambiguous value for argument 'dsa=quest,infllm_v2'"),
        ("+dsa=quest", "dsa is chosen already: write dsa=quest without the plus, once"),
        ("~dsa.topk", "Could not delete from config. 'dsa.topk' does not exist."),
        ("dsa.top_k", "Error parsing override 'dsa.top_k'"),
        ("runtime=null", "runtime=null: no such option. There are: default."),
        ("experiment=null", "experiment=null: no such option. There are: ablation, "),
        ("experiment=", "experiment=: no such option. There are: ablation, "),
        ("model=", "model=: no such option. There are: deepseek_r1, glm4, "),
        ("debug=''", "debug=: no such option. There are: none, tiny."),
        ("dsa=quest,", "dsa=: no such option. There are: "),
    ],
)
def test_a_wrong_key_or_type_is_said_in_one_message(word: str, expected: str) -> None:
    assert refused(word).startswith(expected)


def test_keys_of_an_option_are_those_of_the_option_that_is_chosen() -> None:
    assert "dsa.window is unknown." in refused("dsa.window=16")
    passes("dsa=infllm_v2", "dsa.window=16")
    assert refused("budget=off", "budget.delta=2") == "budget.delta is unknown. There are: name."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-m", "dsa=quest,infllm_v2", "dsa.topk=1,2"), "dsa.topk is unknown. Did you mean top_k?"),
        (("--multirun", "budget=fixed", "budget.delt=1.0,2.0"), "budget.delt is unknown. Did you mean delta?"),
        (("hydra.mode=MULTIRUN", "seed=1,2", "dsa.topk=1"), "dsa.topk is unknown."),
        (("-m", "+experiment=glm4_quest,glm4_infl"), "experiment=glm4_infl: no such option."),
        (("-m", "+experiment=glob(x*)"), "+experiment=glob(x*): nothing matches"),
        (("-m", "seed=1,2,abc", "dsa=quest"), "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        (("-m", "force=true,false", "runtime.burst=1,x"), "runtime.burst: Value 'x' of type 'str' could not be"),
    ],
)
def test_sweeps_are_checked_too(words: tuple[str, ...], expected: str) -> None:
    assert refused(*words).startswith(expected)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("dsa=quest", "dsa.top_k=64", "benchmark.num_samples=10"),
        ("-m", "budget=fixed", "budget.delta=1.0,1.5,2.0"),
        ("-m", "+experiment=glm4_infllm,glm4_quest", "debug=tiny", "budget.delta=choice(1,2)"),
        ("-m", "dsa.top_k=range(8,32,8)", "runtime.repair=exact,union"),
        ("-m", "experiment=glob(glm*)", "dsa=quest"),
        ("hydra.mode=MULTIRUN", "seed=1,2"),
        ("--cfg", "job", "-p", "dsa"),
        ("hydra.run.dir=/tmp/x", "hydra.verbose=true", "hydra/job_logging=disabled"),
        ("benchmark.tasks=[vt,cwe]", "stages=[evaluate]", "predictor.theta=[1,1,0]"),
        ("runtime.threads=2", "model.path=/some where/x", "tracker.tags=[a,b]", "~predictor"),
        ("+tracker.extra=1",),  # its schema refuses it when the job is validated
    ],
)
def test_what_is_right_passes(words: tuple[str, ...]) -> None:
    passes(*words)


def test_an_experiment_is_taken_with_and_without_a_plus_in_sweeps_too() -> None:
    for plus in ("", "+", "++"):
        job = overrides.check(overrides.prepare([f"{plus}experiment=glm4_infllm"]))
        assert job is not None and (job.experiment, job.model.name) == ("glm4_infllm", "glm4")
        job = overrides.check(overrides.prepare(["-m", f"{plus}experiment=glm4_infllm,glmz1_quest", "debug=tiny"]))
        assert job is not None and (job.experiment, job.model.weights) == ("glm4_infllm", "random")
    assert refused("experiment=mine").endswith("To keep outputs apart by a name of your own: output=runs/NAME")


def test_a_look_at_a_job_runs_none() -> None:
    for words in (["--cfg", "job"], ["--info", "defaults"], ["--help"]):
        assert overrides.check(overrides.prepare(words)) is None


def test_an_argument_that_an_option_s_file_leaves_out_wants_a_plus(tmp_path: Path) -> None:
    (tmp_path / "dsa").mkdir()
    option = tmp_path / "dsa" / "mine.yaml"
    option.write_text("_target_: prr_pipeline.dsa.quest.Quest\nblock_size: 16\ntop_k: 5\n")
    own = ("--config-dir", str(tmp_path), "dsa=mine")
    assert refused(*own, "dsa.dense_len=7") == (
        "dsa.dense_len is an argument of the option that its file leaves out: write +dsa.dense_len="
    )
    passes(*own, "+dsa.dense_len=7")
    assert refused(*own, "dsa.densel=7").startswith("dsa.densel is unknown.")
    option.write_text("_target_: no.such.Class\ntop_k: 5\n")
    assert refused(*own, "dsa.dense_len=7").startswith("dsa.dense_len is unknown.")


def test_debug_fits_a_benchmark_that_has_neither_length_nor_number(tmp_path: Path) -> None:
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "mine.yaml").write_text("_target_: test_overrides.Mine\nname: mine\n")
    words = overrides.prepare(["--config-dir", str(tmp_path), "benchmark=mine", "debug=tiny"])
    job = overrides.check(words)
    assert job is not None and job.benchmark.num_samples == 2
    config.validate(job)


@dataclass(kw_only=True)
class Mine(Benchmark):
    """A benchmark of a user, with no argument of its own."""

    name: str = "mine"

    def check(self) -> None:
        pass

    def samples(self, count_tokens: Any, seed: int) -> Any:
        yield from ()

    def score(self, sample: Any, prediction: str) -> None:
        return None


@pytest.mark.parametrize("words", [("--help",), ("--hydra-help",), ("-h", "dsa.topk=3"), ("-sc", "install=bash")])
def test_help_composes_nothing(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "compose", lambda *_: pytest.fail("composed"))
    overrides.check(list(words))


def test_the_examples_of_the_help_and_the_readme_compose() -> None:
    root = config.config_dir().parent
    texts = [p.read_text() for p in (config.config_dir() / "config.yaml", root / "README.md") if p.exists()]
    found = re.findall(r"^ +python -m prr_pipeline(.*)$", "\n".join(texts), re.MULTILINE)
    assert len(found) > 10
    for line in found:
        words = re.split(r"  +|#", line.strip() and line[1:])[0].split()
        passes(*words)


def test_experiment_and_debug_are_appended_in_that_order() -> None:
    assert passes("debug=tiny", "+experiment=glm4_quest", "seed=3") == [
        "seed=3",
        "+experiment=glm4_quest",
        "+debug=tiny",
    ]
    assert passes("experiment=glm4_quest") == ["+experiment=glm4_quest"]
    assert passes("++experiment=glm4_quest") == ["+experiment=glm4_quest"]


def test_flags_may_stand_between_overrides() -> None:
    """Hydra's parser wants overrides in one piece, and experiment and debug move to the end."""
    words = ["dsa.top_k=32", "debug=tiny", "--cfg", "job", "~predictor", "-p", "dsa", "seed=3"]
    assert passes(*words) == ["--cfg", "job", "-p", "dsa", "dsa.top_k=32", "~predictor", "seed=3", "+debug=tiny"]


def test_a_launcher_that_is_not_installed_names_the_extra() -> None:
    text = refused("-m", "hydra/launcher=joblibb", "seed=1,2")
    assert text.startswith("hydra/launcher=joblibb: no such option. There are: basic, slurm. ")
    assert text.endswith("Launchers are packages of their own: pip install 'prr-pipeline[launchers]'")


def test_options_of_a_users_own_folder_are_taken(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    (folder / "dsa").mkdir(parents=True)
    (folder / "dsa" / "mine.yaml").write_text("defaults: [quest, _self_]\ntop_k: 5\nextra: 1\n")
    passes("--config-dir", str(folder), "dsa=mine", "dsa.top_k=7")
    text = refused("--config-dir", str(folder), "dsa=mine", "dsa.topk=7")
    assert text.startswith("dsa.topk is unknown. Did you mean top_k?") and text.endswith("extra.")
    names = "infllm_v2, infllm_v2_short, mine, quest, quest_short."
    for flag in (["--config-dir", str(folder)], [f"--config-dir={folder}"], ["-cd", str(folder)]):
        assert refused(*flag, "dsa=other") == f"dsa=other: no such option. There are: {names}"
        assert refused(*flag, "model=").startswith("model=: no such option. There are: deepseek_r1, ")
    assert refused("--config-dir", f"{folder}/no") == (
        f"--config-dir {folder}/no: no such folder (looked in {folder}/no)"
    )
    (folder / "dsa" / "mine.yaml").write_text("defaults: [qest, _self_]\n")
    said = refused("--config-dir", str(folder), "dsa=mine")
    assert (
        said.startswith("dsa=qest (in dsa/mine.yaml): no such option. Did you mean quest?")
        and len(said.splitlines()) == 1
    )


def test_an_experiment_that_is_given_twice_is_refused() -> None:
    assert refused("+experiment=glm4_quest", "experiment=glm4_infllm") == (
        "experiment is given twice: experiment=glm4_quest and experiment=glm4_infllm; give one, or both as a sweep: "
        "-m experiment=glm4_quest,glm4_infllm"
    )
    assert refused("debug=tiny", "debug=none").startswith("debug is given twice: debug=tiny and debug=none;")


def test_a_sweep_is_not_for_looking_at() -> None:
    assert refused("-m", "--cfg", "job", "seed=1,2").startswith("a sweep (-m) runs jobs, and --cfg and --info show one")


def test_groups_are_the_folders_of_option_files() -> None:
    found = overrides.groups()
    assert {"model", "dsa", "benchmark", "predictor", "budget", "runtime", "tracker", "debug", "experiment"} < {*found}
    assert found["budget"] == ["fixed", "off", "profiled"] and "slurm" in found["hydra/launcher"]


def test_of_a_long_sweep_so_many_jobs_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    own = overrides.compose
    monkeypatch.setattr(overrides, "compose", lambda name, words: tried.append(words) or own(name, words[:0]))
    overrides.check(["-m", "seed=range(1000)", "dsa=quest"])
    assert (
        len(tried) == overrides._TRIED and tried[0] == ["seed=0", "dsa=quest"] and tried[9] == ["seed=9", "dsa=quest"]
    )


def test_an_option_s_file_that_is_no_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "dsa").mkdir()
    (tmp_path / "dsa" / "mine.yaml").write_text("name: x\nfoo: [\n")
    said = refused("--config-dir", str(tmp_path), "dsa=mine")
    assert "mine.yaml, line 3: this is not YAML: " in said and len(said.splitlines()) == 1
