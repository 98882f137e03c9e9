# SPDX-License-Identifier: Apache-2.0
"""RULER's samples: never longer than asked, as long as can be, reproducible, cheap to size."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prr_pipeline.benchmarks.ruler import Ruler, _counter
from prr_pipeline.benchmarks.ruler_tasks import TASKS
from prr_pipeline.benchmarks.sizing import MAX_COUNTS
from prr_pipeline.errors import ConfigError, MissingInput

OFFLINE = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
TEMPLATE_TOKENS = 17


def by_words(prompt, prefix):
    return TEMPLATE_TOKENS + len((prompt + prefix).split())


def by_characters(prompt, prefix):
    return TEMPLATE_TOKENS + len(prompt + prefix) // 4


def by_pieces(prompt, prefix):
    """Letters in groups of up to 5, digits one by one, as many tokenizers do."""
    return TEMPLATE_TOKENS + len(re.findall(r" ?[A-Za-z]{1,5}|\d|\s|[^\w\s]", prompt + prefix))


TOKENIZERS = [by_words, by_characters, by_pieces]


def make(count=by_pieces, seed=0, **fields):
    ruler = Ruler(**fields)
    ruler.check()
    return list(ruler.samples(count, seed))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OFFLINE),
    st.sampled_from(TOKENIZERS),
    st.integers(129, 6000),
    st.integers(0, 2**32),
)
def test_prompt_and_answer_fit_in_any_length_from_the_named_one_on(task, count, length, seed):
    def lengths(length):
        made = make(count, seed, tasks=[task], length=length, num_samples=2)
        assert len(made) == 2
        assert made[0].prompt != made[1].prompt and made[0].answers != made[1].answers
        for sample in made:
            assert sample.meta["prompt_tokens"] == count(sample.prompt, sample.answer_prefix)
            assert sample.meta["prompt_tokens"] + sample.max_new_tokens <= length

    try:
        lengths(length)
    except ConfigError as error:
        enough = int(re.search(r"It fits from benchmark\.length=(\d+) on\.", str(error))[1])
        assert enough > length and f"task {task} does not fit in length={length}" in str(error)
        lengths(enough)
        with pytest.raises(ConfigError, match=f"length={enough} on"):
            lengths(enough - 1)


@pytest.mark.parametrize("count", TOKENIZERS)
@pytest.mark.parametrize("task", OFFLINE)
def test_samples_are_as_long_as_can_be(task, count):
    ruler = Ruler(tasks=[task], length=4000, num_samples=2)
    for index, sample in enumerate(ruler.samples(count, seed=3)):
        room = 4000 - sample.max_new_tokens
        assert sample.meta["prompt_tokens"] >= 0.97 * room
        if task not in ("fwe", "cwe"):  # a unit of these may cost nothing
            one_more = _counter(TASKS[task], ruler._request(task, index, 3, 4000), count)
            assert one_more(sample.meta["units"] + 1) > room


@pytest.mark.parametrize("length", [2048, 4096, 131072])
@pytest.mark.parametrize("task", OFFLINE)
def test_sizing_takes_few_tokenizations(task, length):
    calls = []

    def count(prompt, prefix):
        calls.append(len(prompt))
        return by_characters(prompt, prefix)

    (sample,) = make(count, tasks=[task], length=length, num_samples=1)
    assert len(calls) <= MAX_COUNTS == 12
    assert sum(calls) <= 9 * len(sample.prompt)
    assert sample.meta["prompt_tokens"] >= 0.97 * (length - sample.max_new_tokens)


def test_a_sample_depends_on_seed_task_and_index_only():
    some = make(tasks=OFFLINE, length=1500, num_samples=2, seed=7)
    again = make(tasks=OFFLINE[::-1], length=1500, num_samples=3, seed=7)
    assert {s.id: s for s in some}.items() <= {s.id: s for s in again}.items()
    assert len({s.id for s in again}) == len({s.prompt for s in again}) == 18
    other = make(tasks=OFFLINE, length=1500, num_samples=2, seed=8)
    assert all(a.prompt != b.prompt for a, b in zip(some, other, strict=True))


def test_texts_are_the_same_in_every_version():
    """Resuming and comparing runs relies on it: a change here must be meant."""
    made = make(tasks=["niah_single_1", "vt", "fwe"], length=600, num_samples=1)
    assert [s.id for s in made] == ["niah_single_1-600-0000", "vt-600-0000", "fwe-600-0000"]
    assert [s.answers for s in made] == [
        ("4444852",),
        ("YWCHB", "JMKFV", "ARAUZ", "FEEUR", "MLYNB"),
        ("cubmag", "hbtxwh", "mwvint"),
    ]
    assert made[0].answer_prefix == "The secret number of rare-plaza is"


def test_an_impossible_tokenizer_is_refused_at_once():
    calls = []

    def count(prompt, prefix):
        calls.append(prompt)
        return 10**6

    with pytest.raises(ConfigError, match=r"task vt does not fit in length=2048 tokens, 30 of them"):
        make(count, tasks=["vt"])
    assert len(calls) <= 10


def test_the_length_that_is_named_fits_where_the_question_changes_with_length():
    """From 4096 tokens on, cwe repeats its words more often, so it needs more room than below."""

    def heavy(prompt, prefix):
        return 20 * len((prompt + prefix).split())

    with pytest.raises(ConfigError, match="length=4000") as error:
        make(heavy, tasks=["cwe"], length=4000)
    enough = int(re.search(r"It fits from benchmark\.length=(\d+) on\.", str(error.value))[1])
    assert len(make(heavy, tasks=["cwe"], length=enough)) == 3
    with pytest.raises(ConfigError, match=f"It fits from benchmark.length={enough} on"):
        make(heavy, tasks=["cwe"], length=enough - 1)


def test_no_named_length_is_called_the_least_where_a_shorter_one_fits_too():
    """Just below 4096 tokens cwe asks for less: that fits, and 4096 does not."""

    def heavy(prompt, prefix):
        return 11 * len((prompt + prefix).split())

    assert make(heavy, tasks=["cwe"], length=4095)
    with pytest.raises(ConfigError) as error:
        make(heavy, tasks=["cwe"], length=4096)
    assert "least" not in str(error.value) and ">=" not in str(error.value)


def test_scores():
    ruler = Ruler()
    sample = make(tasks=["vt"], length=700, num_samples=1)[0]
    names = " ".join(sample.answers)
    assert ruler.score(sample, ruler.postprocess(names.lower())) == 1.0
    assert ruler.score(sample, names[:11]) == pytest.approx(2 / 5)
    assert ruler.score(sample, "") == 0.0
    assert ruler.postprocess("\t a\tb ") == "a\nb"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": "vt"}, r"tasks must be a list of names, got 'vt'\. Write benchmark\.tasks=\["),
        ({"tasks": []}, "tasks must be a list of names"),
        ({"tasks": ["niah_sngle_1"]}, r"unknown task 'niah_sngle_1'\. Did you mean niah_single_1"),
        ({"tasks": [["vt"]]}, "unknown task"),
        ({"tasks": ["vt", "vt"]}, "a task comes up twice"),
        ({"num_samples": 0}, "num_samples must be a whole number >= 1, got 0"),
        ({"length": "2k"}, "length must be a whole number >= 1, got '2k'"),
        ({"length": 128}, "length=128 leaves no room for a prompt, niah_single_1 generates 128"),
        ({"haystack": "essays.txt"}, "would be used by none of the tasks"),
    ],
)
def test_wrong_values_are_refused_before_any_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        Ruler(**fields).check()


def test_prose(tmp_path):
    essay = tmp_path / "essay.txt"
    essay.write_text("Owls sleep  by day. Do they\ndream? Nobody knows!\n")
    made = make(tasks=["niah_multivalue"], haystack=str(essay), length=900, num_samples=1)
    assert made[0].prompt.count("Do they dream?") > 10 and len(made[0].answers) == 4
    with pytest.raises(MissingInput, match=r"haystack is not set\. Pass benchmark\.haystack="):
        Ruler(tasks=["niah_single_2"]).check()
    essay.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no text"):
        Ruler(tasks=["niah_single_2"], haystack=str(essay)).check()


def test_running_out_of_text_is_said(monkeypatch, caplog):
    monkeypatch.setattr("prr_pipeline.benchmarks.words.MAX_COMPOUNDS", 30)
    (sample,) = make(tasks=["niah_multikey_2"], length=4000, num_samples=1)
    assert sample.meta["units"] == 29
    assert "niah_multikey_2 has text for" in caplog.text
