# SPDX-License-Identifier: Apache-2.0
"""The command line as a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = ("debug=tiny", "benchmark=text", "benchmark.length=420", "benchmark.max_new_tokens=5", "runtime.modes=[prr]")


def environment() -> dict[str, str]:
    """Of a machine without a GPU and a network, and of a user who configured nothing."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "HYDRA_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    return {**own, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "prr_pipeline", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_listening,
    )


def _listening() -> None:
    """Ctrl-C is heard, also where these tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(folder: Path, *words: str) -> tuple[int, str]:
    process = start(folder, *words)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def book(folder: Path, samples: int) -> tuple[str, ...]:
    """Words of a job on samples of a text."""
    (folder / "book.txt").write_text(" ".join(f"w{i}" for i in range(150 * samples)))
    return (*JOB, f"benchmark.path={folder}/book.txt", f"benchmark.num_samples={samples}")
