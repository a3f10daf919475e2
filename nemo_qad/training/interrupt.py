"""Stop at a step's border: SIGINT and SIGTERM set a flag, the loop saves and leaves.

Stopping in the middle of an optimizer step would leave half of the parameters updated. A second signal
leaves at once; the newest checkpoint on disk is then the one that counts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nemo_qad import agreement


class Interrupted(KeyboardInterrupt):
    """Training stopped on request after a whole step; `step` steps are saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped on request after step {step}; continue with the same command")
        self.step = step


class StopRequest:
    """Whether someone asked the loop to stop."""

    requested = False

    def agreed(self) -> bool:
        """Whether any rank was asked: a collective call, so that all of them stop after the same step."""
        return agreement.any_rank(self.requested)


@contextmanager
def deferred_stop() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM only sets `requested`; the second acts as usual."""
    request = StopRequest()
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        request.requested = True
        for known, handler in previous.items():
            signal.signal(known, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[number] = signal.signal(number, handle)
        except ValueError:  # not the main thread: the signals are someone else's to handle
            break
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
