# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks as generators: a request for so many units of text in, a question out.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
2024, and the configurations of its repository (scripts/synthetic.yaml). A draft depends on the
request alone. Draws are ordered so that more units only add words: the length of a prompt then
grows with them, and the largest that fits can be searched for.
"""

import math
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prr_pipeline.benchmarks import words
from prr_pipeline.benchmarks.ruler_wording import Wording

NOISE, NEEDLES, PROSE = "noise", "needles", "prose"
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
_DRAW: dict[str, Callable[[random.Random, int], list[str]]] = {
    "words": words.compounds,
    "numbers": words.numbers,
    "uuids": words.uuids,
}


@dataclass(frozen=True)
class Request:
    """What a draft is made from.

    Attributes:
        seed: names the random stream; one a sample.
        length: tokens of prompt and answer that the user asked for.
        wording: what to say.
        sentences: the prose that some haystacks are made of.
    """

    seed: str
    length: int
    wording: Wording
    sentences: tuple[str, ...] = ()

    def stream(self, purpose: str) -> random.Random:
        """A random stream of its own: draws of one purpose do not shift those of another."""
        return random.Random(f"{self.seed}/{purpose}")


@dataclass(frozen=True)
class Draft:
    """A question before anything is known about its length in tokens."""

    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """A row of the table: a family (it names the templates), and a draft of any number of units."""

    family: ClassVar[str]

    @abstractmethod
    def build(self, request: Request, units: int) -> Draft:
        """Make the question with that many units of text."""

    def needs_prose(self) -> bool:
        """Whether the request must come with sentences."""
        return False

    def smallest(self, request: Request) -> int:
        """The fewest units that make a sound question."""
        return 1

    def largest(self, request: Request) -> int:
        """The most units that can be made; the default is more than any context holds."""
        return 1 << 24


@dataclass(frozen=True)
class Niah(Task):
    """Needles in a haystack: find the values of some keys. A unit is a line of the haystack."""

    family: ClassVar[str] = "niah"

    haystack: str
    key: str
    value: str
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def needs_prose(self) -> bool:
        """Whether the haystack is prose."""
        return self.haystack == PROSE

    def largest(self, request: Request) -> int:
        """Bounded, in a haystack of needles, by the distinct keys that there are."""
        if self.haystack == NEEDLES and self.key == "words":
            return words.MAX_COMPOUNDS - self.num_keys
        return super().largest(request)

    def build(self, request: Request, units: int) -> Draft:
        """Make the question; meta has the depth (0 to 1) of each needle that is asked for."""
        others = units if self.haystack == NEEDLES else 0
        keys = _DRAW[self.key](request.stream("keys"), self.num_keys + others)
        values = _DRAW[self.value](request.stream("values"), self.num_keys * self.num_values + others)
        wanted = values[: self.num_queries * self.num_values]
        pairs = [
            (key, values[index * self.num_values + repeat])
            for index, key in enumerate(keys[: self.num_keys])
            for repeat in range(self.num_values)
        ]
        lines = self._haystack(request, units, keys[self.num_keys :], values[len(pairs) :])
        rng = request.stream("places")
        depths = [rng.random() for _ in pairs]
        needles = [self._needle(request, key, value) for key, value in pairs]
        context = (" " if self.needs_prose() else "\n").join(_insert(lines, needles, depths))
        prompt, prefix = self._ask(request, context, keys[: self.num_queries])
        meta = {"depth": [round(depth, 4) for depth in depths[: len(wanted)]]}
        return Draft(prompt, prefix, tuple(wanted), meta)

    def _haystack(self, request: Request, units: int, keys: Sequence[str], values: Sequence[str]) -> list[str]:
        if self.haystack == NEEDLES:
            return [self._needle(request, *pair) for pair in zip(keys, values, strict=True)]
        if self.haystack == NOISE:
            return [request.wording.noise] * units
        return [request.sentences[i % len(request.sentences)] for i in range(units)]

    def _needle(self, request: Request, key: str, value: str) -> str:
        return request.wording.needle.format(type_needle_v=self.value, singular=self.value[:-1], key=key, value=value)

    def _ask(self, request: Request, context: str, keys: Sequence[str]) -> tuple[str, str]:
        """Fill the templates in; asked for one value, they are put in the singular (RULER's rule).

        The rule is applied before the context is filled in, so that it changes nothing else.
        """
        text = request.wording.families[self.family]
        kind = self.value
        parts = [text.template, text.answer_prefix]
        if self.num_queries * self.num_values == 1:
            kind = kind[:-1]
            for plural, one in _SINGULAR:
                parts = [part.replace(plural, one) for part in parts]
        query = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
        template, prefix = parts
        return (
            template.format(context=context, query=query, type_needle_v=kind),
            prefix.format(query=query, type_needle_v=kind),
        )


@dataclass(frozen=True)
class VariableTracking(Task):
    """A chain of assignments in noise: name all names that got a value. A unit is a line of noise.

    One solved example of the same kind, with shorter names, goes before the question.
    """

    family: ClassVar[str] = "variable_tracking"
    EXAMPLE_LINES: ClassVar[int] = 5

    num_hops: int

    def build(self, request: Request, units: int) -> Draft:
        """Make the question; meta has the depth (0 to 1) of each link of the chain."""
        value, example_value = words.numbers(request.stream("values"), 2, digits=5)
        shot = self._chain(request, "example", 3, example_value, self.EXAMPLE_LINES)
        asked = self._chain(request, "question", 5, value, units)
        prompt = f"{shot.prompt}\n{_solved(shot)}\n\n{asked.prompt}"
        return Draft(prompt, asked.answer_prefix, asked.answers, asked.meta)

    def _chain(self, request: Request, stream: str, size: int, value: str, units: int) -> Draft:
        rng = request.stream(stream)
        names = words.letters(rng, self.num_hops + 1, size, string.ascii_uppercase)
        depths = sorted(rng.random() for _ in names)
        links = [f"Let {name} = {source}." for name, source in zip(names, [value, *names[:-1]], strict=True)]
        text = request.wording.families[self.family]
        context = "\n".join(_insert([request.wording.noise] * units, links, depths))
        return Draft(
            text.template.format(context=context, query=value, num_v=len(names)),
            text.answer_prefix.format(query=value, num_v=len(names)),
            tuple(names),
            {"depth": [round(depth, 4) for depth in depths]},
        )


@dataclass(frozen=True)
class CommonWords(Task):
    """A list of words in which ten are much commoner than the rest. A unit is a distinct word.

    Below 4096 tokens each word is repeated less often, as in RULER: the full counts would not fit.
    One solved example goes before the question; it shares no plain word with it.
    """

    family: ClassVar[str] = "common_words_extraction"
    SHORT: ClassVar[int] = 4096

    num_common: int
    common: int
    uncommon: int

    def build(self, request: Request, units: int) -> Draft:
        """Make the question; meta has how often a common and an uncommon word come up."""
        short = request.length < self.SHORT
        counts = (6, 1) if short else (self.common, self.uncommon)
        example_units, example_counts = (20, (3, 1)) if short else (40, (10, 3))
        plain = list(words.PLAIN)
        request.stream("words").shuffle(plain)
        shot = self._list(request, "example", plain[:example_units], example_counts)
        rest = plain[example_units:]
        chosen = rest[:units] + words.compounds(
            request.stream("compounds"),
            max(0, units - len(rest)),
            avoid=frozenset(rest[: self.num_common]),
        )
        asked = self._list(request, "question", chosen, counts)
        meta = {"common": counts[0], "uncommon": counts[1]}
        return Draft(
            f"{shot.prompt}\n{_solved(shot)}\n\n{asked.prompt}",
            asked.answer_prefix,
            asked.answers,
            meta,
        )

    def smallest(self, request: Request) -> int:
        """The common words and as many uncommon ones."""
        return 2 * self.num_common

    def largest(self, request: Request) -> int:
        """Bounded by the distinct words that there are."""
        return words.MAX_COMPOUNDS

    def _list(self, request: Request, stream: str, chosen: Sequence[str], counts: tuple[int, int]) -> Draft:
        common, uncommon = chosen[: self.num_common], chosen[self.num_common :]
        items = list(common) * counts[0] + list(uncommon) * counts[1]
        request.stream(stream).shuffle(items)
        text = request.wording.families[self.family]
        context = " ".join(f"{place}. {word}" for place, word in enumerate(items, start=1))
        prompt = text.template.format(context=context, query="", num_cw=self.num_common)
        prefix = text.answer_prefix.format(query="", num_cw=self.num_common)
        return Draft(prompt, prefix, tuple(common))


@dataclass(frozen=True)
class FrequentWords(Task):
    """Code words with zeta-distributed counts: name the three commonest. A unit is a draw.

    Of `units` draws, the word of rank k comes up floor(units * k**-2 / zeta(2)) times (alpha = 2).
    Rank 1 is "...", which the question tells to leave out: the answers are ranks 2 to 4.
    """

    family: ClassVar[str] = "freq_words_extraction"
    LETTERS: ClassVar[int] = 6
    ANSWERS: ClassVar[slice] = slice(1, 4)

    def build(self, request: Request, units: int) -> Draft:
        """Make the question; meta has how often the answers come up."""
        counts = self._counts(units)
        vocabulary = ["..."] + words.letters(
            request.stream("words"), len(counts) - 1, self.LETTERS, string.ascii_lowercase
        )
        items = [w for w, n in zip(vocabulary, counts, strict=True) for _ in range(n)]
        request.stream("order").shuffle(items)
        text = request.wording.families[self.family]
        return Draft(
            text.template.format(context=" ".join(items), query=""),
            text.answer_prefix.format(query=""),
            tuple(vocabulary[self.ANSWERS]),
            {"counts": counts[self.ANSWERS]},
        )

    def smallest(self, request: Request) -> int:
        """From here on rank 4 comes up at least once more than rank 5: the answer is one set."""
        return math.ceil(1 / (_share(4) - _share(5)))

    def _counts(self, units: int) -> list[int]:
        counts: list[int] = []
        while (count := int(units * _share(len(counts) + 1))) > 0:
            counts.append(count)
        return counts


def _share(rank: int) -> float:
    """Probability of a rank under the zeta distribution with alpha 2, for which zeta = pi^2/6."""
    return 6 / (math.pi * rank) ** 2


def _solved(shot: Draft) -> str:
    return f"{shot.answer_prefix.strip()} {' '.join(shot.answers)}"


def _insert(lines: Sequence[str], extra: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Put each extra line at its depth (0: before all lines, 1: after them)."""
    places = sorted((int(depth * (len(lines) + 1)), order) for order, depth in enumerate(depths))
    result: list[str] = []
    done = 0
    for place, order in places:
        result += [*lines[done:place], extra[order]]
        done = place
    return result + list(lines[done:])


TASKS: dict[str, Task] = {
    "niah_single_1": Niah(NOISE, "words", "numbers"),
    "niah_single_2": Niah(PROSE, "words", "numbers"),
    "niah_single_3": Niah(PROSE, "words", "uuids"),
    "niah_multikey_1": Niah(PROSE, "words", "numbers", num_keys=4),
    "niah_multikey_2": Niah(NEEDLES, "words", "numbers"),
    "niah_multikey_3": Niah(NEEDLES, "uuids", "uuids"),
    "niah_multivalue": Niah(PROSE, "words", "numbers", num_values=4),
    "niah_multiquery": Niah(PROSE, "words", "numbers", num_keys=4, num_queries=4),
    "vt": VariableTracking(num_hops=4),
    "cwe": CommonWords(num_common=10, common=30, uncommon=3),
    "fwe": FrequentWords(),
}
