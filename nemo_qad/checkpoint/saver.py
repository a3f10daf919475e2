"""Saves checkpoints beside training: planned together, written by a forked process of each rank, finished together.

A fork has the tensors as they were at that moment, without a copy: the kernel copies a page when training changes it.
The checkpoint gets its name, and `latest` moves, only after every rank's files are on disk. A save that fails leaves
the ones before it alone; training goes on and says so, and only who needs the save (a stop) takes that for an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemo_qad import agreement
from nemo_qad.checkpoint.sharded import Plan, State, local_bytes, plan_save
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.errors import UserError
from nemo_qad.files import require_space
from nemo_qad.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # prctl(2)
Written = tuple[dict[int, Any], dict[str, dict[str, Any]]]  # what Plan.write returns


@dataclass
class _Pending:
    step: int
    plan: Plan
    meta: dict[str, Any]
    process: int = 0
    reader: Connection | None = None
    outcome: Written | str | None = None  # a text says what went wrong


class CheckpointSaver:
    """Of one run, on all its ranks. Every method is a collective call.

    Args:
        asynchronous: write in a forked process while training goes on.
    """

    def __init__(self, folders: StepFolders, say: Callable[[str], None], *, asynchronous: bool) -> None:
        self.folders, self._say, self._asynchronous = folders, say, asynchronous
        self._pending: _Pending | None = None
        self.problem: str | None = None  # why the newest save failed

    def save(
        self, step: int, state: State, meta: dict[str, Any], extra: Callable[[Path], None] | None = None
    ) -> None:
        """Starts to save; the one before is waited for. Returns when the tensors may change again.

        Args:
            state: what this rank writes.
            meta: JSON, of the first rank.
            extra: writes files of its own into the folder, on all ranks together.
        """
        self.wait()
        need = sum(agreement.of_all(local_bytes(state)))
        self.problem = agreement.first_alone(lambda: self._prepare(step, need))
        if self.problem:
            self._tell(step)
            return
        folder = self.folders.hidden(step)
        if extra is not None:
            extra(folder)
        self._pending = pending = _Pending(step, plan_save(state, folder), {**meta, "step": step})
        if self._asynchronous:
            pending.plan.stage()
            self._fork(pending)
            return
        pending.outcome = _attempt(pending.plan)
        self._finish()

    def poll(self) -> None:
        """Finishes a save that every rank has written."""
        if self._pending is None:
            return
        reader = self._pending.reader
        if not agreement.any_rank(reader is not None and not reader.poll()):
            self._finish()

    def wait(self) -> None:
        """Returns when nothing is being saved."""
        if self._pending is not None:
            self._finish()

    def require_saved(self) -> None:
        """Waits, and raises UserError if the newest save failed."""
        self.wait()
        if self.problem:
            newest = self.folders.latest()
            kept = f"step {newest} is the newest that is saved" if newest is not None else "nothing is saved yet"
            raise UserError(f"{self.folders.root}: {self.problem}; {kept}")

    def abandon(self) -> None:
        """Ends a save that is being written, without the other ranks: where an error ends the run."""
        if self._pending is not None and self._pending.process:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pending.process, signal.SIGKILL)
                os.waitpid(self._pending.process, 0)
        self._pending = None

    def _prepare(self, step: int, need: int) -> str | None:
        try:
            require_space(self.folders.root, int(1.05 * need) + 2**20, f"the checkpoint of step {step}")
            self.folders.new(step)
        except (UserError, OSError) as error:
            return str(error)
        return None

    def _fork(self, pending: _Pending) -> None:
        pending.reader, writer = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads stay behind: the child needs none
            pending.process = os.fork()
        if pending.process == 0:
            _child(pending.plan, writer)
        writer.close()

    def _finish(self) -> None:
        """Waits for all ranks' files; the first gives the checkpoint its name."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        if pending.reader is not None:
            try:
                pending.outcome = pending.reader.recv()
            except EOFError:
                pending.outcome = "the process that wrote it was ended"
            os.waitpid(pending.process, 0)
        every = agreement.to_first(pending.outcome)
        self.problem = agreement.first_alone(lambda: self._complete(pending, every))
        if self.problem:
            self._tell(pending.step)

    def _complete(self, pending: _Pending, every: list[Any]) -> str | None:
        """On the first rank: the problem, or None when the checkpoint has its name."""
        failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(every) if isinstance(outcome, str)]
        try:
            if failed:
                raise UserError(failed[0])
            pending.plan.finish(every, pending.meta)
            self.folders.publish(pending.step)
        except (UserError, OSError) as error:
            shutil.rmtree(pending.plan.folder, ignore_errors=True)
            return str(error)
        self.folders.prune(pending.step, self._say)
        return None

    def _tell(self, step: int) -> None:
        newest = self.folders.latest()
        kept = f"that of step {newest} is kept" if newest is not None else "there is none yet"
        self._say(f"Warning: the checkpoint of step {step} was not saved: {self.problem}. Training goes on; {kept}")


def _attempt(plan: Plan) -> Written | str:
    """Any exception becomes words: torch's reach its caller as RuntimeError with the disk's words inside."""
    try:
        return plan.write()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _child(plan: Plan, writer: Connection) -> None:
    """Writes and tells; never returns. It outlives no parent, keeps no lock of it, and leaves stop signals to it."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, writer.fileno())
        os.closerange(writer.fileno() + 1, 2**16)
        writer.send(_attempt(plan))
    finally:
        os._exit(0)
