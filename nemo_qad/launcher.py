"""Local ranks: processes of this machine that run one function together, started, watched and ended here.

The parent needs no torch. It tells the ranks of Ctrl-C once, ends the others when one fails, and picks the failure
that caused the rest. What runs under torchrun or Slurm has its ranks already and does not come here.
torch.distributed.launcher does the same with torch in the parent, sends a second Ctrl-C to ranks that the terminal
told already (the second one means "do not save"), and takes more than 30 s to end a rank that waits for a dead one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nemo_qad.errors import EXIT_FAILURE, EXIT_INTERRUPTED, Stopped, UserError
from nemo_qad.ranks import STORE, is_first_rank
from nemo_qad.signals import STOP_SIGNALS, handled, stop_at_once, stop_status

SAVE_SECONDS = 600.0  # after Ctrl-C, to finish a step and save
LISTEN_SECONDS = 3.0  # after a failure, for the others to say what they saw
END_SECONDS = 10.0  # from the request to end to the kill
POLL_SECONDS = 0.1
KEPT = "Finished stages and saved steps are kept; the same command continues"
ADVICE = {
    signal.SIGKILL: "That is how the kernel ends a process when memory runs out (dmesg says so): give a smaller "
    "qad.micro_batch_size, fewer ranks on this machine, or a machine with more memory",
    signal.SIGBUS: "That happens when /dev/shm or the disk behind a mapped file is full: make room there",
}
CRASHED = "That is a crash in native code: set PYTHONFAULTHANDLER=1 and run it again to see where"


class RankError(Exception):
    """A defect in a rank. `report` is its traceback with the rank's name."""

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Outcome:
    """How a rank's function ended. kind: done, user (a UserError), defect (any other exception), interrupted."""

    kind: str
    seconds: float  # since the epoch, when it was known
    value: Any = None
    text: str = ""
    report: str = ""
    status: int = EXIT_FAILURE
    lost_peer: bool = False  # a defect that follows from another rank's end


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    file: Path
    ended_here: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def outcome(self) -> Outcome | None:
        if self.alive or not self.file.exists():
            return None
        outcome = pickle.loads(self.file.read_bytes())
        assert isinstance(outcome, Outcome)
        return outcome

    @property
    def failed(self) -> bool:
        return not self.alive and ((outcome := self.outcome) is None or outcome.kind != "done")

    def tell(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                self.process.send_signal(number)


def run(target: str, arguments: Sequence[Any], num_ranks: int) -> Any:
    """Calls one function in `num_ranks` new processes that torch.distributed can join; returns what rank 0 returned.

    Args:
        target: "module:function", imported in the ranks alone.
        arguments: of the function; these and its result are pickled.

    Raises:
        UserError: that of a rank, or a rank that died: which, by what, and what to do.
        RankError: another exception of a rank.
        Stopped: SIGINT, SIGTERM or SIGUSR1 came, here or to a rank, and the ranks have ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="nemo_qad_launch_") as folder, _stop_request() as request:
        (Path(folder) / "call").write_bytes(pickle.dumps((target, tuple(arguments))))
        ranks: list[_Rank] = []
        try:
            for number in range(num_ranks):
                ranks.append(_start(Path(folder), number, num_ranks))
            _watch(ranks, request)
        finally:
            for rank in ranks:
                rank.tell(signal.SIGKILL)
                rank.process.wait()
                assert rank.process.stdin is not None
                rank.process.stdin.close()
        return _judge(ranks, request)


def _start(folder: Path, number: int, num_ranks: int) -> _Rank:
    """Its own process group keeps the terminal's Ctrl-C away; its stdin ends when this process does."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from nemo_qad import launcher; launcher.rank_main()"
    environment = os.environ | {
        "WORLD_SIZE": str(num_ranks),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE: str(folder / "store"),
    }
    command = [sys.executable, "-c", program, str(folder)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, process_group=0)
    return _Rank(number, process, folder / f"outcome-{number}")


@dataclass
class _StopRequest:
    count: int = 0
    number: signal.Signals = signal.SIGINT


@contextlib.contextmanager
def _stop_request() -> Iterator[_StopRequest]:
    """Counts stop signals instead of dying of them; the handlers before come back afterwards."""
    request = _StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        request.count, request.number = request.count + 1, signal.Signals(number)

    with handled(STOP_SIGNALS, handle):
        yield request


def _watch(ranks: list[_Rank], request: _StopRequest) -> None:
    """Returns when no rank is alive: each ends by itself, or is told to, or is killed."""
    told, asked, kill_at = 0, False, float("inf")
    ask_at = float("inf")
    while any(rank.alive for rank in ranks):
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if request.count > told:
            first, told = told == 0, request.count
            if first:
                print("stopping: the ranks finish their step and save; once more stops at once", file=sys.stderr)
            kill_at = min(kill_at, now + (SAVE_SECONDS if first and told == 1 else END_SECONDS))
            for rank in ranks:
                rank.tell(request.number)
        if ask_at == float("inf") and any(rank.failed for rank in ranks):
            ask_at = now + LISTEN_SECONDS
        if now >= ask_at and not asked:
            asked, kill_at = True, min(kill_at, now + END_SECONDS)
            for rank in ranks:
                rank.ended_here = rank.ended_here or rank.alive
                rank.tell(signal.SIGTERM)
        if now >= kill_at:
            for rank in ranks:
                rank.ended_here = rank.ended_here or rank.alive
                rank.tell(signal.SIGKILL)


def _judge(ranks: list[_Rank], request: _StopRequest) -> Any:
    """Rank 0's value, or the cause among all that went wrong."""
    outcomes = {rank.number: outcome for rank in ranks if (outcome := rank.outcome) is not None}
    by_time = sorted(outcomes.items(), key=lambda item: item[1].seconds)
    for _, outcome in by_time:
        if outcome.kind == "user":
            error = UserError(outcome.text)
            error.exit_status = outcome.status
            raise error
    for rank in ranks:
        wanted = rank.ended_here or (request.count and -rank.process.returncode in STOP_SIGNALS)
        if rank.number not in outcomes and not wanted:
            raise UserError(_died(rank, len(ranks)))
    defects = [(number, outcome) for number, outcome in by_time if outcome.kind == "defect"]
    causes = [item for item in defects if not item[1].lost_peer]
    stopped = request.count or any(outcome.kind == "interrupted" for outcome in outcomes.values())
    if stopped and not causes:
        _name_unsaved(ranks, outcomes)
        told = [outcome.text for _, outcome in by_time if outcome.kind == "interrupted"]
        raise Stopped(told[0] if told else "", _stop_status(list(outcomes.values()), request))
    if defects:
        number, outcome = (causes or defects)[0]
        head = f"rank {number} of {len(ranks)}: {outcome.text}"
        raise RankError(head, f"{outcome.report.rstrip()}\n{head}. {KEPT}")
    return outcomes[0].value


def _stop_status(outcomes: list[Outcome], request: _StopRequest) -> int:
    """As the ranks agreed; where none could say, by the signal that came here."""
    told = [outcome.status for outcome in outcomes if outcome.kind == "interrupted"]
    return min(told) if told else stop_status(request.number)


def _died(rank: _Rank, num_ranks: int) -> str:
    status = rank.process.returncode
    how, advice = f"ended with status {status} and without a word", CRASHED
    if status < 0:
        number = signal.Signals(-status) if -status in set(signal.Signals) else None
        how = f"was ended by {number.name if number else f'signal {-status}'}"
        advice = ADVICE.get(number, CRASHED) if number else CRASHED
    others = ", and the others were ended" if num_ranks > 1 else ""
    return f"rank {rank.number} of {num_ranks} (process {rank.process.pid}) {how}{others}. {advice}. {KEPT}"


def _name_unsaved(ranks: list[_Rank], outcomes: dict[int, Outcome]) -> None:
    killed = [rank.number for rank in ranks if rank.number not in outcomes and rank.ended_here]
    if killed:
        names = ", ".join(map(str, killed))
        print(f"killed while they worked: ranks {names}; the step they were in is lost", file=sys.stderr)


def rank_main() -> None:
    """What a local rank's process runs: the call in the folder that is its last argument."""
    folder = Path(sys.argv[-1])
    for number in STOP_SIGNALS:  # also where the parent's parent ignored them
        signal.signal(number, stop_at_once)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if not is_first_rank():
        warnings.simplefilter("ignore")  # of libraries: one rank's are enough
    outcome = _outcome(folder)
    whole = folder / f"outcome-{os.environ['RANK']}"
    part = whole.with_suffix(".part")
    part.write_bytes(_pickled(outcome))
    part.rename(whole)
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome.kind != "done":
        os._exit(outcome.status)  # threads that wait for a dead rank would hold the interpreter


def _outcome(folder: Path) -> Outcome:
    try:
        target, arguments = pickle.loads((folder / "call").read_bytes())
        value = pkgutil.resolve_name(target)(*arguments)
        return Outcome("done", time.time(), value if is_first_rank() else None)
    except UserError as error:
        return Outcome("user", time.time(), text=str(error), status=error.exit_status)
    except KeyboardInterrupt as stop:
        status = getattr(stop, "exit_status", EXIT_INTERRUPTED)
        return Outcome("interrupted", time.time(), text=str(stop), status=status)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        report = traceback.format_exc()
        return Outcome("defect", time.time(), text=text, report=report, lost_peer=_lost_peer(error))


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        text = f"the result of a rank cannot be pickled: {error}"
        return pickle.dumps(Outcome("defect", time.time(), text=text, report=traceback.format_exc()))


def _lost_peer(error: BaseException) -> bool:
    """Whether the error says that another rank is gone. gloo has no type of its own for that, only words."""
    signs = ("closed by peer", "reset by peer", "broken pipe", "gloo/transport", "remote process has terminated")
    text = str(error).lower()
    return "DistNetworkError" in type(error).__name__ or any(sign in text for sign in signs)


def _leave_with_parent() -> None:
    """Ends this rank when stdin does, so when the parent is gone: saving if it can, and within a bound."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(EXIT_FAILURE)
