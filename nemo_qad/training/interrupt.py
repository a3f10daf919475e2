"""Stop at a step's border: SIGINT, SIGTERM and SIGUSR1 set a flag, the loop saves and leaves.

Stopping in the middle of an optimizer step would leave half of the parameters updated. A second signal
leaves at once; the newest checkpoint on disk is then the one that counts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nemo_qad import agreement
from nemo_qad.errors import EXIT_INTERRUPTED, Stopped
from nemo_qad.signals import STOP_SIGNALS, handled, stop_at_once, stop_status


class Interrupted(Stopped):
    """Training stopped on request after a whole step; `step` steps are saved."""

    def __init__(self, step: int, exit_status: int = EXIT_INTERRUPTED) -> None:
        super().__init__(f"stopped on request after step {step}", exit_status)
        self.step = step


class StopRequest:
    """Whether someone asked the loop to stop, and by which signal."""

    def __init__(self) -> None:
        self.number = 0

    @property
    def requested(self) -> bool:
        return self.number != 0

    def agreed(self) -> bool:
        """Whether any rank was asked: a collective call, so that all of them stop after the same step."""
        return agreement.any_rank(self.requested)

    def exit_status(self) -> int:
        """Of all ranks, after `agreed`; a collective call."""
        return min(stop_status(number) for number in agreement.of_all(self.number) if number)


@contextmanager
def deferred_stop() -> Iterator[StopRequest]:
    """Inside, the first stop signal only sets `requested`; the second leaves at once, by `Stopped`."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        request.number = number
        for known in STOP_SIGNALS:
            signal.signal(known, stop_at_once)

    with handled(STOP_SIGNALS, handle):
        yield request
