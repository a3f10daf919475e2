"""What a run folder holds, and whether its bytes are those that were written. No torch.

It only reads, without the run's lock, so it can be asked while the run is at work or from a login node.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_qad.checkpoint import manifest
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.config import config_hash, from_yaml
from nemo_qad.errors import UserError, show
from nemo_qad.files import read_json, sha256
from nemo_qad.huggingface.weight_files import weights_digest
from nemo_qad.schema import RunConfig, Stage

READERS = 4  # files read at a time
Read = Callable[[int], None]  # called with the bytes of each file that was read through


@dataclass(frozen=True)
class Part:
    """A stage or a checkpoint. problems: what is wrong with its files, each with the file's path."""

    name: str
    num_files: int = 0
    num_bytes: int = 0
    problems: tuple[str, ...] = ()
    found: dict[str, Any] = field(default_factory=dict)  # the done-marker, or what the checkpoint says of itself

    @property
    def is_whole(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class RunState:
    """One run folder as it stands.

    stages: those with a done-marker. checkpoints: of QAD, by step, ascending. problems: of the configuration.
    """

    folder: Path
    run: RunConfig | None
    problems: tuple[str, ...]
    stages: dict[Stage, Part]
    checkpoints: dict[int, Part]
    best: Part | None
    latest: int | None
    is_busy: bool
    unfinished: tuple[Path, ...]
    set_aside: tuple[Path, ...]

    @cached_property
    def damage(self) -> list[str]:
        """Everything that is not as it was written."""
        parts = [*self.stages.values(), *self.checkpoints.values(), *([self.best] if self.best else [])]
        return [*self.problems, *(text for part in parts for text in part.problems)]

    @cached_property
    def newest_whole(self) -> int | None:
        return max((step for step, part in self.checkpoints.items() if part.is_whole), default=None)


def look(folder: Path, *, quick: bool = False, read: Read = lambda num_bytes: None) -> RunState:
    """
    Args:
        quick: compare names and sizes alone; no file of weights is read through.
        read: hears of each file that was read, from several threads.

    Raises:
        UserError: it is not a run folder.
    """
    _require_run_folder(folder)
    run, problems = _configuration(folder)
    folders = StepFolders(folder / "qad" / "checkpoints")
    busy = _is_busy(folder / ".lock")
    with ThreadPoolExecutor(READERS) as pool:
        checker = _Checker(folder, quick, read, pool)
        markers = {stage: path for stage in Stage if (path := folder / "stages" / f"{stage.value}.json").is_file()}
        return RunState(
            folder, run, tuple(problems),
            stages={stage: checker.stage(stage, path) for stage, path in markers.items()},
            checkpoints={step: checker.checkpoint(f"QAD step {step}", folders.path(step)) for step in folders.steps()},
            best=checker.tensors("best weights", best) if (best := folder / "qad" / "best").is_dir() else None,
            latest=folders.latest(),
            is_busy=busy,
            unfinished=() if busy else tuple(folders.unfinished()),
            set_aside=tuple(sorted(folder.glob("qad-set-aside-*"))),
        )  # fmt: skip


def size(folder: Path) -> int:
    """Bytes that `look` reads through, about; those of a teacher elsewhere included."""
    places = [folder / "ptq", folder / "qad", folder / "export", *_teacher_folder(folder)]
    return sum(path.stat().st_size for place in places for path in place.rglob("*") if path.is_file())


def _teacher_folder(folder: Path) -> Iterator[Path]:
    try:
        yield Path(read_json(folder / "stages" / f"{Stage.teacher.value}.json")["path"])
    except (OSError, UserError, KeyError, TypeError):
        return


def _require_run_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Give that of a run: its run_dir")
    if (folder / "config.sha256").is_file() or any(folder.glob("stages/*.json")):
        return
    inside = sorted(str(path.parent) for path in folder.glob("*/config.sha256"))
    hint = f"Its run folders are {show(inside)}" if inside else "Give the run_dir that a start of the run printed"
    raise UserError(f"{folder}: not a run folder, it has no config.sha256. {hint}")


def _configuration(folder: Path) -> tuple[RunConfig | None, list[str]]:
    text, digest = folder / "config.yaml", folder / "config.sha256"
    missing = [f"{path}: missing" for path in (text, digest) if not path.is_file()]
    if missing:
        return None, missing
    try:
        run = from_yaml(text.read_text(encoding="utf-8"), check=False)
        known = digest.read_text(encoding="utf-8").strip()
    except (UserError, UnicodeDecodeError) as error:
        return None, [f"{text}: {error}"]
    if config_hash(run) != known:
        return run, [f"{text}: its hash is {config_hash(run)}, config.sha256 says {known}, so one of them was changed"]
    return run, []


def _is_busy(lock: Path) -> bool:
    """Whether a process holds the run's lock."""
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class _Checker:
    """Reads files in several threads: a digest is slower than a disk."""

    def __init__(self, folder: Path, quick: bool, read: Read, pool: ThreadPoolExecutor) -> None:
        self.folder, self.quick, self.read, self.pool = folder, quick, read, pool

    def stage(self, stage: Stage, marker: Path) -> Part:
        name = f"stage {stage.value}"
        try:
            result = read_json(marker)
        except UserError as error:
            return Part(name, problems=(str(error),))
        if not isinstance(result, dict):
            return Part(name, problems=(f"{marker}: not a done-marker. Delete it to run the stage again",))
        files = {self.folder / file: digest for file, digest in result.get("files", {}).items()}
        problems = [text for text in self.pool.map(self._compare, files, files.values()) if text]
        found = [path for path in files if path.is_file()]
        if stage is Stage.teacher:
            problems += self._teacher(result)
            found = list(Path(str(result.get("path"))).glob("*.safetensors"))
        return Part(name, len(found), sum(path.stat().st_size for path in found), tuple(problems), result)

    def checkpoint(self, name: str, folder: Path) -> Part:
        try:
            found = manifest.read_manifest(folder)
        except UserError as error:
            return Part(name, problems=(str(error),))
        files = found["files"]
        lists = self.pool.map(lambda file: self._problems(folder, files, file), files)
        problems = tuple(text for each in lists for text in each)
        return Part(name, len(files), sum(each["bytes"] for each in files.values()), problems, found["meta"])

    def tensors(self, name: str, folder: Path) -> Part:
        """A folder of tensors with their digest in meta.json."""
        try:
            meta = read_json(folder / "meta.json")
            path, digest = folder / "tensors.safetensors", str(meta["sha256"])
        except (OSError, KeyError, TypeError):
            return Part(name, problems=(f"{folder / 'meta.json'}: missing, or without a digest",))
        except UserError as error:
            return Part(name, problems=(str(error),))
        problem = self._compare(path, digest)
        num_bytes = path.stat().st_size if path.is_file() else 0
        return Part(name, 1, num_bytes, (problem,) if problem else (), meta)

    def _compare(self, path: Path, digest: str) -> str | None:
        if not path.is_file():
            return f"{path}: missing"
        if self.quick:
            return None
        same = sha256(path) == digest
        self.read(path.stat().st_size)
        return None if same else f"{path}: changed since it was written"

    def _problems(self, folder: Path, files: dict[str, dict[str, Any]], name: str) -> list[str]:
        found = list(manifest.problems(folder, files, [name], sizes_only=self.quick))
        self.read(files[name]["bytes"])
        return found

    def _teacher(self, result: dict[str, Any]) -> list[str]:
        """Its folder may be on another machine, which only a stage that reads it minds: then nothing is said here."""
        folder = Path(str(result.get("path")))
        if self.quick or not folder.is_dir():
            return []
        try:
            digest = weights_digest(folder)
        except UserError as error:
            return [f"teacher: {error}"]
        self.read(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
        return [] if digest == result.get("digest") else [f"{folder}: other weights than the run was started with"]
