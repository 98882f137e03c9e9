# SPDX-License-Identifier: Apache-2.0
"""Windows of a plain text file, as they stand: real prose to measure the locality of attention on.

Nothing is asked and nothing scored. The model reads a window (teacher forcing: every token of the
context is the file's own) and, for decoding, goes on from it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from prr_pipeline.benchmarks.base import Benchmark, CountTokens, Sample, read_text
from prr_pipeline.benchmarks.sizing import DoesNotFit, largest_fit
from prr_pipeline.errors import ConfigError

_WORD = re.compile(r"\s*\S+")  # a word with the blanks before it: joined, they are the text


@dataclass(kw_only=True)
class Text(Benchmark):
    """Windows of `length` tokens of a UTF-8 text file. The seed changes nothing.

    Attributes:
        path: the file; required.
        length: tokens of a window, the generated ones included.
        num_samples: windows to take.
        stride: words from the start of a window to that of the next; null: windows do not overlap.
        max_new_tokens: tokens to generate after a window; the first costs no step, so at least 2.
    """

    chat: ClassVar[bool] = False
    ignore_eos: ClassVar[bool] = True

    name: str = "text"
    path: str | None = None
    length: int = 2048
    num_samples: int = 3
    stride: int | None = None
    max_new_tokens: int = 64

    def check(self) -> None:
        """Validate the fields; see Benchmark.check."""
        self._at_least("max_new_tokens", 2)
        self._at_least("length", self.max_new_tokens + 1)
        self._at_least("num_samples", 1)
        if self.stride is not None:
            self._at_least("stride", 1)
        if not self._words:
            raise ConfigError(f"benchmark={self.name}: {self.path} holds no text.")

    def samples(self, count_tokens: CountTokens, seed: int) -> Iterator[Sample]:
        """Yield the windows; see Benchmark.samples.

        Raises:
            ConfigError: the file is too short for so many windows, or a word too long for one.
        """
        # All of them are cut before the first is handed out: a file that is too short must not be
        # found out about in the middle of a run.
        yield from self._windows(count_tokens)

    def score(self, sample: Sample, prediction: str) -> None:
        """Score nothing."""
        return None

    @cached_property
    def _words(self) -> list[str]:
        return _WORD.findall(read_text(self._file("path", "a UTF-8 text file, such as a book")))

    def _windows(self, count_tokens: CountTokens) -> list[Sample]:
        words = self._words
        windows: list[Sample] = []
        start = 0
        for index in range(self.num_samples):
            sample = self._window(words, start, index, count_tokens)
            if sample is None:
                raise ConfigError(
                    f"benchmark=text: {self.path} ({len(words)} words) ends in window "
                    f"{index + 1} of {self.num_samples} of {self.length} tokens. Pass a longer "
                    "file, or a smaller benchmark.num_samples, .stride or .length."
                )
            windows.append(sample)
            start += sample.meta["words"] if self.stride is None else self.stride
        return windows

    def _window(self, words: list[str], start: int, index: int, count_tokens: CountTokens) -> Sample | None:
        """The longest window that fits; None if the text ends before it is full."""
        if start >= len(words):
            return None

        def text(size: int) -> str:
            return "".join(words[start : start + size]).lstrip()

        room = self.length - self.max_new_tokens
        most = len(words) - start
        try:
            fit = largest_fit(lambda size: count_tokens(text(size), ""), room, 1, most)
        except DoesNotFit as error:
            raise ConfigError(
                f"benchmark=text: word {start + 1} of {self.path} alone has {error.tokens} tokens, "
                f"a window of length={self.length} holds {room}. "
                f"Use benchmark.length>={error.tokens + self.max_new_tokens}."
            ) from None
        if fit.units == most and fit.tokens < room:
            return None
        return Sample(
            id=f"text-{self.length}-{index:04d}",
            task="text",
            prompt=text(fit.units),
            answer_prefix="",
            answers=(),
            max_new_tokens=self.max_new_tokens,
            meta={"start_word": start, "words": fit.units, "prompt_tokens": fit.tokens},
        )
