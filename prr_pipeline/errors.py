# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can act on, which the command line prints without a traceback; other exceptions in a line."""


class PrrError(Exception):
    """Base of all errors with a message for the user: what was expected, what was found, what to do."""


class ConfigError(PrrError):
    """An option, group, key or value that is wrong, found before any work."""


class MissingInput(PrrError):
    """Weights, a data set, a device or a package that is not here; names the command that gets it."""


class ArtifactError(PrrError):
    """A stage's output that is damaged, incomplete or made by another configuration."""


def first_line(error: BaseException) -> str:
    """What an exception says, without the rest of its story."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """The type of an exception, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['-'])[0]}"
