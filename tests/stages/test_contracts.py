# SPDX-License-Identifier: Apache-2.0
"""What a user's own method or benchmark does wrong is said in its name, as early as it can be known."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from jobs import TINY, Runner, results, samples, status
from torch import Tensor

from prr_pipeline.benchmarks.base import Sample
from prr_pipeline.benchmarks.text import Text
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError
from prr_pipeline.models import load
from prr_pipeline.prr.predictor import EmaPredictor
from prr_pipeline.stages import job
from prr_pipeline.tracking.tracker import NoTracker

Words = tuple[str, ...]
SHORT = (
    *("debug=tiny", "benchmark=text", "benchmark.length=400", "benchmark.max_new_tokens=4", "benchmark.num_samples=1"),
    *("model.architecture.num_hidden_layers=2", "runtime.modes=[prr]", "stages=[calibrate,decode,evaluate]"),
)
MINE = (*SHORT, "benchmark._target_=test_contracts.Mine", "benchmark.name=mine")


@pytest.fixture
def text(short: Words) -> Words:
    """Words of a job on one window of a text, to its table."""
    return (*SHORT, *(w for w in short if w.startswith("benchmark.path=")))


@dataclass(kw_only=True)
class Silent(Quest):
    """It writes no score."""

    def score(self, *args: Any) -> None:
        pass


@dataclass(kw_only=True)
class Spoilt(Quest):
    """No score at lengths that are shorter than the probe."""

    def score(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        super().score(q, meta, seq_lens, scale, out)
        out[:] = torch.where(seq_lens[:, None, None] < 4000, -torch.inf, out)


@dataclass(kw_only=True)
class Holed(Quest):
    """NaN for one block among many, now and then."""

    def score(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        super().score(q, meta, seq_lens, scale, out)
        out[:, :, 3] = torch.where((seq_lens < 4000)[:, None] & (seq_lens % 4 == 0)[:, None], torch.nan, out[:, :, 3])


@pytest.mark.parametrize("name", ["smollm2", "mine"])
def test_a_method_that_writes_no_scores_is_named_before_the_model_is_loaded(
    run: Runner, text: Words, no_model: None, name: str
) -> None:
    said = run.refused(*text, "dsa._target_=test_contracts.Silent", f"model.name={name}", kind=ConfigError)
    assert said.startswith("dsa._target_ = test_contracts.Silent (dsa=quest): score() left ")
    assert "bug of this software" not in said


def test_a_model_that_states_no_sizes_is_probed_once_it_is_there(
    run: Runner, text: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.sizes, "stated_sizes", lambda _: None)
    said = run.refused(*text, "dsa._target_=test_contracts.Silent", kind=ConfigError)
    assert said.startswith("dsa._target_ = test_contracts.Silent")


def test_scores_that_are_not_finite_fail_the_job_by_the_method_s_name(run: Runner, text: Words, no_plots: None) -> None:
    """Only forced blocks are taken then: all of them were predicted, which would be 100 % hits."""
    words = (*text, "dsa._target_=test_contracts.Spoilt")
    said = run.refused(*words)
    rows = {r["mode"]: r for r in samples(run.root(*words))}
    n = rows["prr"]["steps"]
    assert said == (
        "dsa=quest gave scores that are not finite, so that fewer than dsa.top_k = 8 blocks were selected, in "
        f"text/serial ({n} steps), text/prr ({n} steps). Look at score() of test_contracts.Spoilt (dsa._target_), and "
        "whether the model's own values are finite (model.dtype)"
    )
    root = run.root(*words)
    assert n and all(r["dense_steps"] == r["short_steps"] == n and r["sparse_layers"] == 0 for r in rows.values())
    assert all(r["dense_steps"] == r["steps"] for r in results(root))
    assert not (root / "evaluate" / "manifest.json").exists() and status(root)["state"] == "failed"


def test_nan_in_a_full_selection_fails_the_job_too(run: Runner, text: Words) -> None:
    said = run.refused(*text, "dsa._target_=test_contracts.Holed", "benchmark.max_new_tokens=9", kind=ConfigError)
    assert said.startswith("dsa=quest (test_contracts.Holed) gave NaN as a block's score at ")


def test_a_selection_that_is_full_is_not_short(run: Runner, text: Words, no_plots: None) -> None:
    assert {r["short_steps"] for r in samples(run(*text))} == {0}


@dataclass(kw_only=True)
class Lacking(Quest):
    """It asks for an argument that no option file gives."""

    rank: int


@dataclass(kw_only=True)
class Raising(EmaPredictor):
    """Its constructor raises what the test sets."""

    error: ClassVar[Exception]

    def __post_init__(self) -> None:
        raise type(self).error


def test_a_class_that_lacks_an_argument_is_named_with_it(run: Runner, text: Words, no_model: None) -> None:
    said = run.refused(*text, "dsa._target_=test_contracts.Lacking", kind=ConfigError)
    assert said == (
        "dsa._target_ = test_contracts.Lacking cannot be made of the values under dsa (TypeError: Lacking.__init__() "
        "missing 1 required keyword-only argument: 'rank'); change them, or the class"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ZeroDivisionError(),
            "predictor._target_ = test_contracts.Raising cannot be made of the values under predictor "
            "(ZeroDivisionError: -); change them, or the class",
        ),
        (ConfigError("predictor.window = 3 is odd"), "predictor.window = 3 is odd"),
    ],
)
def test_a_class_whose_constructor_raises_is_named(
    run: Runner, text: Words, no_model: None, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(Raising, "error", error, raising=False)
    assert run.refused(*text, "predictor._target_=test_contracts.Raising", kind=ConfigError) == said


# ---- benchmarks


@dataclass(kw_only=True)
class Mine(Text):
    """A benchmark of a user's own; the test sets what it does."""

    made: ClassVar[Callable[[], list[Any]]]
    scored: ClassVar[Any]
    cleaned: ClassVar[Any]

    def check(self) -> None:
        pass

    def samples(self, count_tokens: Any, seed: int) -> Iterator[Sample]:
        yield from type(self).made()

    def score(self, sample: Sample, prediction: str) -> Any:
        return type(self).scored

    def postprocess(self, prediction: str) -> Any:
        return type(self).cleaned


