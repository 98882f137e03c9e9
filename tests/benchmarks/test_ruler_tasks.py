# SPDX-License-Identifier: Apache-2.0
"""Each RULER task asks what it says: the answers are read back out of the prompt by other means."""

import re
from collections import Counter

import pytest

from prr_pipeline.benchmarks.ruler_tasks import TASKS, Request
from prr_pipeline.benchmarks.ruler_wording import OURS

PROSE = tuple(f"Sentence {i} says little." for i in range(9))
KINDS = {
    "numbers": r"\d{7}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}",
}


def request(seed="s", length=8192):
    return Request(seed, length, OURS, PROSE)


# name: (haystack, key, value, keys, values of a key, keys asked for, tokens to generate)
NIAH = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1, 128),
    "niah_single_2": ("prose", "words", "numbers", 1, 1, 1, 128),
    "niah_single_3": ("prose", "words", "uuids", 1, 1, 1, 128),
    "niah_multikey_1": ("prose", "words", "numbers", 4, 1, 1, 128),
    "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1, 128),
    "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1, 128),
    "niah_multivalue": ("prose", "words", "numbers", 1, 4, 1, 128),
    "niah_multiquery": ("prose", "words", "numbers", 4, 1, 4, 128),
}
OTHERS = {
    "vt": ("variable_tracking", 30),
    "cwe": ("common_words_extraction", 120),
    "fwe": ("freq_words_extraction", 50),
}


def test_the_table_is_rulers():
    assert set(TASKS) == set(NIAH) | set(OTHERS)
    for name, row in NIAH.items():
        t = TASKS[name]
        shape = (t.haystack, t.key, t.value, t.num_keys, t.num_values, t.num_queries)
        assert (*shape, OURS.families[t.family].tokens_to_generate) == row
    for name, (family, tokens) in OTHERS.items():
        assert TASKS[name].family == family
        assert OURS.families[family].tokens_to_generate == tokens
    assert TASKS["vt"].num_hops == 4
    assert (TASKS["cwe"].num_common, TASKS["cwe"].common, TASKS["cwe"].uncommon) == (10, 30, 3)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("units", [80, 301])
def test_drafts_depend_on_the_request_alone(name, units):
    draft = TASKS[name].build(request("a"), units)
    assert draft == TASKS[name].build(request("a"), units)
    other = TASKS[name].build(request("b"), units)
    assert draft.prompt != other.prompt and draft.answers != other.answers


@pytest.mark.parametrize("name", TASKS)
def test_more_units_are_more_text_with_the_same_answers(name):
    task = TASKS[name]
    few, many = task.build(request(), 90), task.build(request(), 200)
    assert few.answers == many.answers and few.answer_prefix == many.answer_prefix
    assert len(few.prompt) < len(many.prompt)


@pytest.mark.parametrize("units", [1, 2, 50])
@pytest.mark.parametrize("name", NIAH)
def test_niah_needles_are_in_the_haystack_once(name, units):
    task = TASKS[name]
    draft = task.build(request(), units)
    found = re.findall(r"The secret (?:number|uuid) of (\S+) is (\S+)\.", draft.prompt)
    extra = units if task.haystack == "needles" else 0
    assert len(found) == task.num_keys * task.num_values + extra
    assert len({key for key, _ in found}) == task.num_keys + extra
    assert len({value for _, value in found}) == len(found)
    assert all(re.fullmatch(KINDS[task.value], value) for _, value in found)
    asked = draft.prompt.split("\n\n")[-1]
    assert {v for k, v in found if k in asked} == set(draft.answers)
    assert all(key in draft.answer_prefix for key, value in found if value in draft.answers)
    assert not any(answer in asked + draft.answer_prefix for answer in draft.answers)


