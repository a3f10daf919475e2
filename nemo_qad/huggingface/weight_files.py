"""Which files hold a checkpoint's weights, and the digest of their bytes. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from nemo_qad.errors import UserError

_SHOWN = 8  # names listed in a message


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint in order; those of its index where it has one.

    Raises:
        UserError: the folder, the files or the index are missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index} is not a safetensors index ({error!r}). Copy it again.") from None
        outside = [name for name in listed if name != Path(name).name]
        if outside:
            raise UserError(f"{index} names files of other folders: {listing(outside)}. Copy the checkpoint again.")
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder}: files named by the index are missing: {listing(missing)}")
        return [folder / name for name in listed]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    return [single]


def weights_digest(folder: Path) -> str:
    """sha256 (hex) over the weight files' names and bytes, in order."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def listing(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
