"""Errors that a user can act on, and the exit statuses of the commands.

Every message names the field or file, the value found there, and the remedy. Anything that is not a
`UserError` is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130
NUM_NAMES_SHOWN = 5


def show(names: list[str]) -> str:
    """The first names of a list and how many more there are."""
    more = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class UserError(Exception):
    """Something outside the program is wrong: an input file, a folder, a disk, a measured quantity."""

    exit_status = EXIT_FAILURE


class ConfigError(UserError):
    """The configuration is wrong. Raised before torch is imported, exit status 2."""

    exit_status = EXIT_BAD_CONFIG

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field}={value!s}: {problem}. {remedy}")
        self.field = field
        self.value = value


class StoppedElsewhereError(UserError):
    """The first rank stopped with this error and has said it, so this one stops too."""


class RunFolderError(UserError):
    """The run folder belongs to another configuration, is damaged, or cannot be written."""

    exit_status = EXIT_BAD_CONFIG
