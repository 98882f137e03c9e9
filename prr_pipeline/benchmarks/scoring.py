# SPDX-License-Identifier: Apache-2.0
"""Scores of one prediction, 0 to 1; a table's number is 100 times their mean over samples.

Rules are those of the benchmarks' own evaluation code, re-implemented (RULER: scripts/eval).
"""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def postprocess(prediction: str) -> str:
    """Strip, turn control characters (tab, newline and the like) into newlines, strip (RULER)."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, whatever their case (RULER's "all").

    Raises:
        ValueError: no answers, or an empty one (which would occur in everything).
    """
    found = _found(prediction, answers)
    return sum(found) / len(found)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any of the answers occurs in the prediction, whatever its case, else 0 (RULER's "part").

    Raises:
        ValueError: no answers, or an empty one (which would occur in everything).
    """
    return float(any(_found(prediction, answers)))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    if isinstance(answers, str) or not answers or not all(answers):
        raise ValueError(f"answers must be a sequence of non-empty strings, got {answers!r}")
    text = prediction.lower()
    return [answer.lower() in text for answer in answers]
