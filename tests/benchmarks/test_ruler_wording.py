# SPDX-License-Identifier: Apache-2.0
"""Official wording: read from files of RULER's form, never executed, refused if it does not fit."""

import pytest

from prr_pipeline.benchmarks.ruler import Ruler
from prr_pipeline.benchmarks.ruler_wording import official
from prr_pipeline.errors import ConfigError, MissingInput

CONSTANTS = '''
"""Notes, and code that must not run."""
raise SystemExit("executed")

TASKS = {
    'niah': {
        'tokens_to_generate': 12,
        'template': """Some {type_needle_v} are near:\\n{context}
What are all {type_needle_v} for {query}?""",
        'answer_prefix': """ For {query} they are"""
    },
    'variable_tracking': {
        'tokens_to_generate': 3,
        'template': """Track.\\n{context}\\nWhich hold {query}?""",
        'answer_prefix': """ {num_v} hold {query}: """
    },
    'common_words_extraction': {
        'tokens_to_generate': 4,
        'template': "Count.\\n{context}\\nTop 10?",
        'answer_prefix': " Top:"
    },
    'freq_words_extraction' : {
        'tokens_to_generate': 5, 'template': "Decode {context}\\nTop 3?", 'answer_prefix': " Top:"
    },
    'qa': {'tokens_to_generate': 6, 'template': "{context} {query}", 'answer_prefix': ""},
}
'''
NIAH = """
import random
needle = "One {type_needle_v} for {key}: {value}."
if random.random() < 2:
    haystack = open("essay").read()
elif True:
    haystack = "Moss is soft."
else:
    haystack = needle
"""


@pytest.fixture
def write(tmp_path):
    def write(constants=CONSTANTS, niah=NIAH):
        (tmp_path / "constants.py").write_text(constants)
        if niah is not None:
            (tmp_path / "niah.py").write_text(niah)
        return tmp_path / "constants.py"

    return write


def test_files_of_rulers_form_are_read(write):
    wording = official(write())
    assert wording.noise == "Moss is soft."
    assert wording.needle == "One {type_needle_v} for {key}: {value}."
    assert {n: f.tokens_to_generate for n, f in wording.families.items()} == {
        "niah": 12,
        "variable_tracking": 3,
        "common_words_extraction": 4,
        "freq_words_extraction": 5,
    }
    assert wording.families["freq_words_extraction"].template == "Decode {context}\nTop 3?"


def test_the_benchmark_uses_it(write):
    ruler = Ruler(
        tasks=["niah_single_1", "vt", "cwe", "fwe"],
        templates=str(write()),
        length=400,
        num_samples=1,
    )
    ruler.check()
    count = lambda prompt, prefix: len((prompt + prefix).split())  # noqa: E731
    niah, vt, cwe, fwe = ruler.samples(count, seed=0)
    assert [s.max_new_tokens for s in (niah, vt, cwe, fwe)] == [12, 3, 4, 5]
    key = niah.answer_prefix.split()[1]
    assert niah.answer_prefix == f" For {key} they is"  # RULER's own rule, as crude as it is
    assert f"One numbers for {key}: {niah.answers[0]}.\n" in niah.prompt
    assert niah.prompt.startswith("A number is near:\nMoss") and "What is number" in niah.prompt
    assert vt.prompt.startswith("Track.\n") and vt.prompt.count("Track.") == 2
    assert vt.answer_prefix.startswith(" 5 hold ")
    assert "Top: " in cwe.prompt and fwe.prompt.endswith("\nTop 3?")


def test_missing_files(write, tmp_path):
    with pytest.raises(MissingInput, match=r"no file at .*other\.py\. Official wording is read"):
        official(tmp_path / "other.py")
    with pytest.raises(MissingInput, match=r"no file at .*niah\.py"):
        official(write(niah=None))
    with pytest.raises(MissingInput, match=r"benchmark.templates=<RULER>/scripts/data/synthetic"):
        Ruler(templates=str(tmp_path / "other.py")).check()


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ("TASKS = {", "is not a Python file"),
        ("TASK = {}", "assigns no literal dict to TASKS"),
        ("TASKS = dict(niah=1)", "assigns no literal dict to TASKS"),
        ("TASKS = ['niah']", "assigns no literal dict to TASKS"),
        ("TASKS = {}", r"TASKS\['niah'\] must be a dictionary with template"),
        (CONSTANTS.replace("12", "0"), "tokens_to_generate must be at least 1"),
        (CONSTANTS.replace("12", "'x'"), r"TASKS\['niah'\] must be a dictionary"),
        (CONSTANTS.replace("Decode {context}", "Decode"), r"must use \['context'\], got \[\]"),
        (CONSTANTS.replace("Decode", "{x}"), r"got \['context', 'x'\]"),
        (CONSTANTS.replace("Decode", "{context.y}"), r"got \['context', 'context.y'\]"),
        (CONSTANTS.replace("Decode", "{"), "is no template"),
        (CONSTANTS.replace(" Top:", "{context}"), "answer_prefix may use"),
    ],
)
def test_other_forms_are_refused(write, constants, message):
    with pytest.raises(ConfigError, match=message):
        official(write(constants))


def test_a_needle_without_its_value_is_refused(write):
    with pytest.raises(ConfigError, match=r"must use \['key', 'value'\], got \['key'\]"):
        official(write(niah=NIAH.replace("{type_needle_v} for {key}: {value}", "{key}")))
