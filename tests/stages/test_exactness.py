# SPDX-License-Identifier: Apache-2.0
"""Exact repair that is not exact fails the job, and layers that select late are recorded as such."""

from pathlib import Path
from typing import Any

import pytest
from jobs import Runner, results, samples, status

from prr_pipeline.artifacts import Records
from prr_pipeline.errors import ArtifactError
from prr_pipeline.prr.engine import Engine
from prr_pipeline.stages import decode

Words = tuple[str, ...]
MODES = "runtime.modes=[reuse,reuse_repair,prr]"


def break_mode(monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    own = decode._record

    def wrong(job: Any, prompt: Any, start: Any, mode: Any, trace: Any, *rest: Any) -> Any:
        if mode.name == name and what == "logits":
            trace.digests[-1] ^= 1
        if mode.name == name and what == "tokens":
            trace.tokens[-1] += 1
        return own(job, prompt, start, mode, trace, *rest)

    monkeypatch.setattr(decode, "_record", wrong)


@pytest.mark.parametrize("what", ["tokens", "logits"])
@pytest.mark.parametrize("mode", ["reuse", "reuse_repair", "prr"])
def test_exact_repair_that_differs_from_serial_fails_the_job(
    run: Runner, short: Words, no_plots: None, monkeypatch: pytest.MonkeyPatch, mode: str, what: str
) -> None:
    words = (*short, "benchmark.num_samples=1", MODES, "stages=[calibrate,decode,evaluate]")
    break_mode(monkeypatch, mode, what)
    text = run.refused(*words)
    root = run.root(*words)
    assert text == (
        f"exact repair differs from serial in text-420-0000/{mode} ({what}). This is a bug of this software, not of "
        f"the job: please report it, with {root}/decode/samples.jsonl and the job's config.json. What was written "
        "stays, to be looked at; the stage is not done"
    )
    assert len(samples(root)) == 4 and results(root), "what there is to look at"
    assert not (root / "evaluate" / "manifest.json").exists()
    assert (status(root)["stage"], status(root)["state"]) == ("evaluate", "failed")
    assert run.refused(*words) == text, "it does not go away"


def test_without_evaluate_decode_itself_fails(run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    break_mode(monkeypatch, "prr", "logits")
    text = run.refused(*short)
    root = run.root(*short)
    assert text.startswith("exact repair differs from serial in text-420-0000/prr (logits), text-420-0001/prr (logits)")
    assert len(samples(root)) == 8 and not (root / "decode" / "manifest.json").exists()


def test_union_repair_may_differ(run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    break_mode(monkeypatch, "prr", "logits")
    run(*short, "benchmark.num_samples=1", "runtime.repair=union")


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    row = {"mode": "prr", "repair": "exact", "tokens_equal_serial": False, "logits_equal_serial": False}
    records = Records(tmp_path / "samples.jsonl")
    records.append([row | {"id": f"s{i}"} for i in range(11)])
    with pytest.raises(Exception, match=r"s7/prr \(tokens and logits\) and 3 more\. This is a bug"):
        decode.refuse_unequal(records, None)
    with pytest.raises(Exception, match="Either dsa._target_ = my.Own gives other scores for the same query, or this"):
        decode.refuse_unequal(records, "dsa._target_ = my.Own")


def test_a_sample_that_is_there_twice_is_refused(
    run: Runner, short: Words, no_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*short, "benchmark.num_samples=1", "stages=[calibrate,decode,evaluate]")
    own = Records.append
    monkeypatch.setattr(Records, "append", lambda self, rows: own(self, [*rows, rows[-1]]))
    monkeypatch.setattr("prr_pipeline.stages.calibrate.Records.append", Records.append)
    text = run.refused(*words, kind=ArtifactError)
    root = run.root(*words)
    assert text == (
        f"{root}/decode/samples.jsonl has more than one record of text-420-0000/prr; "
        "redo it with force=true stages=[decode]"
    )


def test_layers_that_select_only_while_decoding_use_their_own_theta_and_say_so(
    run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, given = Engine.decoder, []

    def decoder(self: Engine, start: Any, mode: Any, thetas: Any) -> Any:
        given.append((mode.name, thetas))
        return own(self, start, mode, thetas)

    monkeypatch.setattr(Engine, "decoder", decoder)
    words = (*short, "benchmark.num_samples=1", "predictor.late_theta=[0.5,0.6,0.7]", MODES)
    late = run(*words, "dsa.dense_len=418")
    assert [x["layers"] for x in samples(late, "calibrate")] == [[]], "nothing selects at the end of the prompt"
    assert {r["mode"]: r["late_layers"] for r in samples(late)} == {
        "serial": [],
        "reuse": [],
        "reuse_repair": [],
        "prr": [1],
    }
    assert given[-1] == ("prr", {1: (0.5, 0.6, 0.7)})
    early = run(*words)
    assert all(r["late_layers"] == [] for r in samples(early)) and given[-1][1] != {1: (0.5, 0.6, 0.7)}
    fixed = run(*words, "dsa.dense_len=418", "predictor.theta=[0.1,0.2,0.3]")
    assert all(r["late_layers"] == [] for r in samples(fixed)) and given[-1][1] == {1: (0.1, 0.2, 0.3)}
