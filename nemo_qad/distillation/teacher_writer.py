"""Writes a teacher's sparse logits to disk, in the layout of `teacher_file.py`, shard by shard.

Legend: B samples of a batch, n samples of a shard, S tokens of a sample, K values of a token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_qad.distillation.teacher_file import INDEX, UNFINISHED, Contents, Part, Records, damage, token_hashes
from nemo_qad.errors import UserError
from nemo_qad.files import disk_errors, flush, read_json, readable, sha256, write_json

SHARD_BYTES = 256 * 2**20
TENSORS = ("indices", "log_prob", "log_tail")


@dataclass(frozen=True)
class Shard:
    """The samples start..stop-1 of a part."""

    part: str
    number: int
    start: int
    stop: int

    @property
    def file(self) -> str:
        return f"{self.part}-{self.number:05d}.safetensors"


class Writer:
    """Writes a folder shard by shard. One that was left unfinished is continued after its whole shards.

    Args:
        multiple: of each part, the samples of one batch; a shard holds whole batches, so that a continued
            writer sees the batches of an uninterrupted one.
    """

    def __init__(
        self, folder: Path, contents: Contents, multiple: dict[str, int], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.contents = folder, contents
        self.shards = [
            shard for name, part in contents.parts.items() for shard in _cut(name, part, multiple[name], shard_bytes)
        ]
        self._whole = self._continue()

    def _continue(self) -> dict[str, dict[str, Any]]:
        """The records of the shards that an interrupted writer of the same contents left whole."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        journal = self.folder / UNFINISHED
        if not journal.exists():
            return {}
        found = read_json(journal)
        records = {r["file"]: r for part in found["parts"].values() for r in part.pop("shards")}
        expected = self.contents.to_json({name: [] for name in self.contents.parts})
        for part in expected["parts"].values():
            del part["shards"]
        if found != expected:
            return {}
        names = {shard.file: shard.stop - shard.start for shard in self.shards}
        return {
            name: record
            for name, record in records.items()
            if names.get(name) == record["num_samples"] and not damage(self.folder, record, digest=True)
        }

    @property
    def missing(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.file not in self._whole]

    @property
    def num_bytes(self) -> int:
        """Bytes that are still to be written, safetensors' headers aside."""
        return sum((s.stop - s.start) * self.contents.parts[s.part].bytes_per_sample for s in self.missing)

    @property
    def num_written(self) -> int:
        """Samples of whole shards."""
        return sum(record["num_samples"] for record in self._whole.values())

    def write(self, shard: Shard, batches: Sequence[dict[str, Tensor]]) -> None:
        """Writes one shard whole, from `indices`, `log_prob`, `log_tail` (of top_k) and `tokens` int64 [B, S].

        Raises:
            UserError: a value is NaN; or the disk is full, and what was whole stays.
        """
        tokens_nS = torch.cat([batch["tokens"].cpu() for batch in batches])
        names = [name for name in TENSORS if name in batches[0]]
        tensors = {name: torch.cat([batch[name].cpu() for batch in batches]).contiguous() for name in names}
        tensors["token_hash"] = token_hashes(tokens_nS)
        self._check(shard, tensors)
        temporary = self.folder / f".{shard.file}.{os.getpid()}.tmp"
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                save_file(tensors, temporary)
                readable(temporary)
                flush(temporary)
                size, digest = temporary.stat().st_size, sha256(temporary)
                os.replace(temporary, self.folder / shard.file)
                flush(self.folder)
            finally:
                temporary.unlink(missing_ok=True)
        record = {"file": shard.file, "num_samples": len(tokens_nS), "num_bytes": size, "sha256": digest}
        self._whole[shard.file] = record
        write_json(self.folder / UNFINISHED, self._index())

    def _check(self, shard: Shard, tensors: dict[str, Tensor]) -> None:
        part = self.contents.parts[shard.part]
        tokens = (shard.stop - shard.start, part.sequence_length)
        values = (*tokens, part.sparse_values)
        shapes = {"indices": values, "log_prob": values, "token_hash": tokens[:1]}
        shapes |= {"log_tail": tokens} if part.kind == "top_k" else {}
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes, shard
        for name in ("log_prob", "log_tail"):
            if name in tensors and bool(tensors[name].isnan().any()):
                raise UserError(
                    f"{self.folder / shard.file}: the teacher's {name} is NaN in samples {shard.start} to "
                    f"{shard.stop - 1}. Its weights are damaged: load them again"
                )

    def _index(self) -> dict[str, Any]:
        records: Records = {name: [] for name in self.contents.parts}
        for shard in self.shards:
            if shard.file in self._whole:
                records[shard.part].append(self._whole[shard.file])
        return self.contents.to_json(records)

    def finish(self) -> None:
        """Makes the folder one that reads: the index, after all shards."""
        assert not self.missing
        write_json(self.folder / INDEX, self._index())
        (self.folder / UNFINISHED).unlink(missing_ok=True)


def _cut(name: str, part: Part, multiple: int, shard_bytes: int) -> list[Shard]:
    size = max(1, shard_bytes // part.bytes_per_sample // multiple) * multiple
    starts = range(0, part.num_samples, size)
    return [Shard(name, i, start, min(start + size, part.num_samples)) for i, start in enumerate(starts)]
