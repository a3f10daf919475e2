"""Batches from Megatron's .bin/.idx files, through Megatron's own GPTDataset.

The order of the samples depends on the data, the sequence length and the seed alone, never on how many are
asked for or on the number of ranks: epoch e is one GPTDataset of one epoch with a seed drawn from (seed, e).
So a run that is resumed, or made longer, reads exactly the samples that a straight run reads.

B micro-batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch import Tensor

from nemo_qad.data import indexed
from nemo_qad.data.prepare import PreparedData
from nemo_qad.errors import UserError

Batch = dict[str, Tensor]
HELD_OUT_SEED = 0  # held-out text is read in one order, whatever the seed of the run


@dataclass(frozen=True)
class _TokenizerIds:
    """What GPTDataset asks of a tokenizer. The pad id occurs in no data, so no token is ever masked."""

    vocab_size: int
    eod: int = 0
    pad: int = -1
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


def training_batches(
    prepared: PreparedData,
    *,
    sequence_length: int,
    micro_batch_size: int,
    num_samples: int,
    seed: int,
    start_sample: int = 0,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
) -> Iterator[Batch]:
    """Micro-batches of the training text: tokens and labels int64 [B, S], loss_mask float32 [B, S].

    The samples start_sample..num_samples-1 of an endless stream are dealt out micro-batch by micro-batch:
    with R data-parallel ranks, micro-batch m of rank r is the (m R + r)-th group of B samples. The text is
    read again, in another order, when it ends.

    Args:
        num_samples: where the stream stops, counted from sample 0 and not from `start_sample`.
    Raises:
        UserError: the text is shorter than one sample, a file is damaged, or an id is outside the vocabulary.
    """
    stride = micro_batch_size * data_parallel_size
    if (num_samples - start_sample) % stride:
        raise ValueError(f"{num_samples - start_sample} samples do not make whole groups of {stride}")
    pair = indexed.check(prepared.train_prefix)
    return _deal(
        _Epochs(pair, prepared.vocab_size, sequence_length, seed),
        range(start_sample + data_parallel_rank * micro_batch_size, num_samples, stride),
        micro_batch_size,
    )


def held_out_batches(
    prepared: PreparedData, *, sequence_length: int, micro_batch_size: int, num_samples: int
) -> list[Batch]:
    """A fixed subset of the held-out text, the same in every run on the same data; the last batch may be short.

    Raises:
        UserError: the held-out text has fewer than `num_samples` samples, or its files are damaged.
    """
    epochs = _Epochs(indexed.check(prepared.held_out_prefix), prepared.vocab_size, sequence_length, HELD_OUT_SEED)
    if num_samples > epochs.num_samples:
        raise UserError(
            f"{num_samples} held-out samples of {sequence_length} tokens are asked for, but "
            f"{prepared.held_out_prefix} has {epochs.num_samples}: lower evaluation.held_out_samples or "
            "qad.validation_samples, shorten the sequences, or raise data.held_out_fraction."
        )
    starts = range(0, num_samples, micro_batch_size)
    return [epochs.batch(range(s, min(s + micro_batch_size, num_samples))) for s in starts]


def unigram_loss(prepared: PreparedData) -> float:
    """Nats a held-out token under the training text's token counts plus one: what a model must beat."""
    train = indexed.check(prepared.train_prefix).tokens()
    held_out = indexed.check(prepared.held_out_prefix).tokens()
    counts = np.bincount(train, minlength=prepared.vocab_size) + 1.0
    log_probability = np.log(counts) - math.log(counts.sum())
    return float(-log_probability[held_out].mean())


def _deal(epochs: _Epochs, starts: range, micro_batch_size: int) -> Iterator[Batch]:
    for start in starts:
        yield epochs.batch(range(start, start + micro_batch_size))


class _Epochs:
    """An endless, randomly addressable stream of samples over one pair; one epoch's index is kept at a time."""

    def __init__(self, pair: indexed.Pair, vocab_size: int, sequence_length: int, seed: int) -> None:
        self.num_samples = (pair.num_tokens - 1) // sequence_length
        if self.num_samples < 1:
            raise UserError(
                f"{indexed.path_of(pair.prefix, '.bin')} has {pair.num_tokens} tokens, too few for one sample "
                f"of {sequence_length} + 1: give more text, or a shorter sequence_length."
            )
        self.pair = pair
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.seed = seed
        self.text = IndexedDataset(str(pair.prefix), multimodal=False, mmap=True)
        self.epoch = -1
        self.dataset: GPTDataset | None = None

    def batch(self, numbers: range) -> Batch:
        samples = [self._sample(number) for number in numbers]
        batch = {name: torch.stack([s[name] for s in samples]) for name in ("tokens", "labels", "loss_mask")}
        for name in ("tokens", "labels"):
            # An id outside the vocabulary would otherwise be a crash, or worse, inside the embedding.
            if int(batch[name].min()) < 0 or int(batch[name].max()) >= self.vocab_size:
                indexed.check_ids(self.pair, self.vocab_size)
        return batch

    def _sample(self, number: int) -> dict[str, Tensor]:
        epoch, position = divmod(number, self.num_samples)
        if epoch != self.epoch or self.dataset is None:
            self.dataset = self._build(epoch)
            self.epoch = epoch
        return self.dataset[position]

    def _build(self, epoch: int) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0]),
            sequence_length=self.sequence_length,
            blend=([str(self.pair.prefix)], None),
            split="1",
            # Empty, not None: every rank builds the index in memory, in milliseconds, and no rank waits for
            # or reads another's half-written files.
            path_to_cache="",
            tokenizer=_TokenizerIds(self.vocab_size),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = np.flatnonzero(self.pair.lengths).astype(np.int32)  # empty ones must not change the order
        with _quiet():
            return GPTDataset(self.text, str(self.pair.prefix), documents, None, Split.train, config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences GPTDataset's warning that nothing is cached, which is meant here."""
    logger = logging.getLogger("megatron.core.datasets.gpt_dataset")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