def test_niah_asks_in_the_singular_for_one_value_and_leaves_the_prose_alone():
    sentences = ("Some are all answers.",)
    one = TASKS["niah_single_2"].build(Request("s", 1, OURS, sentences), 3)
    four = TASKS["niah_multivalue"].build(Request("s", 1, OURS, sentences), 3)
    assert "A secret number is hidden" in one.prompt and "What is the secret number" in one.prompt
    assert one.answer_prefix.endswith(" is")
    assert "Some secret numbers are hidden" in four.prompt
    assert four.answer_prefix.endswith(" are")
    assert one.prompt.count("Some are all answers.") == 3


def test_niah_depth_is_where_the_needle_is():
    depths = []
    for seed in range(40):
        draft = TASKS["niah_single_1"].build(request(str(seed)), 200)
        lines = draft.prompt.split("\n\n")[1].split("\n")
        place = next(i for i, line in enumerate(lines) if draft.answers[0] in line)
        assert place / 200 == pytest.approx(draft.meta["depth"][0], abs=0.01)
        depths.append(draft.meta["depth"][0])
    assert min(depths) < 0.2 and max(depths) > 0.8


@pytest.mark.parametrize("units", [1, 3, 60])
def test_vt_answers_are_the_chain(units):
    draft = TASKS["vt"].build(request(), units)
    example, question = draft.prompt.split("Read the text below.")[1:]
    value = re.search(r"Which names have the value (\d+)\?", question)[1]
    assert value in draft.answer_prefix and value not in example
    chain, links = [value], re.findall(r"Let (\w+) = (\w+)\.", question)
    for name, source in links:  # in the order of the text, each link follows from the one before
        assert source == chain[-1]
        chain.append(name)
    assert tuple(chain[1:]) == draft.answers and len(set(draft.answers)) == 5
    solved = re.findall(r"Let (\w+) = ", example)
    assert example.split("\n\n")[-2].endswith(" ".join(solved)) and len(solved) == 5
    assert question.count(OURS.noise) == units


@pytest.mark.parametrize(
    ("length", "units", "counts"), [(2048, 60, (6, 1)), (4096, 60, (30, 3)), (65536, 900, (30, 3))]
)
def test_cwe_answers_are_the_ten_commonest(length, units, counts):
    draft = TASKS["cwe"].build(request(length=length), units)
    example, question = draft.prompt.split("Here is a list of words.")[1:]
    seen = Counter(re.findall(r"\d+\. (\S+)", question))
    assert len(seen) == units and set(seen.values()) == set(counts)
    assert {word for word, n in seen.items() if n == counts[0]} == set(draft.answers)
    assert len(draft.answers) == 10
    assert not any(answer in word for answer in draft.answers for word in set(seen) - {answer})
    assert question.count(f" {units}. ") == 1  # numbered on to the end
    shown = Counter(re.findall(r"\d+\. (\S+)", example))
    solved = example.split("come up most often are: ")[1].split()
    assert set(solved) == {word for word, _ in shown.most_common(10)} and not set(shown) & set(seen)


@pytest.mark.parametrize("units", [None, 75, 100, 1000, 54321])
def test_fwe_answers_are_ranks_2_to_4(units):
    task = TASKS["fwe"]
    draft = task.build(request(), units or task.smallest(request()))
    seen = Counter(draft.prompt.split("\n\n")[1].split(" ")).most_common()
    assert seen[0][0] == "..."
    assert tuple(word for word, _ in seen[1:4]) == draft.answers
    assert [n for _, n in seen[:4]] > [n for _, n in seen[1:5]]
    assert len({n for _, n in seen[:5]}) == 5  # no ties: one set of answers only
    assert draft.meta["counts"] == [n for _, n in seen[1:4]]
    if units == 1000:  # 1000 / (k^2 * 1.644934), rounded down
        assert [n for _, n in seen[:5]] == [607, 151, 67, 37, 24]


def test_fwe_stays_unambiguous_from_the_smallest_size_on():
    task = TASKS["fwe"]
    for units in range(task.smallest(request()), 400):
        counts = task._counts(units)
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]
