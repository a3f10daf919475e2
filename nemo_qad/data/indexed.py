"""Megatron's .bin/.idx pair: written by Megatron's builder, checked here before Megatron reads it.

Megatron maps both files into memory and trusts them; a truncated file fails hours later, or reads nonsense.
The .idx holds a header, then per sequence an int32 length and an int64 byte offset, then int64 document
bounds; the .bin holds the tokens and nothing else. So every size can be checked against every other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_qad.errors import UserError

HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token type, sequences, document bounds
MAGIC = b"MMIDIDX\x00\x00"
TOKEN_TYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
REMEDY = "Copy or prepare both files of the pair again."


@dataclass(frozen=True)
class Pair:
    """A checked pair. `lengths`: tokens of every sequence, int32 [sequences]."""

    prefix: Path
    dtype: type[np.integer]
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def tokens(self) -> np.ndarray:
        """All tokens in file order, mapped read-only."""
        return np.memmap(path_of(self.prefix, ".bin"), dtype=self.dtype, mode="r")

    def documents(self) -> list[np.ndarray]:
        """The sequences in file order, mapped read-only."""
        return np.split(self.tokens(), np.cumsum(self.lengths, dtype=np.int64)[:-1])


def path_of(prefix: Path, ending: str) -> Path:
    """The prefix with `.bin` or `.idx` appended; a dot in the prefix's own name is kept."""
    return prefix.with_name(prefix.name + ending)


def write(prefix: Path, documents: Iterable[np.ndarray], vocab_size: int) -> None:
    """Writes the pair, one sequence a document, in the smallest token type that Megatron picks for V ids."""
    # Here, not at the top: Megatron takes seconds to import, and a cached data set does not need it.
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(path_of(prefix, ".bin")), dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(path_of(prefix, ".idx")))


def check(prefix: Path) -> Pair:
    """Reads the .idx and compares every size in it with the files.

    Raises:
        UserError: a file is missing, empty or truncated, is not of this format, or the two do not belong
            together; the message names the file, the sizes and the remedy.
    """
    index, data = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    for path in (index, data):
        if not path.is_file():
            raise UserError(f"{path} is missing. {REMEDY}")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty. {REMEDY}")
    dtype, num_sequences, num_bounds = _read_header(index)
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    size = index.stat().st_size
    if size == expected + num_sequences:
        raise UserError(f"{index} has a mode for every sequence (multimodal data): not supported, text only.")
    if size != expected:
        raise UserError(f"{index} has {size} bytes, its header says {expected}: damaged. {REMEDY}")
    if num_sequences == 0:
        raise UserError(f"{index} lists no sequences: prepare it again from text that is not empty.")
    lengths, offsets, bounds = _read_arrays(index, num_sequences, num_bounds)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    if lengths.min() < 0 or offsets[0] != 0 or (offsets[1:] != ends[:-1]).any():
        raise UserError(f"{index}: the byte offsets do not follow from the lengths: damaged. {REMEDY}")
    if num_bounds == 0 or bounds[-1] != num_sequences:
        raise UserError(f"{index}: the last document does not end at the last sequence: damaged. {REMEDY}")
    if data.stat().st_size != ends[-1]:
        raise UserError(
            f"{data} has {data.stat().st_size} bytes, {index.name} accounts for {ends[-1]}: truncated, or not "
            f"of this pair. {REMEDY}"
        )
    return Pair(prefix, dtype, lengths)


def _read_header(index: Path) -> tuple[type[np.integer], int, int]:
    with index.open("rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise UserError(f"{index} has {len(header)} bytes, less than its header: truncated. {REMEDY}")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if magic != MAGIC or version != 1:
        raise UserError(f"{index} is not a Megatron index of version 1: not supported. {REMEDY}")
    if code not in TOKEN_TYPES:
        raise UserError(f"{index}: token type {code} is not a whole number type: not supported. {REMEDY}")
    return TOKEN_TYPES[code], num_sequences, num_bounds


def _read_arrays(index: Path, num_sequences: int, num_bounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with index.open("rb") as stream:
        stream.seek(HEADER.size)
        lengths = np.fromfile(stream, np.int32, num_sequences)
        offsets = np.fromfile(stream, np.int64, num_sequences)
        bounds = np.fromfile(stream, np.int64, num_bounds)
    return lengths, offsets, bounds


def check_ids(pair: Pair, vocab_size: int, max_tokens: int | None = None) -> None:
    """Checks that every token id is in [0, V), of the first `max_tokens` tokens where that is given.

    Raises:
        UserError: names the file, the position and the id.
    """
    chunk = 1 << 24
    tokens = pair.tokens()[:max_tokens]
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        if part.min() >= 0 and part.max() < vocab_size:
            continue
        position = int(np.argmax((part < 0) | (part >= vocab_size)))
        raise UserError(
            f"{path_of(pair.prefix, '.bin')}: token {start + position} has id {part[position]}, but "
            f"model.vocab_size={vocab_size}: use the tokenizer that the model was made with."
        )
