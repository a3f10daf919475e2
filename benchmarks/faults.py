"""What becomes of checkpoints when a save is killed, a disk is full, or a file is damaged; what a save costs training.

    python benchmarks/faults.py [--ranks 1 4]

Each fault: processes with gloo save steps 1 and 2, meet the fault in the save of step 3, and are gone. New ones then
look for the newest whole checkpoint and compare every number of it with what that step had. Lost: none is found, or an
older one than the newest that had been finished. Silent: other numbers than the step's. The full disk is a tmpfs, which
only root may mount; without it those faults are left out and said. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from nemo_qad import agreement, files
from nemo_qad.checkpoint import manifest, saver, sharded, steps
from nemo_qad.checkpoint.newest import newest_good
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.checkpoint.steps import LATEST, StepFolders
from nemo_qad.errors import UserError

ROWS, COLUMNS = 512, 512  # of a rank's part
# Where a save is killed: (object, function, before or after it).
POINTS: dict[str, tuple[Any, str, str]] = {
    "before the save": (StepFolders, "new", "before"),
    "folder made": (StepFolders, "new", "after"),
    "planned": (saver, "plan_save", "after"),
    "before the data": (sharded, "write", "before"),
    "during the data": (manifest, "describe_file", "before"),
    "after the data": (sharded, "write", "after"),
    "before the metadata": (sharded, "finish", "before"),
    "before the manifest": (manifest, "write_manifest", "before"),
    "before the name": (StepFolders, "publish", "before"),
    "before the pointer": (steps, "replace_text", "before"),
    "after the pointer": (StepFolders, "publish", "after"),
    "during retention": (shutil, "rmtree", "before"),
}
DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, max(0, path.stat().st_size - 2)),
    "emptied": lambda path: os.truncate(path, 0),
    "one bit": lambda path: _flip(path),
}


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def state(step: int) -> dict[str, Any]:
    """Numbers that tell the step and the rank's place."""
    rank, ranks = agreement.number(), agreement.count()
    value = torch.full((ROWS, COLUMNS), float(step)) + torch.arange(ROWS * rank, ROWS * (rank + 1))[:, None] / 1024
    return {"w": ShardedTensor.from_rank_offsets("w", value, (0, rank, ranks))}


