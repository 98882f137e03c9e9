# SPDX-License-Identifier: Apache-2.0
"""Tables of documents come from published files, and still say what those say."""

import json
from pathlib import Path

import pytest

from cutlass_kernels import report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "runs/published/h200/kernels.json"


def row(**more):
    shape = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "block": 64, "context": 131072, "budget": 1024}
    return {"op": "attend", **shape, "us": 3.871, **more}


def data(*rows):
    return {
        "gpu": "G",
        "driver": "1",
        "torch": "2",
        "cutlass": "4",
        "commit": "c" * 40,
        "command": "x",
        "date": "d",
        "rows": rows,
    }


def test_peers_get_columns_only_where_they_ran():
    text = report.table(data(row(floor_us=0.94), row(flashinfer_us=18.8)))
    assert "flashinfer us" in text and "torch us" not in text
    assert "| attend | 32 / 8, 128 | 64 | 128K | 1024 | 3.87 | 0.94 | - |" in text
    assert "| 3.87 | - | 18.80 |" in text


def test_a_linear_layer_is_its_weights():
    text = report.table(data({"op": "linear", "n": 512, "k": 4096, "us": 2.6, "floor_us": 0.94, "torch_us": 7.25}))
    assert "| linear | 512 x 4096 | - | - | - | 2.60 | 0.94 | 7.25 |" in text
    text = report.table(data({"op": "norm_linear", "n": 512, "k": 4096, "us": 3.1}))
    assert "| norm_linear | 512 x 4096 | - | - | - | 3.10 | - |" in text
    text = report.table(data({"op": "add_rms_norm", "k": 4096, "us": 1.5, "torch_us": 4.25}))
    assert "| add_rms_norm | 4096 | - | - | - | 1.50 | - | 4.25 |" in text


def test_rows_of_another_commit_are_named():
    text = report.table(data(row(), row(op="merge", commit="d" * 40), row(op="merge", block=16, commit="d" * 40)))
    assert f"commit {'c' * 12}, d: `x`; of commit {'d' * 12}: merge\n" in text


def test_only_what_is_between_the_markers_changes():
    text = f"a\n{report.BEGIN}\nold\n{report.END}\nb\n"
    new = report.insert(text, "new")
    assert new == f"a\n{report.BEGIN}\n\nnew\n\n{report.END}\nb\n" and report.insert(new, "new") == new


@pytest.mark.parametrize("text", ["", report.BEGIN, report.END + report.BEGIN, (report.BEGIN + report.END) * 2])
def test_missing_or_double_markers_are_refused(text):
    with pytest.raises(ValueError, match="once each"):
        report.insert(text, "new")


FOREIGN = "not of this program: expected gpu, commit, date, and rows with op at least"
FAULTS = {
    None: "No such file or directory",
    "": "no JSON (Expecting value: ",
    "[]": FOREIGN,
    '{"rows": [1]}': FOREIGN,
    json.dumps(data(1)): FOREIGN,
    json.dumps(data({"op": "attend"})): "not of this program: it has no 'budget'",
    json.dumps(data(row(us="fast"))): "not of this program (Unknown format code 'f'",
}


@pytest.mark.parametrize("found", FAULTS)
def test_results_that_are_none_are_named_and_the_document_is_left_as_it_is(found, tmp_path, capsys):
    results, document = tmp_path / "k.json", tmp_path / "D.md"
    document.write_text(f"{report.BEGIN}\n{report.END}\n")
    if found is not None:
        results.write_text(found)
    assert report.main([str(results), str(document)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"report: {results}: {FAULTS[found]}") and said.count("\n") == 1
    assert document.read_text() == f"{report.BEGIN}\n{report.END}\n"


@pytest.mark.parametrize(("text", "said"), [(None, "No such file or directory"), ("text", "expected the lines ")])
def test_a_document_that_cannot_be_written_to_is_named(text, said, tmp_path, capsys):
    document = tmp_path / "D.md"
    if text is not None:
        document.write_text(text)
    assert report.main([str(RESULTS), str(document)]) == 2
    assert capsys.readouterr().err.startswith(f"report: {document}: {said}")


def test_readme_says_what_was_published():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert report.insert(text, report.table(json.loads(RESULTS.read_text(encoding="utf-8")))) == text
