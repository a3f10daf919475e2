"""A Hugging Face checkpoint on disk: its weight files, read a tensor or a part of one at a time."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.huggingface.weight_files import listing, weight_files

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """The tensors of all model*.safetensors files of a folder, read one at a time.

    Raises:
        UserError: no such files, a damaged file or index, a tensor that is in two files.
    """

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.folder = folder
        self._readers: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}
        for path in weight_files(folder):
            try:
                reader = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file ({error}). Copy it again.") from None
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                if name in self._readers:
                    raise UserError(f"{path}: tensor {name} is in another file of the folder too. Remove one of them.")
                self._readers[name] = reader

    def names(self) -> set[str]:
        return set(self._readers) | set(self._aliases)

    def alias(self, name: str, of: str) -> None:
        """Reads one tensor under another name too, if there is none of that name."""
        if name not in self._readers and of in self._readers:
            self._aliases[name] = of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """None: not a floating-point number of 16 bits or more."""
        return _FLOATS.get(self._slice(name).get_dtype())

    def read(self, name: str, dim: int = 0, span: slice | None = None) -> Tensor:
        """The tensor, or the part of it that `span` cuts out along `dim`, 0 or 1; no more is read from the disk."""
        stored = self._aliases.get(name, name)
        try:
            if span is None:
                return self._readers[stored].get_tensor(stored)
            return self._slice(name)[span] if dim == 0 else self._slice(name)[:, span]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder}: tensor {name} cannot be read ({error}). Copy the file again.") from None

    def _slice(self, name: str) -> Any:
        stored = self._aliases.get(name, name)
        return self._readers[stored].get_slice(stored)


def tensors_of(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as stored, one at a time.

    Raises:
        UserError: a tensor is missing, or a file cannot be read.
    """
    with ExitStack() as files:
        source = SafetensorsFolder(folder, files)
        for name in names:
            if name not in source.names():
                raise UserError(f"{folder}: tensor {name} is missing. Copy the checkpoint again.")
            yield name, source.read(name)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a checkpoint's tensors: the commonest, and those that differ, by name. As JSON in a run folder."""

    default: str
    others: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.others.get(name, self.default))
        return found


def dtypes_of(folder: Path) -> Dtypes:
    """Read from the files' headers.

    Raises:
        UserError: the folder's files, or a tensor that is not a floating-point number of 16 bits or more.
    """
    with ExitStack() as files:
        source = SafetensorsFolder(folder, files)
        found = {name: source.dtype(name) for name in sorted(source.names())}
    wrong = [name for name, dtype in found.items() if dtype is None]
    if wrong:
        raise UserError(f"{folder}: not a BF16 checkpoint, its dtypes are quantised: {listing(wrong)}")
    spelt = {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}
    default = Counter(spelt.values()).most_common(1)[0][0]
    return Dtypes(default, {name: dtype for name, dtype in spelt.items() if dtype != default})


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype that holds the values of all of them."""
    return functools.reduce(torch.promote_types, dtypes)
