# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is: it makes samples of a wanted length and scores the answers to them.

A new benchmark is one file here and one YAML file in conf/benchmark:

    @dataclass(kw_only=True)
    class Mine(Benchmark):              # its fields are the option's keys, with their defaults
        name: str = "mine"
        length: int = 4096              # the base class has length and num_samples, which debug=tiny sets

        def check(self): ...            # raise ConfigError or MissingInput; touches no model
        def samples(self, count_tokens, seed): ...    # yield Sample(...)
        def score(self, sample, prediction): ...      # 0 to 1, or None

    # conf/benchmark/mine.yaml
    _target_: prr_pipeline.benchmarks.mine.Mine
    name: mine
    length: 4096
    num_samples: 3

Rules: the same seed and tokenizer give the same samples; a sample's id never changes (an
interrupted run is resumed by it); prompt and max_new_tokens together fit in the length that the
user asked for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat

from prr_pipeline.config import near
from prr_pipeline.errors import ConfigError, MissingInput

# (prompt, answer_prefix) -> tokens that the model reads: chat template and special tokens included
# where the benchmark is a chat, the bare text otherwise.
CountTokens = Callable[[str, str], int]


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        id: stable and unique in the benchmark, such as "niah_single_1-2048-0003".
        task: the row of the result table that it counts for.
        prompt: the user's turn, or the bare text where the benchmark is no chat.
        answer_prefix: forced start of the answer, after the assistant's header; not in predictions.
        answers: what a right answer has; empty where nothing is scored.
        max_new_tokens: tokens to generate at most.
        meta: what else is worth recording (size, depth of the needle); JSON types only.
    """

    id: str
    task: str
    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Benchmark(ABC):
    """Base of all benchmarks; see the module's docstring for what a subclass writes.

    Attributes:
        name: the option's name, for tables and messages.
        length: tokens of a prompt and its answer together; None: what the samples have.
        num_samples: samples to make (of each task, if there are several).
        chat: whether prompts are turns of a chat (the model's template applies if it has one).
        ignore_eos: whether to go on generating after the end-of-sequence token.
        queries: where those of decode steps come from: the "model", or "synthetic" (see locality).
    """

    name: str
    length: int | None = None
    num_samples: int = 3
    chat: ClassVar[bool] = True
    ignore_eos: ClassVar[bool] = False
    queries: ClassVar[str] = "model"

    @abstractmethod
    def check(self) -> None:
        """Validate the fields before any work.

        Raises:
            ConfigError: a value that is wrong.
            MissingInput: a file that is not there.
        """

    @abstractmethod
    def samples(self, count_tokens: CountTokens, seed: int) -> Iterator[Sample]:
        """Yield the samples, in the same order and with the same ids each time.

        Raises:
            ConfigError: the wanted length is impossible with this tokenizer.
        """

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> float | None:
        """Judge a post-processed prediction: 0 to 1, None if the benchmark scores nothing."""

    def files(self) -> dict[str, Path]:
        """The files that samples are made from, by the field that names them: a change of theirs is another job.

        They are those of the text fields that name an existing file; a benchmark that reads others overrides this.
        """
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return {key: Path(x) for key, x in named.items() if isinstance(x, str) and x and Path(x).is_file()}

    def postprocess(self, prediction: str) -> str:
        """Clean a raw prediction for scoring; one that is empty then counts as null."""
        return prediction.strip()

    def _at_least(self, key: str, minimum: int) -> None:
        """Check that a field is a whole number >= minimum."""
        value = getattr(self, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"benchmark={self.name}: {key} must be a whole number >= {minimum}, got {value!r}")

    def _file(self, key: str, what: str) -> Path:
        """Return the path that a field holds, if there is a file.

        Raises:
            MissingInput: no path, or no file there; says which key takes what.
        """
        value = getattr(self, key)
        if value and Path(value).is_file():
            return Path(value)
        found = f"no file at {value} (looked in {Path.cwd()})" if value else f"{key} is not set"
        raise MissingInput(f"benchmark={self.name}: {found}. Pass benchmark.{key}=<{what}>.")


def _broken(benchmark: Benchmark, sample: object, what: str) -> ConfigError:
    cls = type(benchmark)
    which = f"sample {getattr(sample, 'id', sample)!r}"
    return ConfigError(f"benchmark={benchmark.name} ({cls.__module__}.{cls.__qualname__}), {which}: {what}")


def check_sample(benchmark: Benchmark, sample: object) -> None:
    """Hold what a benchmark yields against Sample's attributes.

    Raises:
        ConfigError: something of another type, no id or task, nothing to generate, what records cannot hold.
    """
    if not isinstance(sample, Sample):
        raise ConfigError(f"benchmark={benchmark.name}: samples() gave {type(sample).__name__}, expected Sample(...)")
    for key in ("id", "task", "prompt", "answer_prefix"):
        value = getattr(sample, key)
        if not isinstance(value, str) or (not value and key in ("id", "task")):
            raise _broken(benchmark, sample, f"{key} = {value!r}, expected a text")
    answers = sample.answers
    if not isinstance(answers, tuple | list) or not all(isinstance(x, str) for x in answers):
        raise _broken(benchmark, sample, f"answers = {answers!r}, expected a tuple of texts")
    n = sample.max_new_tokens
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise _broken(benchmark, sample, f"max_new_tokens = {n!r}, expected a whole number from 1 on")
    if not isinstance(sample.meta, dict) or not isinstance(sample.meta.get("tokens_cut", 0), int):
        raise _broken(benchmark, sample, f"meta = {sample.meta!r}, expected a dict; tokens_cut in it is a whole number")


def check_answer(benchmark: Benchmark, sample: Sample, found: object) -> str:
    """What postprocess() gave, if it is a text; else ConfigError."""
    if not isinstance(found, str):
        raise _broken(benchmark, sample, f"postprocess() gave {found!r}, expected a text")
    return found


def check_score(benchmark: Benchmark, sample: Sample, found: object) -> float | None:
    """What score() gave, if it is None or 0 to 1; else ConfigError."""
    if found is None:
        return None
    if not isinstance(found, SupportsFloat) or isinstance(found, str) or not 0 <= float(found) <= 1:
        raise _broken(benchmark, sample, f"score() gave {found!r}, expected 0 to 1, or None")
    return float(found)


def read_text(path: Path) -> str:
    """Read a UTF-8 file; ConfigError if it is something else."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}).") from None


def unknown(what: str, value: object, known: Iterable[str]) -> str:
    """Say that a name is unknown, which ones are near it and which ones there are."""
    return f"unknown {what} {value!r}.{near(value, list(known))}"
