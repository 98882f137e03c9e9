# SPDX-License-Identifier: Apache-2.0
"""RULER: synthetic long-context tasks of any length, made for the model's own tokenizer.

Eleven of the thirteen tasks; the two that ask about Wikipedia (qa_1, qa_2) need data sets and are
not here. Task shapes, generation lengths and scores are RULER's, the wording is ours unless
`templates` points to the official one (see ruler_wording): scores with our wording are not
comparable with published ones. The lines of vt's chains and the word lists are ours in any case.
"""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from prr_pipeline.benchmarks import scoring
from prr_pipeline.benchmarks.base import Benchmark, CountTokens, Sample, read_text, unknown
from prr_pipeline.benchmarks.ruler_tasks import TASKS, Request, Task
from prr_pipeline.benchmarks.ruler_wording import OURS, Wording, official
from prr_pipeline.benchmarks.sizing import DoesNotFit, largest_fit
from prr_pipeline.errors import ConfigError

log = logging.getLogger(__name__)

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(kw_only=True)
class Ruler(Benchmark):
    """Each task's samples, each the largest that fits `length` tokens.

    Attributes:
        tasks: names of ruler_tasks.TASKS.
        length: tokens of a prompt and its answer together, chat template included.
        num_samples: samples a task.
        haystack: a UTF-8 text file, the prose of the tasks that hide needles in essays
            (niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue, niah_multiquery).
        templates: RULER's scripts/data/synthetic/constants.py; null: our own wording.
    """

    name: str = "ruler"
    tasks: list[str] = field(default_factory=lambda: ["niah_single_1", "vt"])
    length: int = 2048
    num_samples: int = 3
    haystack: str | None = None
    templates: str | None = None

    def check(self) -> None:
        """Validate the fields; see Benchmark.check."""
        if isinstance(self.tasks, str) or not self.tasks:
            raise ConfigError(
                f"benchmark={self.name}: tasks must be a list of names, got {self.tasks!r}. "
                "Write benchmark.tasks=[niah_single_1,vt]."
            )
        for task in self.tasks:
            if not isinstance(task, str) or task not in TASKS:
                raise ConfigError(f"benchmark={self.name}: {unknown('task', task, TASKS)}")
        if len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"benchmark={self.name}: a task comes up twice in {self.tasks}.")
        self._at_least("num_samples", 1)
        self._at_least("length", 1)
        for task in self.tasks:
            generated = self._max_new_tokens(task)
            if self.length <= generated:
                raise ConfigError(
                    f"benchmark={self.name}: length={self.length} leaves no room for a prompt, "
                    f"{task} generates {generated} tokens. Use a larger benchmark.length."
                )
        self._check_haystack()

    def samples(self, count_tokens: CountTokens, seed: int) -> Iterator[Sample]:
        """Yield num_samples of each task, task by task; see Benchmark.samples.

        A sample depends on seed, task, index, length and the tokenizer, on nothing else.

        Raises:
            ConfigError: a task's smallest question is longer than length; names the next length that fits.
        """
        for task in self.tasks:
            for index in range(self.num_samples):
                try:
                    yield self._sample(task, index, count_tokens, seed)
                except DoesNotFit:
                    enough = self._enough(task, count_tokens, seed)
                    raise ConfigError(
                        f"benchmark={self.name}: task {task} does not fit in length={self.length} "
                        f"tokens, {self._max_new_tokens(task)} of them for the answer. "
                        f"It fits from benchmark.length={enough} on."
                    ) from None

    def score(self, sample: Sample, prediction: str) -> float:
        """Share of the answers that the prediction names."""
        return scoring.string_match_all(prediction, sample.answers)

    def postprocess(self, prediction: str) -> str:
        """Clean a prediction as RULER does."""
        return scoring.postprocess(prediction)

    def _check_haystack(self) -> None:
        of_prose = [name for name, task in TASKS.items() if task.needs_prose()]
        if any(task in of_prose for task in self.tasks):
            if not self._sentences:
                raise ConfigError(f"benchmark={self.name}: {self.haystack} holds no text.")
        elif self.haystack:
            raise ConfigError(
                f"benchmark={self.name}: haystack={self.haystack} would be used by none of the "
                f"tasks {list(self.tasks)}, only by {', '.join(of_prose)}."
            )

    def _sample(self, name: str, index: int, count_tokens: CountTokens, seed: int) -> Sample:
        task, request = TASKS[name], self._request(name, index, seed, self.length)
        room = self.length - self._max_new_tokens(name)
        largest = task.largest(request)
        count = _counter(task, request, count_tokens)
        fit = largest_fit(count, room, task.smallest(request), largest)
        if fit.units == largest:
            log.warning("%s has text for %d tokens only, not for %d", name, fit.tokens, room)
        draft = task.build(request, fit.units)
        return Sample(
            id=f"{name}-{self.length}-{index:04d}",
            task=name,
            prompt=draft.prompt,
            answer_prefix=draft.answer_prefix,
            answers=draft.answers,
            max_new_tokens=self._max_new_tokens(name),
            meta={"units": fit.units, "prompt_tokens": fit.tokens, **draft.meta},
        )

    def _enough(self, name: str, count_tokens: CountTokens, seed: int) -> int:
        """The first length after the one asked for from which on every sample of a task fits.

        A shorter one may fit too: below a length cwe asks for less.
        """

        def needed(length: int) -> int:
            task = TASKS[name]
            requests = [self._request(name, i, seed, length) for i in range(self.num_samples)]
            return self._max_new_tokens(name) + max(
                _counter(task, request, count_tokens)(task.smallest(request)) for request in requests
            )

        # What a task asks may itself depend on the length (cwe), hence the second look.
        enough = needed(self.length)
        return max(enough, needed(enough))

    def _request(self, name: str, index: int, seed: int, length: int) -> Request:
        sentences = self._sentences if TASKS[name].needs_prose() else ()
        return Request(f"{seed}/{name}/{index}", length, self._wording, sentences)

    def _max_new_tokens(self, name: str) -> int:
        return self._wording.families[TASKS[name].family].tokens_to_generate

    @cached_property
    def _wording(self) -> Wording:
        return official(Path(self.templates)) if self.templates else OURS

    @cached_property
    def _sentences(self) -> tuple[str, ...]:
        text = " ".join(read_text(self._file("haystack", "a UTF-8 text file, such as essays")).split())
        return tuple(sentence for sentence in _SENTENCE_END.split(text) if sentence)


def _counter(task: Task, request: Request, count_tokens: CountTokens) -> Callable[[int], int]:
    """Tokens of a task's prompt as a function of its units."""

    def count(units: int) -> int:
        draft = task.build(request, units)
        return count_tokens(draft.prompt, draft.answer_prefix)

    return count
