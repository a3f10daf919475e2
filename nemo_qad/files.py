"""Folders and files that are whole or absent: written beside their place, flushed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_qad.errors import UserError


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, need: int, what: str) -> None:
    """Raises UserError when less than `need` bytes are free where `folder` is or will be."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need:
        raise UserError(
            f"{folder}: {what} needs {need / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free. "
            "Free some room, or choose another disk with output_dir=FOLDER"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full or read-only disk into a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{folder}: the disk is full. What was finished before is kept; free some room and run "
                "the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(f"{folder}: cannot be written ({error.strerror}). Choose run_dir=FOLDER") from error
        raise


def flush(path: Path) -> None:
    """fsync of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable(path: Path) -> None:
    """Gives a file the usual permissions: safetensors writes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes `target` on success and vanishes on any error."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        bring_back(target)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for path in temporary.rglob("*"):
                flush(path)
            # An older folder steps aside: a rename does not replace a folder that holds something.
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            if target.exists():
                os.rename(target, old)
            os.rename(temporary, target)
            flush(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def bring_back(target: Path) -> None:
    """Gives a folder that stepped aside its name again, where a kill came before its successor had it.

    For the only process that writes `target`; removes what it had begun when it was killed.
    """
    for rest in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(rest, ignore_errors=True)
    for old in sorted(target.parent.glob(f".{target.name}.*.old")):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, target)


def replace_text(path: Path, text: str) -> None:
    """Writes a file in one step: a temporary sibling, flushed to disk, renamed over the old one.

    Raises UserError where the disk is full or cannot be written; the old file is then still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
            os.replace(temporary, path)
            flush(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Atomic and durable; readable by a person."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Raises UserError when the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}). Delete it and run again") from None
