"""The checkpoint folders of a run: ROOT/step-NNNNNN, each whole, and ROOT/latest, the name of the newest. No torch.

A checkpoint is written into a hidden folder and gets its name when all of it is on disk. So a kill at any moment leaves
the ones before as they were and a hidden rest that the next save removes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from nemo_qad.files import disk_errors, flush, replace_text

LATEST = "latest"
_STEP = re.compile(r"step-(\d{6,})")
_REST = re.compile(r"\.step-\d+\.(tmp|old)")


class StepFolders:
    """One writer at a time: the first rank of the run that owns the folder.

    Args:
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, root: Path, keep: int = 2) -> None:
        self.root, self.keep = root, keep

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(int(m[1]) for path in self.root.iterdir() if path.is_dir() and (m := _STEP.fullmatch(path.name)))

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def hidden(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it gets its name."""
        return self.root / f".{self.path(step).name}.tmp"

    def latest(self) -> int | None:
        """The step that ROOT/latest names, or None where there is none that can be read."""
        try:
            match = _STEP.fullmatch((self.root / LATEST).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def unfinished(self) -> list[Path]:
        """What killed saves have left."""
        return sorted(path for path in self.root.glob(".step-*") if _REST.fullmatch(path.name))

    def new(self, step: int) -> Path:
        """An empty hidden folder to write the checkpoint of `step` into; removes what killed saves have left."""
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.clean()
            self.hidden(step).mkdir()
        return self.hidden(step)

    def clean(self) -> None:
        """Removes what killed saves have left. What stood aside for its successor comes back if that is gone."""
        for path in self.unfinished():
            target = self.root / path.name.removeprefix(".").rpartition(".")[0]
            if path.suffix == ".old" and not target.exists():
                os.rename(path, target)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, step: int) -> Path:
        """Gives the hidden folder of `step`, whose files are flushed, its name, and moves ROOT/latest to it."""
        target, folder = self.path(step), self.hidden(step)
        old = folder.with_suffix(".old")
        with disk_errors(self.root):
            flush(folder)
            if target.exists():  # damaged, or this step would not have been made again
                os.rename(target, old)
            os.rename(folder, target)
            flush(self.root)
            replace_text(self.root / LATEST, f"{target.name}\n")
        shutil.rmtree(old, ignore_errors=True)
        return target

    def prune(self, step: int, warn: Callable[[str], None]) -> None:
        """After `step` was published: keeps the newest `keep` up to it. Those beyond it were passed over as damaged
        when the run was continued, and would be taken for newer ones. What cannot be deleted is only said."""
        found = self.steps()
        kept = [each for each in found if each <= step][-max(1, self.keep) :]
        for each in found:
            if each in kept:
                continue
            try:
                shutil.rmtree(self.path(each))
            except OSError as error:
                warn(f"Warning: {self.path(each)} cannot be deleted ({error.strerror}); delete it yourself")