def good(**changes: Any) -> Sample:
    plain = {"id": "a", "task": "t", "prompt": "ab " * 60, "answer_prefix": "", "answers": ("x",), "max_new_tokens": 3}
    return Sample(**{**plain, **changes})


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def act(made: list[Any] | None = None, scored: Any = 0.5, cleaned: Any = "x") -> None:
        monkeypatch.setattr(Mine, "made", lambda: [good()] if made is None else made, raising=False)
        monkeypatch.setattr(Mine, "scored", scored, raising=False)
        monkeypatch.setattr(Mine, "cleaned", cleaned, raising=False)

    return act


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([], "benchmark=mine gave no sample; samples() yields at least one"),
        ([good(prompt="ab " * 200)], "sample a: 601 + 3 tokens of prompt and answer, but benchmark.length = 400: samp"),
        ([good(prompt="ab " * 132, max_new_tokens=4)], "sample a: 397 + 4 tokens of prompt and answer"),
        (["text"], "benchmark=mine: samples() gave str, expected Sample(...)"),
        ([good(id=3)], "benchmark=mine (test_contracts.Mine), sample 3: id = 3, expected a text"),
        ([good(task="")], "benchmark=mine (test_contracts.Mine), sample 'a': task = '', expected a text"),
        ([good(prompt=None)], "benchmark=mine (test_contracts.Mine), sample 'a': prompt = None, expected a text"),
        ([good(answers="x")], "benchmark=mine (test_contracts.Mine), sample 'a': answers = 'x', expected a tuple of t"),
        ([good(max_new_tokens=0)], "benchmark=mine (test_contracts.Mine), sample 'a': max_new_tokens = 0, expected a"),
        ([good(meta={"tokens_cut": "x"})], "benchmark=mine (test_contracts.Mine), sample 'a': meta = {'tokens_cut':"),
        ([good(), good()], "benchmark=mine has two samples of the id a; ids are unique"),
    ],
)
def test_samples_that_break_the_contract_are_refused_before_the_model_is_loaded(
    run: Runner, mine: Callable[..., None], no_model: None, made: list[Any], expected: str
) -> None:
    mine(made)
    assert run.refused(*MINE, kind=ConfigError).startswith(expected)


