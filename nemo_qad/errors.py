"""Errors that a user can act on, and the exit statuses of the commands.

Every message names the field or file, the value found there, and the remedy. Anything that is not a
`UserError` is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_STOPPED = 75  # saved and stopped as SIGTERM or SIGUSR1 asked; the same command continues (sysexits: EX_TEMPFAIL)
EXIT_INTERRUPTED = 130  # Ctrl-C
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


class Stopped(KeyboardInterrupt):
    """Work ended at a request, everything that was finished being saved.

    exit_status: of the process; by the signal that asked.
    """

    def __init__(self, message: str = "", exit_status: int = EXIT_INTERRUPTED) -> None:
        super().__init__(message)
        self.exit_status = exit_status
