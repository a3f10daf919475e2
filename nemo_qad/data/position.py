"""Where a run stands in its endless stream of samples, and what it costs to go on in another stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nemo_qad.data import indexed
from nemo_qad.data.prepare import PreparedData


@dataclass(frozen=True)
class Stream:
    """An order of samples: it follows from the data, the sequence length and the seed alone.

    digest: of the prepared data; num_samples: of one epoch.
    """

    digest: str
    seed: int
    sequence_length: int
    num_samples: int

    @classmethod
    def of(cls, prepared: PreparedData, sequence_length: int, seed: int) -> Stream:
        num_tokens = indexed.check(prepared.train_prefix).num_tokens
        return cls(prepared.digest, seed, sequence_length, (num_tokens - 1) // sequence_length)

    @property
    def epoch_tokens(self) -> int:
        return self.num_samples * self.sequence_length


@dataclass(frozen=True)
class Position:
    """sample: number of the next one to read in `stream`."""

    stream: Stream
    sample: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Position:
        return cls(Stream(**value["stream"]), int(value["sample"]))


@dataclass(frozen=True)
class Move:
    """sample: where to go on in the new stream; tokens of the present epoch that are read twice, and never."""

    sample: int
    repeated: int
    skipped: int


def moved(old: Position, stream: Stream) -> Move:
    """The place in `stream` that follows on `old`.

    The same text in another order (another sequence length or seed) goes on after as many tokens. The two orders are
    independent permutations, so of the r tokens that an epoch of T still has, r u / T are expected to be among the u
    that were read, and as many unread ones to lie behind. Other text begins at its start: what the old had left of
    its epoch is not read.
    """
    if stream == old.stream:
        return Move(old.sample, 0, 0)
    read = old.sample % old.stream.num_samples * old.stream.sequence_length
    if stream.digest != old.stream.digest:
        return Move(0, 0, old.stream.epoch_tokens - read if read else 0)
    epochs = old.sample // old.stream.num_samples
    within = -(-read // stream.sequence_length)
    left = max(0, stream.epoch_tokens - within * stream.sequence_length)
    expected = round(left * read / stream.epoch_tokens)
    return Move(epochs * stream.num_samples + within, expected, expected)
