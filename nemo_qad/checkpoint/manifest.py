"""What a checkpoint folder must hold to be whole: checkpoint.json names every file with its size and SHA-256.

checkpoint.json is written last but one (the folder's new name is last), so a folder without it was never finished.
No torch: a login node can look at a run. Nothing of a checkpoint is unpickled before its pickles were read through for
the few names that Megatron's metadata needs.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_qad.errors import UserError
from nemo_qad.files import read_json, sha256, write_json

MANIFEST = "checkpoint.json"
METADATA = ".metadata"  # torch.distributed.checkpoint's index of the tensors, a pickle
FORMAT = 1

# (module, names) that a pickled torch.distributed.checkpoint Metadata is made of.
_ALLOWED: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "StorageMeta"},
    "torch.distributed.checkpoint.storage": {"StorageMeta"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.serialization": {"_get_layout"},
    "torch._C": {"_get_layout"},
    "torch": {
        "Size", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16",
        "int32", "int64", "bool",
    },
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _StandIn:
    """Takes the place of every class of an index while its names are looked at: nothing is imported or called."""

    def __new__(cls, *arguments: Any, **named: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, set()):
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return _StandIn


def describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def file_names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def write_manifest(folder: Path, files: dict[str, dict[str, Any]], meta: dict[str, Any]) -> None:
    content = {"format": FORMAT, "meta": meta, "files": dict(sorted(files.items()))}
    write_json(folder / MANIFEST, {**content, "sha256": _digest(content)})


def _digest(content: dict[str, Any]) -> str:
    """Of the manifest itself, without its digest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, its files not yet looked at.

    Raises:
        UserError: it is missing, not ours, of a newer format, or names files outside the folder.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{path}: missing, so the checkpoint was never finished or is damaged")
    found = read_json(path)
    version = found.get("format") if isinstance(found, dict) else None
    if not isinstance(version, int) or not isinstance(found.get("files"), dict) or "meta" not in found:
        raise UserError(f"{path}: not a checkpoint of nemo_qad")
    if version > FORMAT:
        raise UserError(f"{path}: format {version} is newer than this program's {FORMAT}. Update nemo_qad")
    if found.pop("sha256", None) != _digest(found):
        raise UserError(f"{path}: changed since it was written")
    for name in found["files"]:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise UserError(f"{path}: names {name}, which is outside the checkpoint")
    return dict(found)


def problems(
    folder: Path, files: dict[str, dict[str, Any]], names: Iterable[str], *, sizes_only: bool = False
) -> Iterator[str]:
    """What is wrong with the files `names` of a manifest: missing, another size, other bytes, a strange pickle."""
    for name in names:
        path, known = folder / name, files[name]
        if not path.is_file():
            yield f"{path}: missing"
        elif (size := path.stat().st_size) != known["bytes"]:
            yield f"{path}: {size:,} bytes, {known['bytes']:,} were written"
        elif not sizes_only and sha256(path) != known["sha256"]:
            yield f"{path}: changed since it was written"
        elif path.name == METADATA and (strange := _strange(path)):
            yield f"{path}: {strange}, which an index of tensors has no use for"


def _strange(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            _Restricted(file).load()
    except Exception as error:
        return str(error) or type(error).__name__
    return None
