# SPDX-License-Identifier: Apache-2.0
"""Word lists and generators: unambiguous as substrings, distinct, stable under asking for more."""

import random
import string

import pytest

from prr_pipeline.benchmarks import words

GENERATORS = [
    words.compounds,
    words.numbers,
    words.uuids,
    lambda rng, count: words.letters(rng, count, 3, string.ascii_uppercase),
]


def test_no_word_is_part_of_another():
    assert len(set(words.PLAIN)) == len(words.PLAIN) == len(words.NOUNS) + len(words.ADJECTIVES)
    text = " ".join(words.PLAIN)
    assert [word for word in words.PLAIN if text.count(word) > 1] == []


@pytest.mark.parametrize("draw", GENERATORS)
def test_values_are_distinct_and_a_longer_draw_starts_with_a_shorter_one(draw):
    many = draw(random.Random("s"), 2000)
    assert len(set(many)) == 2000
    assert many[:100] == draw(random.Random("s"), 100)
    assert many != draw(random.Random("t"), 2000)


def test_shapes():
    rng = random.Random(0)
    assert all(len(n) == 7 and n.isdigit() and n[0] != "0" for n in words.numbers(rng, 200))
    assert all(len(u) == 36 and u[14] == "4" for u in words.uuids(rng, 20))
    assert all(len(c.split("-")) == 2 for c in words.compounds(rng, 200))


def test_compounds_avoid_words_and_refuse_what_cannot_be_drawn():
    avoid = frozenset(words.NOUNS[:-1])
    drawn = words.compounds(random.Random(0), 20, avoid)
    assert {pair.split("-")[1] for pair in drawn} == {words.NOUNS[-1]}
    with pytest.raises(ValueError, match="can be drawn"):
        words.compounds(random.Random(0), words.MAX_COMPOUNDS + 1)
