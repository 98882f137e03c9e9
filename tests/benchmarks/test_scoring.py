# SPDX-License-Identifier: Apache-2.0
"""Golden scores: each case was worked out by hand from the rules of RULER's evaluation."""

import pytest

from prr_pipeline.benchmarks.scoring import postprocess, string_match_all, string_match_part


@pytest.mark.parametrize(
    ("prediction", "answers", "every", "part"),
    [
        ("The number is 1234567.", ["1234567"], 1.0, 1.0),
        ("The number is 123 4567.", ["1234567"], 0.0, 0.0),
        ("", ["1234567"], 0.0, 0.0),
        ("ABCDE and fghij", ["abcde", "FGHIJ"], 1.0, 1.0),  # case does not matter
        ("a, b", ["a", "b", "x", "y"], 0.5, 1.0),
        ("x only", ["p", "q", "x"], 1 / 3, 1.0),
        ("12345678", ["1234567"], 1.0, 1.0),  # substrings count, as in RULER
        ("none of it", ["1", "2"], 0.0, 0.0),
        ("twice 7 and 7", ["7", "8"], 0.5, 1.0),  # a reference counts once
    ],
)
def test_golden_scores(prediction, answers, every, part):
    assert string_match_all(prediction, answers) == pytest.approx(every)
    assert string_match_part(prediction, answers) == part


@pytest.mark.parametrize("metric", [string_match_all, string_match_part])
@pytest.mark.parametrize("answers", [[], [""], ["a", ""], "abc"])
def test_answers_that_would_score_anything_are_refused(metric, answers):
    with pytest.raises(ValueError, match="sequence of non-empty strings"):
        metric("abc", answers)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("  42 \n", "42"),
        ("a\tb", "a\nb"),  # a newline, not nothing: words stay apart
        ("a\x00\x1fb", "a\n\nb"),
        ("\x07 42", "42"),
        ("\n\t ", ""),
        ("", ""),
        ("caf\u00e9\x7f", "caf\u00e9\x7f"),  # above 0x1f nothing is touched
    ],
)
def test_postprocess(raw, clean):
    assert postprocess(raw) == clean
