"""A teacher's sparse logits on disk, so that a student can be trained where the teacher is not.

Legend: B samples of a batch, n samples of a shard, S tokens of a sample, K values of a token.

    FOLDER/index.json                   what made it; samples, sizes and SHA-256 of each shard; written last
           train-00000.safetensors ...  indices int32 [n, S, K], log_prob float32 [n, S, K],
           validation-00000 ...         log_tail float32 [n, S] (top_k alone), token_hash int64 [n]
           unfinished.json              while it is written: the index of the shards that are whole

Values are those of `distillation.sparse_kl.SparseLogits`. Sample i of "train" is the i-th that QAD reads, sample
i of "validation" the i-th of the validation text. A file made for a longer run serves a shorter one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.files import sha256

FORMAT = 1  # raise it when anything here changes what is written
INDEX = "index.json"
UNFINISHED = "unfinished.json"  # of teacher_writer.py
# Of the fields of `Contents` and `Part`: the setting that gives each, for messages.
SETTINGS = {
    "tokenizer": "data.name, data.path, data.seed, model.vocab_size",
    "data": "data.name, data.path, data.seed",
    "teacher": "teacher.path, teacher.steps, teacher.seed",
    "vocab_size": "model.vocab_size",
    "seed": "seed",
    "kind": "qad.loss",
    "sparse_values": "qad.sparse_values",
    "temperature": "qad.temperature",
    "train.sequence_length": "qad.sequence_length",
    "train.num_samples": "qad.steps, qad.global_batch_size",
    "validation.sequence_length": "evaluation.sequence_length",
    "validation.num_samples": "qad.validation_samples, evaluation.micro_batch_size",
}

Records = dict[str, list[dict[str, Any]]]  # of each part, its shards: file, num_samples, num_bytes, sha256


@dataclass(frozen=True)
class Part:
    """`num_samples` samples of `sequence_length` tokens; kind: "top_k" or "sampled", of `sparse_values` each."""

    kind: str
    sparse_values: int
    temperature: float
    sequence_length: int
    num_samples: int

    @property
    def bytes_per_sample(self) -> int:
        tail = 4 if self.kind == "top_k" else 0
        return self.sequence_length * (8 * self.sparse_values + tail) + 8


@dataclass(frozen=True)
class Contents:
    """What a file is made of. tokenizer, data, teacher: SHA-256, hex. parts: "train" and "validation"."""

    tokenizer: str
    data: str
    teacher: str
    vocab_size: int
    seed: int
    parts: dict[str, Part]

    def to_json(self, shards: Records) -> dict[str, Any]:
        parts = {name: {**asdict(part), "shards": shards[name]} for name, part in self.parts.items()}
        digests = {name: getattr(self, name) for name in ("tokenizer", "data", "teacher")}
        return {"format": FORMAT, "digests": digests, "vocab_size": self.vocab_size, "seed": self.seed, "parts": parts}


class TeacherFile:
    """A finished folder, checked against what a run needs, read a batch at a time.

    Args:
        contents: what the run needs.
        remedy: a sentence for messages, how to get a folder that fits.
    Raises:
        UserError: the folder was made of or for something else, or a shard is missing or truncated.
    """

    def __init__(self, folder: Path, contents: Contents, remedy: str) -> None:
        self.folder, self.contents, self.remedy = folder, contents, remedy
        index = self._read_index()
        try:
            self._compare(index)
            self._records: Records = {name: list(index["parts"][name]["shards"]) for name in contents.parts}
            self._check_shards(index)
        except (KeyError, TypeError, AttributeError) as error:
            raise self._refused(f"{INDEX} is incomplete or damaged ({error!r})") from None
        self._checked: set[str] = set()
        self._open: dict[str, tuple[str, Any]] = {}  # of each part, the shard that was read last

    def _refused(self, problem: str) -> UserError:
        return UserError(f"{self.folder}: {problem}. {self.remedy}")

    def _read_index(self) -> Any:
        path = self.folder / INDEX
        if not path.is_file():
            raise self._refused(f"no {INDEX} there, so it is not a finished folder of a teacher's sparse logits")
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise self._refused(f"{INDEX} is not JSON ({error})") from None
        version = index.get("format") if isinstance(index, dict) else None
        if version != FORMAT:
            raise self._refused(f"format={version!r}, and this program reads format {FORMAT}")
        return index

    def _compare(self, index: dict[str, Any]) -> None:
        """Refuses a folder made of or for something else, naming every field that differs."""
        ours = self.contents
        pairs = {name: (index["digests"][name], getattr(ours, name)) for name in ("tokenizer", "data", "teacher")}
        pairs |= {name: (index[name], getattr(ours, name)) for name in ("vocab_size", "seed")}
        for name, part in ours.parts.items():
            there = index["parts"][name]
            for field in ("kind", "sparse_values", "temperature", "sequence_length"):
                pairs[f"{name}.{field}"] = (there[field], getattr(part, field))
            if there["num_samples"] < part.num_samples:
                pairs[f"{name}.num_samples"] = (there["num_samples"], f"at least {part.num_samples}")
        differences = [
            f"{field} is {_short(there)} there and {_short(here)} in this run ({_setting(field)})"
            for field, (there, here) in pairs.items()
            if there != here
        ]
        if differences:
            raise self._refused("made for something else: " + "; ".join(differences))

    def _check_shards(self, index: dict[str, Any]) -> None:
        for name, records in self._records.items():
            for record in records:
                if problem := damage(self.folder, record, digest=False):
                    raise self._refused(problem)
            if sum(record["num_samples"] for record in records) != index["parts"][name]["num_samples"]:
                raise self._refused(f"the shards of {name} in {INDEX} do not hold its num_samples")

    def read(self, part: str, start: int, tokens_BS: Tensor) -> dict[str, Tensor]:
        """The samples start..start+B-1, whose tokens must be `tokens_BS` (int64).

        Returns teacher_indices int32 [B, S, K], teacher_log_prob float32 [B, S, K] and, of top_k,
        teacher_log_tail float32 [B, S], on CPU.

        Raises:
            UserError: the tokens are others, or a shard changed since it was written.
        """
        stop, first = start + len(tokens_BS), 0
        pieces: list[dict[str, Tensor]] = []
        for record in self._records[part]:
            last = first + record["num_samples"]
            if first < stop and start < last:
                pieces.append(self._slice(part, record, max(start, first) - first, min(stop, last) - first))
            first = last
        assert first >= stop, f"{part} has {first} samples, {stop} are asked for"
        batch = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        ours, theirs = token_hashes(tokens_BS).tolist(), batch.pop("token_hash").tolist()
        for offset, (here, there) in enumerate(zip(ours, theirs, strict=True)):
            if here != there:
                raise self._refused(
                    f"sample {start + offset} of {part}: token_hash={there} there and {here} in this run: the "
                    "samples of this run are others, or in another order"
                )
        return {f"teacher_{name}": tensor for name, tensor in batch.items()}

    def _slice(self, part: str, record: dict[str, Any], start: int, stop: int) -> dict[str, Tensor]:
        name = record["file"]
        try:
            if self._open.get(part, ("", None))[0] != name:
                if name not in self._checked and (problem := damage(self.folder, record, digest=True)):
                    raise self._refused(problem)
                self._checked.add(name)
                self._open[part] = (name, safe_open(self.folder / name, framework="pt", device="cpu"))
            reader = self._open[part][1]
            return {key: reader.get_slice(key)[start:stop] for key in sorted(reader.keys())}
        except (SafetensorError, OSError) as error:
            raise self._refused(f"{name} cannot be read ({error})") from None


def token_hashes(tokens_BS: Tensor) -> Tensor:
    """int64 [B]: 64 bits of BLAKE2b over each sample's ids as little-endian int64."""
    rows = tokens_BS.cpu().to(torch.int64).contiguous().numpy().astype("<i8")
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.int64)


def damage(folder: Path, record: dict[str, Any], *, digest: bool) -> str | None:
    """What is wrong with a shard, by its size and, where asked for, its digest."""
    name, path = record["file"], folder / record["file"]
    if Path(name).name != name:
        return f"{name!r} is not the name of a file in this folder"
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != record["num_bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {record['num_bytes']}: it is truncated or changed"
    if digest and (found := sha256(path)) != record["sha256"]:
        return f"{name} changed since it was written (sha256={found[:12]} instead of {record['sha256'][:12]})"
    return None


def _setting(field: str) -> str:
    return SETTINGS.get(field) or SETTINGS[field.rpartition(".")[2]]


def _short(value: object) -> str:
    """Enough of a digest to tell two apart."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
