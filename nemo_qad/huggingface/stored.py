"""A checkpoint folder as its bytes stand: where tensors lie, and what their codes mean. No torch.

Shares no code with the exporter or the training numerics: its own safetensors reader, its own tables of E2M1 and E4M3
built from the definitions of the formats, numpy for arithmetic.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from nemo_qad.errors import UserError

E4M3_NAN = 0x7F
BLOCK = 16
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_DTYPES = {"U8": np.uint8, "F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: file, dtype as safetensors spells it, shape, first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def itemsize(self) -> int:
        return int(np.dtype(_DTYPES[self.dtype]).itemsize)

    def array(self) -> np.ndarray:
        """Memory-mapped raw values; FP8 as uint8, BF16 as uint16."""
        if not self.shape:
            return np.fromfile(self.file, _DTYPES[self.dtype], 1, offset=self.start).reshape(())
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.start, self.shape)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Some rows, read from the file into memory of their own: pages of a mapped file would count as memory."""
        row = math.prod(self.shape[1:])
        start = self.start + first * row * self.itemsize
        values = np.fromfile(self.file, _DTYPES[self.dtype], (last - first) * row, offset=start)
        return values.reshape(last - first, *self.shape[1:])


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the safetensors files in a folder; the index, if any, must agree with them.

    Raises:
        UserError: no file, a header that cannot be read, a tensor beyond the end of its file, twice, or of
            a dtype that the format does not have.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: holds no .safetensors file. Run the export stage again")
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _read_header(file):
            if name in entries:
                raise UserError(f"{name} is in {entries[name].file.name} and in {file.name}")
            entries[name] = entry
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        actual = {name: entry.file.name for name, entry in entries.items()}
        if listed != actual:
            wrong = sorted(n for n in listed.keys() | actual.keys() if listed.get(n) != actual.get(n))
            raise UserError(f"{index}: disagrees with the files about {', '.join(wrong[:5])}")
    return entries


def _read_header(file: Path) -> Iterator[tuple[str, Entry]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise UserError(f"{file}: truncated, its header does not fit in {size} bytes")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise UserError(f"{file}: its header is not JSON ({error})") from None
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        first, last = fields["data_offsets"]
        if dtype not in _DTYPES:
            raise UserError(f"{file}: {name} has dtype {dtype}, which this checkpoint format does not use")
        if last - first != int(np.prod(shape, dtype=np.int64)) * np.dtype(_DTYPES[dtype]).itemsize:
            raise UserError(
                f"{file}: {name} has {last - first} bytes, which its shape {shape} does not explain"
            )
        if 8 + length + last > size:
            raise UserError(f"{file}: truncated, {name} ends beyond its {size} bytes")
        yield name, Entry(file, dtype, shape, 8 + length + first)


def is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in {"weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"}


def decode(entries: dict[str, Entry], name: str, first: int, last: int) -> np.ndarray:
    """FP32 values of the rows first..last-1 of a stored weight of at least one dimension."""
    entry, module = entries[name], name.removesuffix(".weight")
    raw = entry.rows(first, last)
    if entry.dtype == "F32":
        return raw
    if entry.dtype == "F16":
        return raw.astype(np.float32)
    if entry.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if entry.dtype == "F8_E4M3":
        return _e4m3_table()[raw] * entries[f"{module}.weight_scale"].array()
    scales = np.take(_e4m3_table(), entries[f"{module}.weight_scale"].rows(first, last))
    step = scales * entries[f"{module}.weight_scale_2"].array()
    pairs = np.take(_pairs(), raw).view(np.float32)
    return (pairs.reshape(*step.shape, BLOCK) * step[..., None]).reshape(*raw.shape[:-1], -1)


@cache
def _pairs() -> np.ndarray:
    """The two FP32 values of each byte of E2M1 codes, low nibble first, as one number of 64 bits."""
    byte = np.arange(256)
    return np.ascontiguousarray(np.stack([_E2M1[byte & 0xF], _E2M1[byte >> 4]], -1)).view(np.uint64).reshape(256)


@cache
def _e4m3_table() -> np.ndarray:
    """FP32 value of each of the 256 E4M3 codes: sign, 4 exponent bits (bias 7), 3 fraction bits."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 0xF, (code & 7) / 8.0
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    magnitude[(code & 0x7F) == E4M3_NAN] = np.nan
    return np.where(code >= 128, -magnitude, magnitude).astype(np.float32)
