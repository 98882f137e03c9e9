# SPDX-License-Identifier: Apache-2.0
"""The command as a process: exit codes, messages without stacks, help at once, and sweeps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import book, command, environment


def test_help_comes_at_once_and_shows_groups_and_examples(tmp_path: Path) -> None:
    began = time.perf_counter()
    code, said = command(tmp_path, "--help")
    assert code == 0 and time.perf_counter() - began < 4, "2 s on a machine of one's own"
    for group in ("budget: fixed, off, profiled", "dsa: infllm_v2, ", "experiment: ablation, ", "debug: none, tiny"):
        assert group in said
    assert "base_" not in said, "a schema is no option"
    assert said.count("python -m prr_pipeline ") >= 6 and "+experiment=glm4_infllm" in said
    code = "import sys, prr_pipeline.__main__; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_cfg_job_prints_the_composed_job_and_runs_nothing(tmp_path: Path) -> None:
    code, said = command(tmp_path, "--cfg", "job", "+experiment=glm4_infllm", "debug=tiny", "dsa.top_k=9")
    assert code == 0
    assert "hub_id: zai-org/glm-4-9b-chat-1m-hf" in said and "weights: random" in said and "top_k: 9" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dsa.topk=3", "prr_pipeline: dsa.topk is unknown. Did you mean top_k? There are: name, block_size, top_k"),
        ("runtime.prefill_chunk=abc", "prr_pipeline: runtime.prefill_chunk: Value 'abc' of type 'str' could not be"),
        ("dsa=qest", "prr_pipeline: dsa=qest: no such option. Did you mean quest?"),
    ],
)
def test_wrong_words_end_with_one_message_before_any_work(tmp_path: Path, word: str, expected: str) -> None:
    code, said = command(tmp_path, word)
    assert code == 2 and said.startswith(expected) and len(said.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("word", ["runtime.temperature=nan", "seed=-1", "stages=[decod]", "model.hub_id=a/b/c"])
def test_wrong_values_are_refused_before_anything_heavy_is_imported(tmp_path: Path, word: str) -> None:
    code = (
        "import sys, prr_pipeline.__main__ as program\n"
        f"sys.argv = ['prr_pipeline', {word!r}]\n"
        "try: program.main()\n"
        "except SystemExit as end: print(end.code, *(m for m in ('torch', 'lightning') if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2", done.stdout + done.stderr
    assert word.split("=")[0] in done.stdout and "Traceback" not in done.stderr


def test_an_experiment_for_a_gpu_ends_at_once_and_says_what_gets_further(tmp_path: Path) -> None:
    code, said = command(tmp_path, "+experiment=glm4_infllm")
    assert code == 2 and len(said.splitlines()) == 1, "no stack"
    assert said.strip().endswith(
        "ERROR   runtime.device=cuda, but torch sees no CUDA device. Override debug=tiny (a tiny random model of the "
        "same architecture on the CPU), or runtime.device=cpu."
    )
    assert os.listdir(tmp_path / "runs") == ["logs"], "nothing but its log"


def test_a_sweep_goes_on_after_a_job_that_fails(tmp_path: Path) -> None:
    """The first job's text is too short, which only its model's tokenizer can tell; the second one is whole."""
    words = (*book(tmp_path, 2), "stages=[calibrate,decode]")
    code, said = command(tmp_path, "-m", *words, "benchmark.num_samples=9,1")
    assert code == 2, "as the job alone"
    assert said.splitlines()[-1].startswith("prr_pipeline: job 0 failed: benchmark=text:")
    assert "HYDRA_FULL_ERROR" not in said and "Error executing job" not in said
    assert said.count("of 9 of 420 tokens. Pass a longer file") == 2 and "Traceback" not in said, (
        "a user's mistake needs no stack"
    )
    (found,) = (json.loads(p.read_text()) for p in tmp_path.glob("runs/default/*/status.json"))
    assert (found["stage"], found["state"]) == ("decode", "done")
    assert len(list(tmp_path.glob("runs/default/*"))) == 1, "the first job has no folder"
    runs = list(tmp_path.glob("runs/default/*/*/wandb/offline-run-*"))
    assert len(runs) == 2 and len({r.name.rsplit("-", 1)[1] for r in runs}) == 2, "one run a stage"
    logs = sorted(tmp_path.glob("runs/logs/*/*-sweep/*/prr_pipeline.log"))
    assert [("failed" in p.read_text() or "ERROR" in p.read_text()) for p in logs] == [True, False]


def test_a_sweep_ends_with_a_line_for_each_job_that_failed(tmp_path: Path) -> None:
    code, said = command(tmp_path, "-m", *book(tmp_path, 1), "dsa.top_k=200,300", "stages=[calibrate],[decode]")
    last = said.splitlines()[-4:]
    assert code == 2 and [x.split(":")[:2] for x in last] == [["prr_pipeline", f" job {n} failed"] for n in range(4)], (
        said
    )


CRASH = """
from dataclasses import dataclass
from prr_pipeline.dsa.quest import Quest

@dataclass(kw_only=True)
class Own(Quest):
    def check(self):
        raise RuntimeError("broken")
"""


def test_a_sweep_whose_job_crashes_is_told_apart_from_a_user_s_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashes.py").write_text(CRASH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, said = command(tmp_path, "-m", *book(tmp_path, 1), "dsa._target_=crashes.Own", "seed=0,1")
    assert code == 1 and said.count("Traceback (most recent call last)") == 2
    assert said.splitlines()[-2:] == [f"prr_pipeline: job {n} failed: RuntimeError: broken" for n in (0, 1)]


@pytest.mark.parametrize("words", [("--cfg", "job"), ("stages=[calibrate]",), ("-m", "stages=[calibrate]", "seed=0,1")])
def test_a_reader_who_leaves_is_no_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    """As `| head -c 1`: the pipe is closed before the first word."""
    text = (*book(tmp_path, 1), "tracker=none")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "prr_pipeline", *words, *text],
        cwd=tmp_path,
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode in (141, -signal.SIGPIPE) and done.stderr == ""
