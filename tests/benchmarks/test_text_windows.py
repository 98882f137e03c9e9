# SPDX-License-Identifier: Apache-2.0
"""Text windows: contiguous pieces of the file, full, in bounds; errors that say what to pass."""

from pathlib import Path

import pytest

from prr_pipeline.benchmarks.text import Text
from prr_pipeline.errors import ConfigError, MissingInput


def count(prompt, prefix):
    assert prefix == ""
    return len(prompt.split())


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"word{i}" + (" " if i % 7 else "\n\n") for i in range(1000)))
    return str(path)


def test_windows_follow_each_other(book):
    text = Text(path=book, length=102, num_samples=4, max_new_tokens=2)
    text.check()
    windows = list(text.samples(count, seed=0))
    assert [w.id for w in windows] == [f"text-102-{i:04d}" for i in range(4)]
    assert [w.prompt.split() for w in windows] == [
        [f"word{i}" for i in range(start, start + 100)] for start in (0, 100, 200, 300)
    ]
    assert windows[0].prompt in Path(book).read_text()  # blanks and newlines as they were
    assert windows[1].meta == {"start_word": 100, "words": 100, "prompt_tokens": 100}
    assert not text.chat and text.score(windows[0], "x") is None and windows[0].answers == ()


def test_stride_and_generated_tokens(book):
    text = Text(path=book, length=60, num_samples=3, stride=8, max_new_tokens=20)
    text.check()
    windows = list(text.samples(count, seed=0))
    assert [w.meta["start_word"] for w in windows] == [0, 8, 16]
    assert windows[1].prompt.startswith("word8 ")  # the blank lines before it are left out
    assert [w.meta["prompt_tokens"] + w.max_new_tokens for w in windows] == [60, 60, 60]


def test_a_file_that_just_suffices_does(book):
    assert len(list(Text(path=book, length=102, num_samples=10, max_new_tokens=2).samples(count, 0))) == 10


def test_a_short_file_is_refused_before_the_first_window(book):
    samples = Text(path=book, length=102, num_samples=11, max_new_tokens=2).samples(count, seed=0)
    with pytest.raises(ConfigError, match=r"\(1000 words\) ends in window 11 of 11 of 102 tokens"):
        next(samples)


def test_the_default_decodes(book):
    """One token would be the prefill's own, and no step of a decode."""
    (window,) = Text(path=book, length=400, num_samples=1).samples(count, seed=0)
    assert window.max_new_tokens == 64


def test_a_word_longer_than_a_window(book):
    with pytest.raises(ConfigError, match=r"word 1 of .* Use benchmark.length>=7\."):
        list(Text(path=book, length=3, max_new_tokens=2).samples(lambda prompt, _: len(prompt), seed=0))


def test_few_counts_a_window(book):
    calls = []

    def counted(prompt, prefix):
        calls.append(prompt)
        return len(prompt) // 4

    list(Text(path=book, length=1001, num_samples=1).samples(counted, seed=0))
    assert len(calls) <= 12


def test_check(book):
    with pytest.raises(MissingInput, match=r"benchmark=text: path is not set. Pass benchmark.path"):
        Text().check()
    with pytest.raises(MissingInput, match=r"no file at nowhere\.txt"):
        Text(path="nowhere.txt").check()
    for wrong in ({"length": 1}, {"num_samples": 0}, {"stride": 0}, {"max_new_tokens": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Text(path=book, **wrong).check()
