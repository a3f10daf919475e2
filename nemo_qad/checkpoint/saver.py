"""Saves checkpoints beside training: planned together, written by a process of each rank, finished by the first one's.

The checkpoint gets its name, and `latest` moves, only after every rank's files are on disk. A save that fails leaves
the ones before it alone; training goes on and says so, and only who needs the save (a stop) takes that for an error.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_qad import agreement
from nemo_qad.checkpoint import sharded
from nemo_qad.checkpoint.sharded import Plan, State, Written, local_bytes, plan_save
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.checkpoint.writer import Writer
from nemo_qad.errors import UserError
from nemo_qad.files import require_space
from nemo_qad.machine import free_memory


@dataclass
class _Pending:
    """A save on its way. is_written: every rank's files are on disk, and the first rank finishes."""

    step: int
    plan: Plan
    meta: dict[str, Any]
    beside: bool
    is_written: bool = False


class CheckpointSaver:
    """Of one run, on all its ranks. Every method is a collective call.

    Args:
        asynchronous: write in a process of its own while training goes on. That is forked here, so this comes before
            what takes memory.
    """

    def __init__(self, folders: StepFolders, say: Callable[[str], None], *, asynchronous: bool) -> None:
        self.folders, self._say = folders, say
        self._writer = Writer() if asynchronous else None
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
        plan = plan_save(state, folder)
        self._pending = _Pending(step, plan, {**meta, "step": step}, beside=self._fits_beside(state))
        if self._pending.beside:
            assert self._writer is not None
            self._writer.start(sharded.write, plan.job())
        else:
            self._finish(_attempt(plan))

    def reserve(self, state: Callable[[], State]) -> None:
        """Once, when there is a state as large as those to come: has memory for its copy made ready meanwhile."""
        if self._writer is None or self._writer.num_bytes:
            return
        found = state()
        if self._fits_beside(found):
            self._writer.reserve(local_bytes(found))

    def _fits_beside(self, state: State) -> bool:
        """Whether every rank has a writer, and memory for a copy of what it writes."""
        if self._writer is None:
            return False
        host = platform.node()
        needs = agreement.of_all((host, local_bytes(state) - self._writer.num_bytes))
        obstacle = _shortage(sum(need for place, need in needs if place == host))
        if not self._writer.is_alive:
            obstacle = f"{host}: the process that writes was ended"
        obstacles = [text for text in agreement.of_all(obstacle) if text]
        if obstacles and agreement.is_first():
            self._say(f"Warning: {obstacles[0]}, so this checkpoint is saved while training waits (qad.async_save)")
        return not obstacles

    def poll(self) -> None:
        """Takes a save on its way one stage further, if every rank has got so far."""
        pending, writer = self._pending, self._writer
        if pending is None or writer is None:
            return
        waits = not pending.is_written or agreement.is_first()
        if agreement.any_rank(waits and not writer.is_done()):
            return
        self._further()

    def wait(self) -> None:
        """Returns when nothing is being saved."""
        while self._pending is not None:
            self._further()

    def require_saved(self) -> None:
        """Waits, and raises UserError if the newest save failed."""
        self.wait()
        if self.problem:
            newest = self.folders.latest()
            kept = f"step {newest} is the newest that is saved" if newest is not None else "nothing is saved yet"
            raise UserError(f"{self.folders.root}: {self.problem}; {kept}")

    def close(self) -> None:
        """Ends the writing process and what it was writing, without the other ranks; nothing can be saved any more."""
        if self._writer is not None:
            self._writer.close()
        self._pending = None

    def _prepare(self, step: int, need: int) -> str | None:
        try:
            require_space(self.folders.root, int(1.05 * need) + 2**20, f"the checkpoint of step {step}")
            self.folders.new(step)
        except (UserError, OSError) as error:
            return str(error)
        return None

    def _further(self) -> None:
        """Waits for the stage that the save is in, and begins the next."""
        pending, writer = self._pending, self._writer
        assert pending is not None and writer is not None
        if not pending.is_written:
            self._finish(writer.result())
            return
        self._pending = None
        self._close_with(agreement.first_alone(writer.result), pending)

    def _finish(self, outcome: Written | str) -> None:
        """When this rank has written: the first makes a checkpoint of all ranks' files."""
        pending, writer = self._pending, self._writer
        assert pending is not None
        every = agreement.to_first(outcome)
        task = (self.folders, pending.step, pending.plan.metadata, every, pending.meta)
        if pending.beside:
            assert writer is not None
            if agreement.is_first():
                writer.start(complete, *task)
            pending.is_written = True
            return
        self._pending = None
        self._close_with(agreement.first_alone(lambda: complete(*task)), pending)

    def _close_with(self, result: tuple[str | None, list[str]] | str, pending: _Pending) -> None:
        self.problem, remarks = (result, []) if isinstance(result, str) else result
        if agreement.is_first():
            for text in remarks:
                self._say(text)
        if self.problem:
            self._tell(pending.step)

    def _tell(self, step: int) -> None:
        newest = self.folders.latest()
        kept = f"that of step {newest} is kept" if newest is not None else "there is none yet"
        self._say(f"Warning: the checkpoint of step {step} was not saved: {self.problem}. Training goes on; {kept}")


def complete(
    folders: StepFolders, step: int, metadata: Any, every: list[Written | str], meta: dict[str, Any]
) -> tuple[str | None, list[str]]:
    """For the first rank alone: the problem, or None when the checkpoint has its name; and what else there is to say.

    Args:
        every: what each rank has written, or a text that says why it could not.
    """
    failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(every) if isinstance(outcome, str)]
    remarks: list[str] = []
    try:
        if failed:
            raise UserError(failed[0])
        sharded.finish(folders.hidden(step), metadata, [o for o in every if not isinstance(o, str)], meta)
        folders.publish(step)
    except (UserError, OSError) as error:
        shutil.rmtree(folders.hidden(step), ignore_errors=True)
        return str(error), remarks
    folders.prune(step, remarks.append)
    return None, remarks


def _attempt(plan: Plan) -> Written | str:
    """Any exception becomes words: torch's reach their caller as RuntimeError with the disk's words inside."""
    try:
        return sharded.write(plan.on_cpu())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _shortage(need: int) -> str | None:
    free = free_memory()
    if need <= free:
        return None
    room = f"{need / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free"
    return f"{platform.node()}: a copy of the checkpoint takes {room}"
