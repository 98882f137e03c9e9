# SPDX-License-Identifier: Apache-2.0
"""The benchmark's command line and its file, without a GPU."""

import json
import subprocess
import sys

import pytest
import torch

from cutlass_kernels import bench, bench_cases


def test_every_op_is_timed_at_the_published_shapes():
    cases = bench_cases.cases()
    assert {c.op for c in cases} == set(bench.OPS)
    assert len(set(cases)) == len(cases)
    table = {(c.block, c.budget) for c in cases if c.op == "serial_attention" and c.kv_heads == 8}
    assert table == {(b, n) for b in (16, 32, 64, 128, 256) for n in (1024, 2048, 4096, 6144, 8192)}


def test_floors_are_bytes_over_bandwidth():
    case = bench_cases.Case("serial_attention", 8, 64, 128 * 1024, 8192)
    assert case.floor_bytes() == 8192 * 8 * 128 * 2 * 2
    assert bench_cases.Case("quest_scores", 2, 16, 512 * 1024).floor_bytes() == 32768 * 2 * 128 * 2 * 2
    assert bench_cases.Case("select", 2, 16, 512 * 1024, 4096).floor_bytes() == 0
    assert bench_cases.Case("linear", n=512, k=4096).floor_bytes() == 512 * 4096 * 2


def test_sets_exceed_the_second_level_cache():
    for case in bench_cases.cases():
        if case.floor_bytes():
            assert bench_cases.set_count(case) * case.floor_bytes() >= bench_cases.COLD


def test_a_row_has_the_published_keys():
    row = bench_cases.Case("repair", 2, 64, 128 * 1024, 4096, missed=4).row()
    keys = ("op", "q_heads", "kv_heads", "head_dim", "block", "context", "budget", "batch", "dtype", "missed")
    assert set(row) == set(keys)
    assert "missed" not in bench_cases.Case("merge", 2, 64, 128 * 1024, 4096).row()
    assert bench_cases.Case("linear", n=512, k=4096).row() == {
        "op": "linear", "n": 512, "k": 4096, "batch": 1, "dtype": "bfloat16"
    }  # fmt: skip
    norm = bench_cases.Case("add_rms_norm", k=4096)
    assert norm.row() == {"op": "add_rms_norm", "k": 4096, "batch": 1, "dtype": "bfloat16"} and not norm.floor_bytes()


def test_list_needs_no_gpu(capsys):
    assert bench.main(["--list", "--ops", "select", "repair"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "op=repair kv_heads=2 block=64" in lines[0] and lines[-1].endswith("peers: torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so(caplog):
    assert bench.main([]) == 2
    assert "no CUDA device" in caplog.text


def test_help_names_ops_and_peers():
    done = subprocess.run([sys.executable, "-m", "cutlass_kernels.bench", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in (*bench.OPS, *bench.PEERS, "--refcheck", "--list", "--out"):
        assert word in " ".join(done.stdout.split())


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--ops", "atend"])
    assert "invalid choice: 'atend'" in capsys.readouterr().err


def test_a_published_command_names_no_folder_and_no_commit():
    said = bench.command(
        "p", ["--ops", "merge", "--out", "/some/where/k.json", "--commit", "abc", "--refcheck", "/a/job"]
    )
    assert said == "python -m p --ops merge --out k.json --refcheck job"
    assert bench.command("p", ["--commit", "abc"]) == bench.command("p", ["--commit=abc"]) == "python -m p"
    assert bench.command("p", ["--out=/some/where/k.json"]) == "python -m p --out k.json"


def test_the_file_is_an_envelope_with_a_row_a_line(tmp_path):
    head = {"name": "kernels", "gpu": "g", "rows": None}
    rows = [{"op": "merge", "us": 2.1}, {"op": "attend", "us": 3.5}]
    path = tmp_path / "h200" / "kernels.json"
    bench.write(path, {**head, "rows": rows})
    assert json.loads(path.read_text()) == {**head, "rows": rows}
    assert len(path.read_text().splitlines()) == 4 and list(path.parent.iterdir()) == [path]


def test_a_run_can_leave_the_rows_of_others_in_the_file():
    select, merge = ({"op": op, "block": 16, "us": 1.0, "torch_us": 2.0} for op in ("select", "merge"))
    before = {
        "commit": "old",
        "command": "bench",
        "rows": [select, {**merge, "commit": "older"}, {**select, "block": 64}],
    }
    new = [{**select, "us": 3.0}, {"op": "attend", "us": 4.0}]
    found = bench.joined({"commit": "new", "command": "bench --keep", "date": "d", "rows": new}, before)
    assert found["commit"] == "new" and found["command"] == "bench; bench --keep"
    assert found["rows"] == [
        {**select, "us": 3.0},
        {**merge, "commit": "older"},
        {**select, "block": 64, "commit": "old"},
        {"op": "attend", "us": 4.0},
    ]
    assert len(new) == 2 and "commit" not in before["rows"][0]


def test_a_file_whose_rows_cannot_be_kept_is_named_before_any_is_measured(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("a case was measured"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "this one")
    out = tmp_path / "k.json"
    call = lambda: bench.main(["--ops", "merge", "--keep", "--out", str(out)])
    assert call() == 2 and f"--keep: {out}: No such file" in caplog.text and not out.exists()
    for text in ("{", "[]"):
        out.write_text(text)
        assert call() == 2 and f"--keep: {out}: " in caplog.text and out.read_text() == text
    out.write_text(json.dumps({"gpu": "another", "commit": "c", "date": "d", "rows": []}))
    assert call() == 2 and "--keep: what is there was measured on another, this on this one" in caplog.text


def test_rows_are_kept_in_a_file(capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--keep"])
    assert "--keep leaves rows in a file: name it with --out" in capsys.readouterr().err


def test_comparisons_fail_when_they_should():
    a = torch.tensor([1.0, 2.0, -float("inf")])
    bench_cases.close(a, a.clone(), 1e-6, "x")
    with pytest.raises(AssertionError, match="x: differs from the reference by"):
        bench_cases.close(a * 1.01, a, 1e-3, "x")
    with pytest.raises(AssertionError, match="x: infinite at other places"):
        bench_cases.close(torch.tensor([1.0, 2.0, 3.0]), a, 1.0, "x")
    with pytest.raises(AssertionError, match="x: differs"):
        bench_cases.close(torch.tensor([1.0, float("nan"), -float("inf")]), a, 1.0, "x")
    with pytest.raises(AssertionError, match="x: 1 of 3 values differ"):
        bench_cases.same(a, torch.tensor([1.0, 2.5, -float("inf")]), "x")


def test_predicted_blocks_miss_as_many_as_asked():
    A = torch.tensor([[[0, 3, 5, 9], [1, 2, 3, 4]]], dtype=torch.int32)
    P = bench_cases._predicted(A, 6, 1, 20, device="cpu")
    assert P.shape == (1, 2, 6)
    for a, p in zip(A[0].tolist(), P[0].tolist(), strict=True):
        assert len(set(a) - set(p)) == 1 and p == sorted(set(p))
    assert bench_cases._against(A, P).counts.tolist() == [[[4, 1], [4, 1]]]