def test_a_prompt_without_tokens_is_refused(
    run: Runner, mine: Callable[..., None], no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine()
    monkeypatch.setattr(job, "encode_prompt", lambda *_: [])
    assert run.refused(*MINE, kind=ConfigError) == "sample a: its prompt has no tokens"


def test_prompt_and_answer_may_fill_the_length(run: Runner, mine: Callable[..., None]) -> None:
    mine([good(prompt="ab " * 132)])
    run(*MINE, "stages=[calibrate]")


@pytest.mark.parametrize("scored", [17.0, -0.1, float("nan"), float("inf"), "1", [1]])
def test_a_score_outside_of_0_to_1_is_refused(run: Runner, mine: Callable[..., None], scored: Any) -> None:
    mine(scored=scored)
    assert run.refused(*MINE, kind=ConfigError) == (
        f"benchmark=mine (test_contracts.Mine), sample 'a': score() gave {scored!r}, expected 0 to 1, or None"
    )


def test_an_answer_that_is_no_text_is_refused(run: Runner, mine: Callable[..., None]) -> None:
    mine(cleaned=None)
    assert run.refused(*MINE, kind=ConfigError).endswith("postprocess() gave None, expected a text")


@pytest.mark.parametrize("scored", [None, 0, 1, True, 0.25, torch.tensor(0.5)])
def test_scores_from_0_to_1_and_none_pass(run: Runner, mine: Callable[..., None], scored: Any) -> None:
    mine(scored=scored)
    rows = samples(run(*MINE, "stages=[calibrate,decode]"))
    assert {r["score"] for r in rows} == {None if scored is None else float(scored)}


# ---- before the model is loaded


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"ab\xff", "book.txt is not UTF-8 text (byte 2)."),
        (b" \n ", "book.txt holds no text."),
        (b"", "book.txt holds no text."),
        (b"a few words", "book.txt (3 words) ends in window 1 of 4 of 420 tokens. Pass a longer file, or a smaller"),
    ],
)
@pytest.mark.parametrize("stages", ["[calibrate,decode]", "[profile,calibrate,decode]"])
def test_a_text_that_cannot_do_is_refused_before_the_model_is_loaded(
    run: Runner, short: Words, no_model: None, data: bytes, expected: str, stages: str
) -> None:
    (run.output / "book.txt").write_bytes(data)
    assert expected in run.refused(*short, f"stages={stages}", kind=ConfigError)
    assert not run.root(*short).exists(), "a folder of nothing, which a report over the experiment would name"


@pytest.mark.parametrize("stages", ["[calibrate]", "[profile,calibrate,decode]"])
def test_a_length_that_no_task_fits_is_refused_before_the_model_is_loaded(
    run: Runner, no_model: None, stages: str
) -> None:
    text = run.refused(*TINY, "benchmark.length=300", f"stages={stages}", kind=ConfigError)
    assert text.startswith("benchmark=ruler: task vt does not fit in length=300 tokens, 30 of them for the answer.")
    assert not run.root(*TINY, "benchmark.length=300").exists()


def test_wrong_samples_keep_what_force_would_have_deleted(run: Runner, short: Words) -> None:
    words = (*short, "benchmark.num_samples=1", "force=true")
    root = run(*words)
    before = status(root)
    (run.output / "book.txt").write_text("a few words")
    assert "Pass a longer file" in run.refused(*words, kind=ConfigError)
    assert (root / "decode" / "manifest.json").exists() and status(root) == before


def test_samples_are_made_for_stages_that_will_read_them_alone(
    run: Runner, short: Words, no_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*short, "benchmark.num_samples=1")
    root = run(*words)
    with monkeypatch.context() as unread:
        unread.setattr(job, "check_sample", lambda *_: pytest.fail("a sample was made"))
        run(*words)
        run(*words, "stages=[evaluate]")
        run(*words, "stages=[calibrate,profile,decode,evaluate]")
    (root / "decode" / "manifest.json").unlink()
    monkeypatch.setattr(job, "check_sample", lambda *_: (_ for _ in ()).throw(ConfigError("a wrong sample")))
    tracked: list[str] = []
    monkeypatch.setattr(NoTracker, "run", lambda _, stage, *__: tracked.append(stage))
    assert run.refused(*words, kind=ConfigError) == "a wrong sample" and tracked == []


def test_a_profile_alone_reads_no_sample(run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "check_sample", lambda *_: pytest.fail("a sample was made"))
    run(*short, "stages=[profile]")


