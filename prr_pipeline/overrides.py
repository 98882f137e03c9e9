# SPDX-License-Identifier: Apache-2.0
"""The words of the command line, before Hydra reads them: near names for wrong ones, and debug options last.

Hydra lists the options of a group for a wrong option, but says nothing helpful for a wrong group or key. And it merges
`+experiment=x` after everything in the defaults list, so that a debug option must be appended after it to win.
"""

from dataclasses import fields
from pathlib import Path

from prr_pipeline.config import JobConfig, config_dir, near
from prr_pipeline.errors import ConfigError

_APPENDED = ("experiment", "debug")  # groups outside the defaults list, in the order in which they must be merged
_ENDS = ".yaml"


def groups(folder: Path | None = None) -> dict[str, list[str]]:
    """Option names by group, from the folder of the option files."""
    root = folder or config_dir()
    found = {}
    for path in sorted(p for p in root.rglob("*") if p.is_dir() and any(p.glob("*" + _ENDS))):
        found[path.relative_to(root).as_posix()] = sorted(p.stem for p in path.glob("*" + _ENDS))
    return found


def prepare(argv: list[str]) -> list[str]:
    """Arguments for Hydra from those of the user: each group checked, `experiment` and `debug` appended in that order.

    Raises:
        ConfigError: a group, option or top-level key that does not exist, with the near names.
    """
    known = groups()
    own = [a for a in argv if "=" in a and not a.startswith("-")]
    searched = any(a.startswith("--config-dir") or a.startswith("-cd") for a in argv)
    if not searched:  # a user's own config folder may hold anything
        for word in own:
            _check(word, known)
    kept = [a for a in argv if a not in own or _group(a) not in _APPENDED]
    last = [a for name in _APPENDED for a in own if _group(a) == name]
    return kept + ["+" + a.lstrip("+") for a in last]


def _group(word: str) -> str:
    return word.split("=", 1)[0].lstrip("+~").split("@", 1)[0]


def _check(word: str, known: dict[str, list[str]]) -> None:
    name, value = _group(word), word.split("=", 1)[1]
    if name in known:
        for option in value.split(","):
            plain = option.strip().strip("'\"")
            hydra_own = name.startswith("hydra/") or plain in ("null", "") or "(" in plain or ")" in plain
            if plain not in known[name] and not hydra_own:
                raise ConfigError(f"{name}={plain}: no such option.{near(plain, known[name])}")
        return
    top = name.split(".", 1)[0].split("/", 1)[0]
    keys = [f.name for f in fields(JobConfig)]
    if top not in (*keys, *known, "hydra") and not word.startswith("+"):
        everything = sorted({*keys, *(g for g in known if "/" not in g)})
        raise ConfigError(f"'{name}' is no group and no key.{near(top, everything)}")
