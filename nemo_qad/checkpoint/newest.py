"""Which checkpoint a run continues from: the newest whole one. A damaged one is named and the one before is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_qad import agreement
from nemo_qad.checkpoint import manifest
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.errors import UserError


@dataclass(frozen=True)
class Found:
    """A sound checkpoint and what was written beside its tensors."""

    step: int
    folder: Path
    meta: dict[str, Any]


def newest_good(folders: StepFolders, say: Callable[[str], None], remedy: str) -> Found | None:
    """The newest whole checkpoint, or None where there never was one; a collective call.

    Its files are read once, each by one of the ranks, and compared with the digests that were written.

    Args:
        remedy: what to do where none is whole.

    Raises:
        UserError: there are checkpoints and none is whole. Training never starts anew behind one's back.
    """
    steps = agreement.first_alone(folders.steps)
    trouble = ""
    for step in reversed(steps):
        folder = folders.path(step)
        found, trouble = _look(folder)
        if found is not None:
            return Found(step, folder, found["meta"])
        say(f"Warning: {trouble}. The checkpoint of step {step} is passed over")
    if steps:
        raise UserError(
            f"{trouble}. None of the {len(steps)} checkpoints in {folders.root} is whole. Bring one back, or {remedy}"
        )
    return None


def _look(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """(manifest, "") of a whole checkpoint, otherwise (None, what is wrong)."""

    def read() -> tuple[dict[str, Any] | None, str]:
        try:
            return manifest.read_manifest(folder), ""
        except UserError as error:
            return None, str(error)

    found, trouble = agreement.first_alone(read)
    if found is None:
        return None, trouble
    mine = sorted(found["files"])[agreement.number() :: agreement.count()]
    wrong = [text for each in agreement.of_all(list(manifest.problems(folder, found["files"], mine))) for text in each]
    return (None, wrong[0]) if wrong else (found, "")
