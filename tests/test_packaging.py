# SPDX-License-Identifier: Apache-2.0
"""The built wheel, in a folder of its own, finds its option files and runs from anywhere."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's content, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.whl")
    site = folder / "site"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(site)
    return site


def run(site, cwd, *words):
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}
    # -P: the working folder is not searched, so that only the wheel's content can answer
    command = [sys.executable, "-P", "-c", _WITHOUT_TREE, *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


# An editable install of the tree may stand in site-packages: the wheel must answer before it, and alone.
_WITHOUT_TREE = (
    "import sys, runpy, prr_pipeline;"
    f"assert not prr_pipeline.__file__.startswith({str(ROOT)!r}), prr_pipeline.__file__;"
    "sys.argv = ['prr_pipeline', *sys.argv[1:]];"
    "runpy.run_module('prr_pipeline', run_name='__main__')"
)


def test_the_wheel_composes_a_job_elsewhere(wheel, tmp_path):
    done = run(wheel, tmp_path, "--cfg", "job", "+experiment=glm4_infllm")
    assert done.returncode == 0, done.stderr
    assert "name: glm4" in done.stdout and "InfLLMv2" in done.stdout


def test_every_option_file_is_in_the_wheel(wheel):
    ours = {p.relative_to(ROOT / "conf") for p in (ROOT / "conf").rglob("*.yaml")}
    theirs = {p.relative_to(wheel / "prr_pipeline/conf") for p in (wheel / "prr_pipeline/conf").rglob("*.yaml")}
    assert ours == theirs and len(ours) > 20


def test_the_wheel_holds_nothing_else(wheel):
    top = {p.name for p in wheel.iterdir() if not p.name.endswith(".dist-info")}
    assert top == {"prr_pipeline", "cutlass_kernels"}
