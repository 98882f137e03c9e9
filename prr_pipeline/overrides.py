# SPDX-License-Identifier: Apache-2.0
"""The words of the command line, before Hydra reads them: near names for wrong ones, and debug options last.

Hydra lists the options of a group for a wrong option, but says nothing helpful for a wrong group or key, so that a job
is composed here once before it is by Hydra. And Hydra merges `+experiment=x` after everything in the defaults list, so
that a debug option must be appended after it to win.
"""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from prr_pipeline.config import JobConfig, config_dir, located, near, no_list, told
from prr_pipeline.errors import ConfigError

_APPENDED = ("experiment", "debug")  # groups outside the defaults list, in the order in which they must be merged
_ENDS = ".yaml"
_TRIED = 32  # jobs of a sweep that are composed beforehand, at most; each takes a tenth of a second
_SCHEMAS = ("base_model", "base_runtime")  # what options are typed by; none themselves
_IN = re.compile(r"In '([^']+)'")
_TWICE = re.compile(r"Multiple values for (\S+)\. To override a value use 'override \S+: (.*)'")


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
    searched = [a for a in argv if a.startswith(("--config-dir", "-cd"))]
    mine = _own_groups(argv) if searched else {}
    for name, options in mine.items():
        known[name] = sorted({*known.get(name, []), *options})
    for word in own:
        if not searched or _group(word) in known:  # a user's own config folder may hold any key
            _check(word, known)
    _check_once(own)
    rest = [a for a in argv if a not in own]
    first = [a for a in own if a.startswith("~") or _group(a) not in _APPENDED]
    last = ["+" + a.lstrip("+") for name in _APPENDED for a in own if a not in first and _group(a) == name]
    return rest + first + last


def _own_groups(argv: list[str]) -> dict[str, list[str]]:
    """Option names by group in the folder of --config-dir.

    Raises:
        ConfigError: there is no such folder.
    """
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = Path(value if equals else following)
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {folder}: no such folder (looked in {folder.absolute()})")
            return groups(folder)
    return {}


def _check_once(words: list[str]) -> None:
    """Raise ConfigError for a second word of a group that takes one and is merged after all others."""
    for name in _APPENDED:
        given = [a.partition("=")[2] for a in words if _group(a) == name and not a.startswith("~")]
        if len(given) > 1:
            raise ConfigError(
                f"{name} is given twice: {name}={given[0]} and {name}={given[1]}; give one, or both as a sweep: "
                f"-m {name}={','.join(dict.fromkeys(given))}"
            )


def check(argv: list[str]) -> DictConfig | None:
    """Compose what Hydra is about to; no work is done. Of a sweep, each value is tried once.

    Returns:
        The job (of a sweep the first one), or None if none will run: help, a look at the configuration, or the job of
        another program.

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
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("a sweep (-m) runs jobs, and --cfg and --info show one: leave -m and the commas out")
    composed = None
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            for tried in _jobs(words) if swept else [words]:
                one = compose("config", tried)
                composed = composed or one
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        where = f"{at.name}, line {at.line + 1}" if at else "an option's file"
        raise ConfigError(f"{where}: this is not YAML: {error.problem}") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(error, words)) from None
    return None if args.cfg or args.info else composed


def _jobs(words: list[str]) -> Iterator[list[str]]:
    """The words of a sweep's first job, then those that differ from it in one value, up to _TRIED in all."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # it looks globs up
    choices = []
    for word, override in zip(words, parser.parse_overrides(words), strict=True):
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={v}" for v in islice(override.sweep_string_iterator(), _TRIED)]
            if not values:
                raise ValueError(f"{word}: nothing matches")
            choices.append(values)
        else:
            choices.append([word])
    first = [values[0] for values in choices]
    others = ([*first[:i], v, *first[i + 1 :]] for i, values in enumerate(choices) for v in values[1:])
    yield from islice(chain([first], others), _TRIED)


def _explain(error: Exception, words: list[str]) -> str:
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if _left_out(cause):
            return f"{cause.full_key} is an argument of the option that its file leaves out: write +{cause.full_key}="
        keys = [str(k) for k in cause.parent_node or () if k != "_target_"]
        return f"{cause.full_key} is unknown." + (near(cause.key, keys) if keys else " It has no keys.")
    if isinstance(cause, OmegaConfBaseException):
        given = [w.partition("=")[2] for w in words if _group(w) == cause.full_key]
        return no_list(str(cause.full_key), given[-1] if given else "", cause) or told(str(cause.full_key), cause)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_option(error)
    if found := _TWICE.match(str(error)):
        return f"{found[1]} is chosen already: write {found[1]}={found[2]} without the plus, once"
    lines = [line for line in str(error).splitlines() if line and not line.startswith("See https://")]
    return "; ".join(lines)


def _no_option(error: MissingConfigException) -> str:
    """A missing file as the option that it would be, and the file that asks for it if that is not the command line."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    named = error.options if error.options is not None else groups().get(group, [])
    known = [x for x in (str(o).rpartition("/")[2] for o in named) if x not in _SCHEMAS]
    by = _IN.match(str(error))
    where = f" (in {by[1]}.yaml)" if by and by[1] not in ("config", "hydra/config") else ""
    extra = " Launchers are packages of their own: pip install 'prr-pipeline[launchers]'"
    hint = extra if group.endswith("/launcher") else ""
    return f"{group}={option}{where}: no such option.{near(option, known) if known else ' No such group.'}{hint}"


def _left_out(error: ConfigKeyError | ConfigAttributeError) -> bool:
    """Whether an unknown key is an argument of the class that the option names."""
    target = error.parent_node.get("_target_") if isinstance(error.parent_node, DictConfig) else None
    try:
        cls = located(target) if target else None
    except Exception:  # what is wrong with the target is said when the job is validated
        return False
    return isinstance(cls, type) and is_dataclass(cls) and error.key in {f.name for f in fields(cls)}


def _group(word: str) -> str:
    return word.split("=", 1)[0].lstrip("+~").split("@", 1)[0]


def _check(word: str, known: dict[str, list[str]]) -> None:
    name, value = _group(word), word.partition("=")[2]
    if name in known:
        for option in value.split(","):
            plain = option.strip().strip("'\"")
            hydra_own = name.startswith("hydra/") or word.startswith("~") or "(" in plain or ")" in plain
            if plain not in known[name] and not hydra_own:
                hint = " To keep outputs apart by a name of your own: output=runs/NAME" if name == "experiment" else ""
                raise ConfigError(f"{name}={plain}: no such option.{near(plain, known[name])}{hint}")
        return
    top = name.split(".", 1)[0].split("/", 1)[0]
    keys = [f.name for f in fields(JobConfig)]
    if top not in (*keys, *known, "hydra") and not word.startswith("+"):
        everything = sorted({*keys, *(g for g in known if "/" not in g)})
        raise ConfigError(f"'{name}' is no group and no key.{near(top, everything)}")
