# SPDX-License-Identifier: Apache-2.0
"""Jobs as their stages leave them, without running any: files, and manifests that say what those are."""

import json
from pathlib import Path
from typing import Any

from prr_pipeline.artifacts import StageFolder, digest, write_atomic
from prr_pipeline.config import STAGES


def finished(folder: Path, config: dict[str, Any], files: dict[str, Any]) -> Path:
    """A job with these files of its stages, by path: a text as it is, anything else as JSON, a line a row in .jsonl."""
    for path, data in {"config.json": config, "decode/samples.jsonl": [], **files}.items():
        rows = data if path.endswith(".jsonl") else [data]
        text = data if isinstance(data, str) else "".join(json.dumps(row) + "\n" for row in rows)
        write_atomic(folder / path, text)
    return seal(folder)


def seal(folder: Path) -> Path:
    """End the stages of a job with the files that they have now, each made of all that are before it."""
    config = json.loads((folder / "config.json").read_text())
    inputs: dict[str, str] = {}
    for name in (s for s in STAGES if (folder / s).is_dir()):
        stage = StageFolder(folder / name, name, config)
        stage.finish("cpu", inputs, [p for p in sorted(stage.path.iterdir()) if p != stage.manifest], {})
        inputs = inputs | {name: digest(stage.require("a test"))}
    return folder
