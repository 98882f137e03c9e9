# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can act on; the command line prints their message without a traceback."""


class PrrError(Exception):
    """Base of all errors with a message for the user: what was expected, what was found, what to do."""


class ConfigError(PrrError):
    """An option, group, key or value that is wrong, found before any work."""


class MissingInput(PrrError):
    """Weights, a data set, a device or a package that is not here; names the command that gets it."""


class ArtifactError(PrrError):
    """A stage's output that is damaged, incomplete or made by another configuration."""