def in_ranks(work: Callable[[], int], num_ranks: int) -> list[int]:
    """Exit statuses of `work` in forked gloo ranks; when one is killed the others are too."""
    folder = tempfile.mkdtemp(prefix="nemo_qad_faults_")
    sys.stdout.flush()
    processes = []
    for rank in range(num_ranks):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                store = dist.FileStore(f"{folder}/store", num_ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
                status = work()
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                os._exit(status)
        processes.append(process)
    statuses: dict[int, int] = {}
    while len(statuses) < num_ranks:
        process, status = os.wait()
        if process not in processes:
            continue
        statuses[process] = os.waitstatus_to_exitcode(status)
        if statuses[process] < 0:
            for other in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return [statuses[process] for process in processes]


def killing(point: str) -> None:
    """From now on this process, and the one that writes for it, kill it at `point`."""
    owner, name, when = POINTS[point]
    original, main = getattr(owner, name), os.getpid()

    @functools.wraps(original)  # so that it can be sent to the writing process by its name
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            _end(main)
        result = original(*arguments, **named)
        _end(main)
        return result

    setattr(owner, name, wrapped)


def _end(main: int) -> None:
    os.kill(main, signal.SIGKILL)
    if os.getpid() != main:
        time.sleep(10)  # until the parent's end ends this process


def life(root: Path, asynchronous: bool, point: str | None, steps_: tuple[int, ...]) -> Callable[[], int]:
    """A run that saves `steps_`, the last of them with a fault; its status is 3 where that save failed in words."""

    def work() -> int:
        said: list[str] = []
        before = CheckpointSaver(StepFolders(root, keep=2), said.append, asynchronous=asynchronous)
        for step in steps_[:-1]:
            before.save(step, state(step), {"step": step})
            before.wait()
        before.close()
        if point is not None and agreement.is_first():
            killing(point)
        saving = CheckpointSaver(StepFolders(root, keep=2), said.append, asynchronous=asynchronous)
        saving.save(steps_[-1], state(steps_[-1]), {"step": steps_[-1]})
        saving.wait()
        return 3 if saving.problem else 0

    return work


def look(root: Path, expected: set[int], out: Path) -> Callable[[], int]:
    """Finds the newest whole checkpoint and compares it; the first rank writes the verdict to `out`."""

    def work() -> int:
        said: list[str] = []
        try:
            found = newest_good(StepFolders(root), said.append, "begin anew")
        except UserError as error:
            found, said = None, [*said, str(error)]
        verdict = {"step": found.step if found else None, "said": said, "lost": False, "silent": False}
        if found is None or found.step not in expected:
            verdict["lost"] = True
        else:
            wanted, true = state(0), state(found.step)["w"].data
            sharded.load(found.folder, wanted)
            verdict["silent"] = any(agreement.of_all(not torch.equal(wanted["w"].data, true)))
        if agreement.is_first():
            out.write_text(json.dumps(verdict))
        return 0

    return work


def judged(root: Path, expected: set[int], num_ranks: int) -> dict[str, Any]:
    out = root.with_name("verdict.json")
    out.unlink(missing_ok=True)
    in_ranks(look(root, expected, out), num_ranks)
    if not out.exists():
        return {"step": None, "said": ["no verdict"], "lost": True, "silent": False}
    verdict: dict[str, Any] = json.loads(out.read_text())
    return verdict


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nemo_qad_faults_") as name:
        yield Path(name) / "checkpoints"


def kills(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A kill at each point, in both ways to save; then the next run saves over what is left."""
    for asynchronous in (False, True):
        for point in POINTS:
            with folder() as root:
                statuses = in_ranks(life(root, asynchronous, point, (1, 2, 3)), num_ranks)
                after = {"after the pointer", "during retention", "before the pointer"}
                expected = {3} if point in after else {2}
                verdict = judged(root, expected, num_ranks)
                verdict["lost"] |= statuses[0] != -signal.SIGKILL  # the fault must have happened
                in_ranks(life(root, asynchronous, None, (3, 4)), num_ranks)
                verdict["lost"] |= judged(root, {4}, num_ranks)["lost"] or bool(StepFolders(root).unfinished())
                yield f"kill {point}, {'async' if asynchronous else 'sync'}, {num_ranks} ranks", verdict


def damages(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of file of the newest checkpoint, in each way; the one before must be taken and the damage named."""
    with folder() as root:
        in_ranks(life(root, False, None, (1, 2)), num_ranks)
        newest = StepFolders(root).path(2)
        names = [path.relative_to(newest) for path in sorted(newest.rglob("*")) if path.is_file()]
        for name in names:
            for kind, damage in DAMAGE.items():
                kept = (newest / name).read_bytes()
                damage(newest / name)
                verdict = judged(root, {1}, num_ranks)
                verdict["silent"] |= not verdict["said"]
                (newest / name).write_bytes(kept)
                yield f"{name} {kind}, {num_ranks} ranks", verdict
        for kind, damage in DAMAGE.items():  # `latest` is a convenience: whole folders decide
            damage(root / LATEST)
            yield f"{LATEST} {kind}, {num_ranks} ranks", judged(root, {2}, num_ranks)
            files.replace_text(root / LATEST, "step-000002\n")


def full_disks(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A tmpfs with room for one checkpoint and a half, as the check of free room sees it and as it does not."""
    size = num_ranks * ROWS * COLUMNS * 4
    for checked in (True, False):
        for asynchronous in (False, True):
            with tempfile.TemporaryDirectory(prefix="nemo_qad_full_") as name:
                room = int(1.5 * size) + 200_000
                mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", name], check=False)
                if mounted.returncode:
                    print("tmpfs cannot be mounted: full disks are left out")
                    return
                try:
                    root = Path(name) / "checkpoints"
                    before = saver.require_space
                    saver.require_space = lambda *_: None  # type: ignore[assignment]
                    in_ranks(life(root, asynchronous, None, (1,)), num_ranks)
                    if checked:
                        saver.require_space = before
                    statuses = in_ranks(life(root, asynchronous, None, (2,)), num_ranks)
                    saver.require_space = before
                    out = judged_elsewhere(root, {1}, num_ranks)
                    out["lost"] |= set(statuses) != {3}
                    how = "seen before" if checked else "met while writing"
                    yield f"full disk {how}, {'async' if asynchronous else 'sync'}, {num_ranks} ranks", out
                finally:
                    subprocess.run(["umount", name], check=True)


def judged_elsewhere(root: Path, expected: set[int], num_ranks: int) -> dict[str, Any]:
    """The full disk has no room for the verdict."""
    with folder() as other:
        out = other.with_name("verdict.json")
        in_ranks(look(root, expected, out), num_ranks)
        verdict: dict[str, Any] = json.loads(out.read_text())
        return verdict


def stall(megabytes: int = 1024, rounds: int = 5) -> dict[str, list[float]]:
    """Seconds that training waits for each save, both ways in one process, in turn, as a run does it.

    To what the saver takes, at each step until the checkpoint has its name, is added what a change of all tensors takes
    longer than it does undisturbed.
    """
    result = Path(tempfile.mkdtemp()) / "stall.json"

    def work() -> int:
        with folder() as root:
            ways = {"sync": False, "async": True}
            savers = {
                kind: CheckpointSaver(StepFolders(root.with_name(kind), 1), print, asynchronous=way)
                for kind, way in ways.items()
            }
            value = torch.randn(megabytes * 2**20 // 4 // 1024, 1024)
            item = {"w": ShardedTensor.from_rank_offsets("w", value)}
            for saving in savers.values():
                saving.reserve(lambda: item)
            time.sleep(megabytes / 256)
            undisturbed = statistics.median(seconds(lambda: value.add_(1.0)) for _ in range(5))
            found: dict[str, list[float]] = {kind: [] for kind in ways}
            for step in range(1, rounds + 1):
                for kind, saving in savers.items():
                    waited = seconds(lambda: saving.save(step, item, {}))  # noqa: B023 (called at once)
                    waited += max(0.0, seconds(lambda: value.add_(1.0)) - undisturbed)
                    while saving._pending is not None:
                        time.sleep(0.1)  # a step
                        waited += seconds(saving.poll)
                    found[kind].append(waited)
            result.write_text(json.dumps(found))
        return 0

    in_ranks(work, 1)
    measured: dict[str, list[float]] = json.loads(result.read_text())
    return measured


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--no-stall", action="store_true", help="faults alone, nothing is timed")
    given = parser.parse_args()
    ranks = given.ranks
    torch.set_num_threads(1)
    table: dict[str, dict[str, Any]] = {}
    for number in ranks:
        for faults in (kills, damages, full_disks):
            for name, verdict in faults(number):
                table[name] = verdict
                word = "LOST" if verdict["lost"] else "SILENT" if verdict["silent"] else "ok"
                print(f"{word:6} {name}: continues from step {verdict['step']}", flush=True)
                if word != "ok":
                    print(f"       {verdict['said']}", flush=True)
    counts = {
        "faults": len(table),
        "lost": sum(v["lost"] for v in table.values()),
        "silent": sum(v["silent"] for v in table.values()),
    }
    if given.no_stall:
        print(json.dumps(counts))
        return
    waited = stall()
    sync, beside = (statistics.median(waited[kind]) for kind in ("sync", "async"))
    print(f"a save of 1 GiB holds training up for {sync:.3f} s, beside it for {beside:.3f} s (medians of 5 in turn)")
    result = {"async_stall_ratio": beside / sync, "sync_seconds": sync, "async_seconds": beside}
    print(json.dumps({**counts, **{name: round(value, 4) for name, value in result.items()}, "stalls": waited}))


if __name__ == "__main__":
    main()
