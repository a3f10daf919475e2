"""A set of named tensors on disk with its digest: safetensors, never pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.files import new_folder, read_json, readable, sha256, write_json

TENSORS = "tensors.safetensors"
META = "meta.json"


def save_tensors(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Writes `folder` whole: the tensors, and `meta` with their SHA-256."""
    with new_folder(folder) as temporary:
        # Copies: safetensors refuses tensors that share memory, such as views of one buffer.
        save_file({k: t.detach().contiguous().clone() for k, t in tensors.items()}, temporary / TENSORS)
        readable(temporary / TENSORS)
        write_json(temporary / META, {**meta, "sha256": sha256(temporary / TENSORS)})


def check_tensors(folder: Path) -> dict[str, Any]:
    """The meta of what `save_tensors` wrote.

    Raises:
        UserError: a file is missing, truncated or changed since it was written.
    """
    for name in (TENSORS, META):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing. Delete {folder} and run again")
    meta: dict[str, Any] = read_json(folder / META)
    if sha256(folder / TENSORS) != meta["sha256"]:
        raise UserError(
            f"{folder / TENSORS}: changed or truncated since it was written. Delete {folder} and run again"
        )
    return meta


def load_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `save_tensors` wrote; raises as `check_tensors`."""
    meta = check_tensors(folder)
    try:
        return load_file(folder / TENSORS), meta
    except SafetensorError as error:
        raise UserError(f"{folder / TENSORS}: {error}. Delete {folder} and run again") from None
