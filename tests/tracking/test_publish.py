# SPDX-License-Identifier: Apache-2.0
"""Published rows: floors, the share that was hidden, and the table made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import finished, seal

from cutlass_kernels import bench
from prr_pipeline.tracking import publish
from prr_pipeline.tracking.report import load_job

HEAD = {"gpu": "g", "driver": "d", "torch": "t", "cutlass": "c", "commit": "0123456789abcdef", "date": "2026-01-01"}


def job(folder: Path, ceiling: float = 4.0, **times: float) -> Path:
    """A job whose modes took so many ms, as its stages leave it."""
    config = {"experiment": "speed", "benchmark": {"length": 131072}, "budget": {"name": "profiled"}}
    modes = {"serial": None, "dense": None, **times}
    rows, samples = [], []
    for mode, ms in modes.items():
        prr = mode == "prr"
        row = dict.fromkeys(("score", "hit_rate_dynamic", "overlap_last", "missed_per_step", "wasted_per_step"))
        row |= {"model": "glm4", "weights": "random", "device": "g", "dsa": "quest", "benchmark": "locality"}
        row |= {"queries": "synthetic", "task": "locality", "mode": mode, "repair": "exact" if prr else None}
        row |= {"delta": 1.5 if prr else None, "n": 1, "ms_per_token": ms, "budget_tokens": 4096, "size": "true"}
        rows.append(row | {"tokens_equal_serial": 1.0, "hit_rate_dynamic": 0.9 if prr else None})
        sample = {"task": "locality", "mode": mode, "prompt_tokens": 130942, "read_bytes": 20e9, "sparse_layers": 38}
        samples.append(sample | {"id": "s"})
    profile = {
        "ceiling_tbs": ceiling,
        "rows": [
            {"context": c, "delta": d, "select_us": us, "attend_us": us / 2 * d, "repair_us": 5.0}
            for c, us in ((65536, 8.0), (131072, 10.0))
            for d in (1.0, 1.5)
        ],
        "breakdown": [{"context": c, "select_us": us, "attend_us": 6.0} for c, us in ((65536, 8.0), (131072, 10.0))],
    }
    files = {"profile/profile.json": profile, "evaluate/results.json": {"rows": rows}}
    return finished(folder, config, files | {"decode/samples.jsonl": samples})


def by_mode(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["mode"]: row for row in rows}


def test_rows_have_their_floor_and_what_was_hidden(tmp_path: Path) -> None:
    rows = by_mode(publish.measured([load_job(job(tmp_path / "a", serial=7.0, prr=6.8, dense=9.0))])["rows"])
    assert rows["serial"]["floor_ms"] == 5.0, "20 GB at 4 TB/s"
    prr = rows["prr"]
    assert (prr["context"], prr["select_us"], prr["attend_us"], prr["repair_us"]) == (131072, 10.0, 7.5, 5.0)
    assert prr["hidden"] == pytest.approx(0.2 / (38 * 7.5e-3), abs=1e-4)
    assert rows["serial"]["hidden"] is None and rows["serial"]["attend_us"] == 6.0


def test_a_delta_that_was_not_profiled_hides_an_unknown_share(tmp_path: Path) -> None:
    """The mean over samples of 1 and 1.5, say."""
    folder = job(tmp_path / "a", serial=7.0, prr=6.8)
    results = folder / "evaluate" / "results.json"
    results.write_text(results.read_text().replace('"delta": 1.5', '"delta": 1.25'))
    prr = by_mode(publish.measured([load_job(seal(folder))])["rows"])["prr"]
    assert [prr[key] for key in ("select_us", "attend_us", "repair_us", "hidden")] == [None] * 4


def test_jobs_that_differ_in_their_configuration_alone_are_two(tmp_path: Path) -> None:
    rows = [
        publish.measured([load_job(job(tmp_path / name, serial=ms))])["rows"] for name, ms in (("a", 7.0), ("b", 8.0))
    ]
    old, new = ({**HEAD, "ceiling_tbs": 4.0, "rows": some} for some in rows)
    both = publish.joined(new, old)
    assert [r["ms_per_token"] for r in both["rows"] if r["mode"] == "serial"] == [8.0, 7.0]
    assert "| 7.00 |" in publish.table(both) and "| 8.00 |" in publish.table(both)


def test_the_floor_is_at_the_best_bandwidth_of_the_jobs(tmp_path: Path) -> None:
    jobs = [load_job(job(tmp_path / name, tbs, serial=7.0)) for name, tbs in (("a", 3.5), ("b", 4.0))]
    assert {row["floor_ms"] for row in publish.measured(jobs)["rows"]} == {5.0}


def test_a_job_that_is_not_finished_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    done, other = job(tmp_path / "a", serial=7.0), job(tmp_path / "b", serial=7.0)
    (other / "evaluate" / "manifest.json").unlink()
    assert publish.main([str(other), str(done), "--out", str(tmp_path / "x.json")]) == 0
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 2
    assert capsys.readouterr().err.startswith(f"publish: left out: {other}: no evaluate/manifest.json")


def test_a_job_whose_records_are_others_now_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    done, other = job(tmp_path / "a", serial=7.0), job(tmp_path / "b", serial=7.0)
    (other / "decode" / "samples.jsonl").write_text("")
    assert publish.main([str(other), str(done), "--out", str(tmp_path / "x.json")]) == 0
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 2
    assert f"left out: {other}: {other}/decode/samples.jsonl changed since decode wrote it; " in capsys.readouterr().err


def test_a_profile_that_is_not_what_its_stage_wrote_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One that was made after evaluate, which does not know it."""
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    done = job(tmp_path / "a", serial=7.0)
    (done / "profile").rename(tmp_path / "kept")
    seal(done)
    (tmp_path / "kept").rename(done / "profile")
    assert publish.main([str(done), "--out", str(tmp_path / "x.json")]) == 0
    capsys.readouterr()
    (done / "profile" / "profile.json").write_text("{")
    assert publish.main([str(done), "--out", str(tmp_path / "x.json")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"publish: {done}/profile/profile.json changed since profile wrote it; redo it with force=")


def test_a_file_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    out, readme = tmp_path / "h200" / "decode.json", tmp_path / "README.md"
    readme.write_text("a\n" + "\n".join(publish.MARKERS) + "\nz\n")
    made = job(tmp_path / "a", serial=7.0, prr=6.8, dense=9.0)
    assert publish.main([str(made), "--out", str(out), "--document", str(readme)]) == 0
    assert capsys.readouterr().out == f"3 rows in {out}\n"
    assert json.loads(out.read_text())["name"] == "decode"
    line = next(x for x in readme.read_text().splitlines() if "glm4" in x)
    assert line == (
        "| glm4 (random weights) x quest | 128K | 4096 | - | - | 9.00 | 7.00 | - | - | 6.80 "
        "| 5.00 | 1.50 | 90.0 | 0.70 |"
    )
    again = readme.read_text()
    assert publish.main(["--out", str(out), "--document", str(readme)]) == 0 and readme.read_text() == again


def test_jobs_of_another_commit_can_stay_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With their floor at the bandwidth of the new jobs, which are 20 GB at 5 TB/s."""
    head: dict[str, Any] = dict(HEAD)
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **head, "rows": rows})
    out, first, other = tmp_path / "x.json", job(tmp_path / "a", serial=7.0), job(tmp_path / "b", serial=8.0)
    results = other / "evaluate" / "results.json"
    results.write_text(results.read_text().replace("glm4", "glm5"))
    seal(other)
    assert publish.main([str(first), str(other), "--out", str(out)]) == 0
    assert "2026-01-01: ms a token, floor at 4.0 TB/s\n" in publish.table(json.loads(out.read_text()))
    again = job(tmp_path / "c" / "a", 5.0, serial=6.0)
    assert publish.main([str(again), "--keep", "--out", str(out)]) == 0
    assert "2026-01-01: ms a token, floor at 5.0 TB/s\n" in publish.table(json.loads(out.read_text())), "of one commit"
    head["commit"] = "fedcba9876543210"
    assert publish.main([str(again), "--keep", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["commit"] == head["commit"] and len(data["rows"]) == 4
    found = {(r["model"], r["mode"]): (r["ms_per_token"], r["floor_ms"], r.get("commit")) for r in data["rows"]}
    assert found["glm4", "serial"] == (6.0, 4.0, None) and found["glm5", "serial"] == (8.0, 4.0, HEAD["commit"])
    line = (
        "commit fedcba987654, 2026-01-01: ms a token, floor at 5.0 TB/s; of commit 0123456789ab: glm5 x quest at 128K\n"
    )
    assert line in publish.table(data)
    for row in data["rows"]:
        del row["read_bytes"]
    out.write_text(json.dumps(data))
    assert publish.main([str(again), "--keep", "--out", str(out)]) == 0
    assert [r["floor_ms"] for r in json.loads(out.read_text())["rows"]] == [4.0, 4.0, None, None], "what is not known"
    assert publish.main([str(again), "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["rows"]) == 2
    head["gpu"] = "other"
    before = out.read_text()
    assert publish.main([str(again), "--keep", "--out", str(out)]) == 1 and out.read_text() == before
    assert capsys.readouterr().err == "publish: --keep: what is there was measured on g, this on other\n"


@pytest.mark.parametrize(
    "found", ["", "[]", "null", '{"rows": null}', '{"rows": [1]}', '{"gpu": "g", "rows": []}', None]
)
def test_what_cannot_be_kept_is_said_and_left_as_it_is(
    found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    out = tmp_path / "x.json"
    if found is not None:
        out.write_text(found)
    made = job(tmp_path / "a", serial=7.0)
    assert publish.main([str(made), "--keep", "--out", str(out)]) == 1
    assert out.exists() == (found is not None) and (found is None or out.read_text() == found)
    said = capsys.readouterr().err
    assert said.startswith(f"publish: {out}: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "No such file or directory"),
        ("", "no JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[]", "not of this program: expected gpu, commit, date, and rows with dsa, job, mode at least"),
        ({**HEAD, "rows": [{"dsa": "quest"}]}, "not of this program: expected gpu, commit, date, and rows with dsa,"),
        ({**HEAD, "rows": [{"dsa": "q", "mode": "prr", "job": "a"}]}, "not of this program: it has no 'model'"),
    ],
)
def test_a_file_that_cannot_be_shown_is_named_and_the_document_left_as_it_is(
    found: Any, said: str, tmp_path: Path, capsys: Any
) -> None:
    out, document = tmp_path / "x.json", tmp_path / "D.md"
    document.write_text("\n".join(publish.MARKERS))
    if found is not None:
        out.write_text(found if isinstance(found, str) else json.dumps(found))
    assert publish.main(["--out", str(out), "--document", str(document)]) == 1
    assert capsys.readouterr().err.startswith(f"publish: {out}: {said}")
    assert document.read_text() == "\n".join(publish.MARKERS)


def test_a_document_without_markers_is_named(tmp_path: Path, capsys: Any) -> None:
    out, document = tmp_path / "x.json", tmp_path / "D.md"
    out.write_text(json.dumps({**HEAD, "rows": []}))
    document.write_text("text")
    assert publish.main(["--out", str(out), "--document", str(document)]) == 1
    assert capsys.readouterr().err.startswith(f"publish: {document}: expected the lines ")


def test_a_job_whose_records_lack_what_is_published_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Those of an older version, say: they are what its stages wrote."""
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    old = job(tmp_path / "a", serial=7.0)
    records = old / "decode" / "samples.jsonl"
    records.write_text(records.read_text().replace("read_bytes", "bytes"))
    seal(old)
    assert publish.main([str(old), "--out", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == (
        f"publish: {old}: its records lack what is published (KeyError: 'read_bytes'); redo it with force=true "
        "stages=[calibrate,profile,decode,evaluate]\n"
    )


def test_without_a_gpu_one_line_says_where_to_run_it_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(publish, "measured", lambda _: pytest.fail("a job was read"))
    out = tmp_path / "x.json"
    assert publish.main([str(tmp_path), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("publish: no CUDA device, and the file names the GPU") and said.count("\n") == 1
    assert "run it on the machine of the jobs (--document alone, without jobs, needs no GPU)" in said
    assert not out.exists()


def test_what_cannot_be_published_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bench, "envelope", lambda rows, commit, name, program: {"name": name, **HEAD, "rows": rows})
    assert publish.main([str(tmp_path), "--out", str(tmp_path / "x.json")]) == 1
    assert "publish: " in capsys.readouterr().err and not (tmp_path / "x.json").exists()
