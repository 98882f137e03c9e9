# SPDX-License-Identifier: Apache-2.0
"""The words of the command line, before Hydra reads them: near names for wrong ones, and debug options last.

Hydra lists the options of a group for a wrong option, but says nothing helpful for a wrong group or key, so that a job
is composed here once before it is by Hydra. And Hydra merges `+experiment=x` after everything in the defaults list, so
that a debug option must be appended after it to win.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_class
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

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

    Flags come first: Hydra's parser takes overrides in one piece only.

    Raises:
        ConfigError: a group, option or top-level key that does not exist, with the near names.
    """
    known = groups()
    own = [a for a in argv if a.startswith("~") or "=" in a and not a.startswith("-")]
    searched = any(a.startswith("--config-dir") or a.startswith("-cd") for a in argv)
    if not searched:  # a user's own config folder may hold anything
        for word in own:
            _check(word, known)
    rest = [a for a in argv if a not in own]
    first = [a for a in own if a.startswith("~") or _group(a) not in _APPENDED]
    last = ["+" + a.lstrip("+") for name in _APPENDED for a in own if a not in first and _group(a) == name]
    return rest + first + last


def check(argv: list[str]) -> DictConfig | None:
    """Compose what Hydra is about to; no work is done. One job of a sweep stands for all, Hydra tries the others.

    Returns:
        The job, or None if none will run: help, a look at the configuration, or the job of another program.

    Raises:
        ConfigError: a key that does not exist, with the near names; a value of the wrong type; words that are none.
    """
    args = get_args_parser().parse_args(argv)
    if args.help or args.hydra_help or args.shell_completion or args.experimental_rerun:
        return None
    if args.config_name or args.config_path:  # another job than ours
        return None
    words = list(args.overrides)
    swept = args.multirun or "hydra.mode=MULTIRUN" in words
    if args.config_dir:
        folder = str(Path(args.config_dir).absolute()).replace("'", "\\'")
        words.append(f"hydra.searchpath=['file://{folder}']")
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = compose("config", _first(words) if swept else words)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(error)) from None
    return None if args.cfg or args.info else composed


def _first(words: list[str]) -> list[str]:
    """The words of a sweep's first job."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # it looks globs up
    chosen = []
    for word, override in zip(words, parser.parse_overrides(words), strict=True):
        if override.is_sweep_override():
            value = next(override.sweep_string_iterator(), None)
            if value is None:
                raise ValueError(f"{word}: nothing matches")
            word = f"{override.get_key_element()}={value}"
        chosen.append(word)
    return chosen


def _explain(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if _left_out(cause):
            return f"{cause.full_key} is an argument of the option that its file leaves out: write +{cause.full_key}="
        keys = [str(k) for k in cause.parent_node or () if k != "_target_"]
        return f"{cause.full_key} is unknown." + (near(cause.key, keys) if keys else " It has no keys.")
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    lines = [line for line in str(error).splitlines() if not line.startswith("See https://")]
    if isinstance(error, MissingConfigException) and "/launcher/" in str(error.missing_cfg_file):
        lines.append("Launchers are packages of their own: pip install 'prr-pipeline[launchers]'")
    return "\n".join(lines)


def _left_out(error: ConfigKeyError | ConfigAttributeError) -> bool:
    """Whether an unknown key is an argument of the class that the option names."""
    target = error.parent_node.get("_target_") if isinstance(error.parent_node, DictConfig) else None
    try:
        cls = get_class(target) if target else None
    except Exception:  # what is wrong with the target is said when the job is validated
        return False
    return is_dataclass(cls) and error.key in {f.name for f in fields(cls)}


def _group(word: str) -> str:
    return word.split("=", 1)[0].lstrip("+~").split("@", 1)[0]


def _check(word: str, known: dict[str, list[str]]) -> None:
    name, value = _group(word), word.partition("=")[2]
    if name in known:
        for option in value.split(","):
            plain = option.strip().strip("'\"")
            hydra_own = name.startswith("hydra/") or plain in ("null", "") or "(" in plain or ")" in plain
            if plain not in known[name] and not hydra_own:
                hint = " To keep outputs apart by a name of your own: output=runs/NAME" if name == "experiment" else ""
                raise ConfigError(f"{name}={plain}: no such option.{near(plain, known[name])}{hint}")
        return
    top = name.split(".", 1)[0].split("/", 1)[0]
    keys = [f.name for f in fields(JobConfig)]
    if top not in (*keys, *known, "hydra") and not word.startswith("+"):
        everything = sorted({*keys, *(g for g in known if "/" not in g)})
        raise ConfigError(f"'{name}' is no group and no key.{near(top, everything)}")