def test_the_tokenizer_is_loaded_once(run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    own = load.load_tokenizer
    monkeypatch.setattr(load, "load_tokenizer", lambda cfg: seen.append(cfg.name) or own(cfg))
    run(*short, "benchmark.num_samples=1")
    assert seen == ["smollm2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("head_dim=15",),
            "model.architecture.head_dim = 15 gives 15 rotary dimensions, expected an even number: RoPE",
        ),
        (("head_dim=0",), "model.architecture.head_dim = 0, expected a whole number from 1 on"),
        *(
            ((f"{key}={value}",), f"model.architecture.{key} = {value}, expected a whole number from 1 on")
            for key in (
                *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
                *("intermediate_size", "vocab_size", "max_position_embeddings"),
            )
            for value in (0, -1)
        ),
        (("num_hidden_layers=many",), "model.architecture.num_hidden_layers = 'many', expected a whole number"),
        (
            ("num_key_value_heads=3",),
            "model.architecture.num_attention_heads = 4 is no multiple of num_key_value_heads",
        ),
        (("head_dim=null", "hidden_size=66"), "model.architecture.hidden_size = 66 is no multiple of num_attention_h"),
        (("head_dim=null", "hidden_size=20"), "model.architecture.head_dim = 5 gives 5 rotary dimensions"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused_before_any_work(
    run: Runner, short: Words, no_model: None, words: Words, expected: str
) -> None:
    text = run.refused(*short, *(f"model.architecture.{w}" for w in words), kind=ConfigError)
    assert text.startswith(expected) and not list(run.output.glob("default/*/status.json"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rope_parameters=5", "rope_parameters = 5, expected keys and values"),
        ("rope_parameters.rope_type=zzz", "rope_parameters.rope_type = 'zzz' is none of default, "),
        ("rope_parameters.rope_theta=abc", "rope_parameters.rope_theta = 'abc', expected a number above 0"),
        ("rope_parameters.rope_theta=-1", "rope_parameters.rope_theta = -1, expected a number above 0"),
        *(
            (f"rope_parameters.partial_rotary_factor={x}", f"rope_parameters.partial_rotary_factor = {said}, expected")
            for x, said in (("x", "'x'"), ("2.0", "2.0"), ("0", "0"), ("true", "True"))
        ),
        ("hidden_act=zz", "hidden_act = 'zz' is none of "),
    ],
)
def test_rope_and_activations_that_no_model_can_have_are_refused_before_any_work(
    run: Runner, short: Words, no_model: None, word: str, expected: str
) -> None:
    text = run.refused(*short, f"++model.architecture.{word}", kind=ConfigError)
    assert text.startswith(f"model.architecture.{expected}") and not list(run.output.glob("default/*/status.json"))


def test_sizes_are_checked_whatever_the_weights_and_stages(run: Runner, no_model: None) -> None:
    """dsa.dense_layers is held against the layers of all of them."""
    for words in ((), ("stages=[evaluate]",)):
        text = run.refused("model.architecture.num_hidden_layers=0", *words, kind=ConfigError)
        assert text == "model.architecture.num_hidden_layers = 0, expected a whole number from 1 on"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model.architecture.model_type=foo", "model.architecture.model_type=foo is unknown among the causal language"),
        ("model.architecture.model_type=lama", "model.architecture.model_type=lama is unknown among the causal langu"),
        ("model.architecture.model_type=5", "model.architecture.model_type=5 is unknown among the causal language"),
        ("model.architecture.model_type=clip", "model.architecture.model_type=clip is unknown among the causal langu"),
        ("+model.architecture.hiden_size=64", "model.architecture.hiden_size: model type llama has no such key. Did"),
        ("model.architecture.rms_norm_eps=small", "model.architecture of smollm2: Validation error for field 'rms_no"),
        (
            "model.architecture.rope_parameters.rope_type=yarn",
            'model.architecture of smollm2: "Missing required keys in',
        ),
    ],
)
def test_an_architecture_that_transformers_does_not_know_is_refused_before_any_work(
    run: Runner, short: Words, no_model: None, word: str, expected: str
) -> None:
    text = run.refused(*short, word, kind=ConfigError)
    assert text.startswith(expected) and "\n" not in text
    assert not list(run.output.glob("default/*/status.json"))


def test_the_rotary_share_of_a_head_must_be_even_too(run: Runner, no_model: None) -> None:
    text = run.refused("+experiment=glm4_quest", *TINY, "model.architecture.head_dim=6", kind=ConfigError)
    assert "head_dim = 6 x partial_rotary_factor = 0.5 gives 3 rotary dimensions" in text
