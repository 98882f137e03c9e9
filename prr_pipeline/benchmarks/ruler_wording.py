# SPDX-License-Identifier: Apache-2.0
"""What RULER's tasks say: our own wording, or the official one read from a checkout of RULER.

Our wording is short and plain, so that a model of 0.1B parameters can answer some of it. A template
moves scores, so scores with it are not comparable with published ones.

The official wording is two files of scripts/data/synthetic in RULER's repository: constants.py
(TASKS: template, answer_prefix and tokens_to_generate of each family) and niah.py beside it (the
needle and the noise). They are parsed, never executed: only literals are read.
"""

import ast
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from prr_pipeline.benchmarks.base import read_text
from prr_pipeline.errors import ConfigError, MissingInput

# What the templates of a family may ask for, and what they must.
_FIELDS = {
    "niah": {"context", "query", "type_needle_v"},
    "variable_tracking": {"context", "query", "num_v"},
    "common_words_extraction": {"context", "query", "num_cw"},
    "freq_words_extraction": {"context", "query"},
}


@dataclass(frozen=True)
class TaskText:
    """How a family of tasks asks: the user's turn, the answer's start, tokens to generate."""

    template: str
    answer_prefix: str
    tokens_to_generate: int


@dataclass(frozen=True)
class Wording:
    """All that tasks say: families by their official name, a needle and a line of noise."""

    families: dict[str, TaskText]
    needle: str
    noise: str


OURS = Wording(
    families={
        "niah": TaskText(
            "Read the text below. Some secret {type_needle_v} are hidden in it.\n\n{context}\n\n"
            "What are all the secret {type_needle_v} of {query} in the text?",
            "The secret {type_needle_v} of {query} are",
            128,
        ),
        "variable_tracking": TaskText(
            "Read the text below. Some names in it get a value, directly or from another name.\n\n"
            "{context}\n\nWhich names have the value {query}?",
            "The {num_v} names that have the value {query} are:",
            30,
        ),
        "common_words_extraction": TaskText(
            "Here is a list of words. Some words come up much more often than others.\n\n"
            "{context}\n\nWhich {num_cw} words come up most often in the list?",
            "The {num_cw} words that come up most often are:",
            120,
        ),
        "freq_words_extraction": TaskText(
            "The text below is written in code words. Count how often each of them comes up, and "
            "leave out the dots.\n\n{context}\n\nWhich three code words come up most often?",
            "The three code words that come up most often are:",
            50,
        ),
    },
    needle="The secret {singular} of {key} is {value}.",
    noise="The lamp gives a warm light. A train leaves at noon. Rain falls on the roof. "
    "We drink our tea. Then we walk on.",
)


def official(constants: Path) -> Wording:
    """Read the official wording from RULER's constants.py and the niah.py beside it.

    Raises:
        MissingInput: one of the files is not there.
        ConfigError: a file is not in the form that RULER's has.
    """
    tasks = _literal(constants, "TASKS", dict)
    families = {name: _task_text(constants, name, tasks.get(name)) for name in _FIELDS}
    niah = constants.with_name("niah.py")
    needle = _literal(niah, "needle", str)
    _check_fields(niah, "needle", needle, {"type_needle_v", "key", "value"}, {"key", "value"})
    return Wording(families, needle, _literal(niah, "haystack", str))


def _literal(path: Path, name: str, kind: type) -> Any:
    """The first literal of a type that a file assigns to a name, at whatever depth."""
    if not path.is_file():
        raise MissingInput(
            f"no file at {path}. Official wording is read from RULER's repository: pass "
            "benchmark.templates=<RULER>/scripts/data/synthetic/constants.py (niah.py beside it)."
        )
    try:
        tree = ast.parse(read_text(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not a Python file: {error}.") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError):
                continue
            if isinstance(value, kind):
                return value
    raise ConfigError(f"{path} assigns no literal {kind.__name__} to {name}, as RULER's file does.")


def _task_text(path: Path, name: str, entry: Any) -> TaskText:
    try:
        text = TaskText(str(entry["template"]), str(entry["answer_prefix"]), int(entry["tokens_to_generate"]))
    except (TypeError, KeyError, ValueError):
        raise ConfigError(
            f"{path}: TASKS[{name!r}] must be a dictionary with template, answer_prefix and "
            f"tokens_to_generate, got {entry!r}."
        ) from None
    if text.tokens_to_generate < 1:
        raise ConfigError(f"{path}: TASKS[{name!r}]: tokens_to_generate must be at least 1.")
    _check_fields(path, f"TASKS[{name!r}] template", text.template, _FIELDS[name], {"context"})
    _check_fields(path, f"TASKS[{name!r}] answer_prefix", text.answer_prefix, _FIELDS[name] - {"context"})
    return text


def _check_fields(path: Path, what: str, template: str, allowed: set[str], needed: Set[str] = frozenset()) -> None:
    try:
        found = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ConfigError(f"{path}: {what} is no template: {error}.") from None
    if not needed <= found <= allowed:
        raise ConfigError(
            f"{path}: {what} may use {sorted(allowed)} and must use {sorted(needed)}, got {sorted(found)}."
        )
