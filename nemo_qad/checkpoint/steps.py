"""Checkpoints of a training run: FOLDER/step-NNNNNN, the newest good one wins, the last two are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_qad.checkpoint.tensors import load_tensors, save_tensors
from nemo_qad.errors import UserError
from nemo_qad.files import require_space

NUM_KEPT = 2


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def save_step(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Saves one step durably, then removes all but the newest `NUM_KEPT`."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    require_space(folder, int(1.1 * size), f"the checkpoint of step {step}")
    save_tensors(folder / f"step-{step:06d}", tensors, {**meta, "step": step})
    for old in _steps(folder)[:-NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load_newest(
    folder: Path, warn: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that reads whole, or None where there is none.

    A damaged one is reported through `warn` and the one before it is taken.

    Raises:
        UserError: there are checkpoints and all are damaged. Training never starts anew behind one's back.
    """
    candidates = _steps(folder)
    for path in reversed(candidates):
        try:
            return load_tensors(path)
        except UserError as error:
            warn(f"{error}. Trying the checkpoint before it")
    if candidates:
        raise UserError(
            f"{folder}: none of its {len(candidates)} checkpoints can be read. Delete the folder to start anew"
        )
    return None
