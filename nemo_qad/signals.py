"""The signals that stop a run, and who answers them for a while. No torch."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from nemo_qad.errors import EXIT_INTERRUPTED, EXIT_STOPPED, Stopped

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the first lets a step be finished and saved
Handler = Callable[[int, FrameType | None], Any]


def stop_status(number: int) -> int:
    """The exit status of a run that a signal stopped: a person's Ctrl-C, or a scheduler that wants it continued."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED


def stop_at_once(number: int, frame: object = None) -> None:
    """A signal handler for work that has no step to finish."""
    raise Stopped(f"stopped by {signal.Signals(number).name}", stop_status(number))


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Inside, `handler` answers the signals; the handlers before come back afterwards.

    Outside the main thread nothing happens: the signals are someone else's to handle there.
    """
    previous: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
