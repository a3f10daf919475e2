"""The part of a checkpoint's tensors that one tensor-parallel rank needs, and nothing else read from the disk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_qad.huggingface.mapping import Kind, Mapping, to_mcore
from nemo_qad.huggingface.source import SafetensorsFolder
from nemo_qad.models.placement import Pieces
from nemo_qad.models.whole import fitted
from nemo_qad.schema import ModelConfig


class Run(NamedTuple):
    """Neighbouring rows (or columns) of a Hugging Face tensor; without a name, so many zeros."""

    name: str | None
    start: int
    stop: int


def read_own(source: SafetensorsFolder, mapping: Mapping, cut: Pieces | None, local_size: int, model: ModelConfig,
             ) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A rank's part of a Megatron-Core tensor, and what was read for it of each Hugging Face tensor.

    Args:
        cut: of the Megatron-Core tensor over ranks, or None where each rank holds all of it.
        local_size: rows of the rank's part, which tells how far a cut vocabulary is padded.
    """
    if cut is None or cut.group.size() == 1:
        parts = {name: source.read(name) for name in mapping.hf}
        whole = to_mcore(mapping, parts, model)
        if mapping.kind is Kind.vocabulary:
            whole = fitted(whole, local_size)
        return whole, {name: [tensor] for name, tensor in parts.items()}
    read: dict[str, list[Tensor]] = {name: [] for name in mapping.hf}
    found: list[Tensor | int] = []
    for run in own_runs(mapping, cut, local_size, model):
        if run.name is None:
            found.append(run.stop - run.start)
            continue
        read[run.name].append(source.read(run.name, cut.dim, slice(run.start, run.stop)))
        found.append(read[run.name][-1])
    like = source.read(mapping.hf[0], 0, slice(0, 1))
    tensors = [t if isinstance(t, Tensor) else like.new_zeros(t, *like.shape[1:]) for t in found]
    return torch.cat(tensors, cut.dim), read


def own_runs(mapping: Mapping, cut: Pieces, local_size: int, model: ModelConfig) -> list[Run]:
    """Where a rank's rows (columns, where `cut.dim` is 1) lie in the Hugging Face tensors, in its order.

    The numbers of the rows go through the same conversion and the same cut as the rows themselves, so this cannot
    disagree with what whole tensors would give.
    """
    numbers, first = {}, 1  # 0 stays for padding
    for name, shape in zip(mapping.hf, mapping.shapes, strict=True):
        numbers[name] = torch.arange(first, first + shape[cut.dim])
        first += shape[cut.dim] + 1  # a gap, so that no run goes from one tensor into the next
    if cut.dim == 1:
        own = cut.own(numbers[mapping.hf[0]].unsqueeze(0)).squeeze(0)
    else:
        whole = to_mcore(mapping, numbers, model)
        if mapping.kind is Kind.vocabulary:
            whole = fitted(whole, local_size * cut.group.size())
        own = cut.own(whole)
    starts = {name: int(values[0]) for name, values in numbers.items()}
    return [_run(run, starts) for run in _consecutive(own)]


def _consecutive(numbers: Tensor) -> Iterator[Tensor]:
    """The longest stretches that count up by one, or are all zero."""
    steps = numbers.diff()
    goes_on = torch.where(numbers[1:] == 0, steps == 0, (steps == 1) & (numbers[:-1] != 0))
    ends = [0, *((~goes_on).nonzero().flatten() + 1).tolist(), len(numbers)]
    for start, stop in pairwise(ends):
        yield numbers[start:stop]


def _run(numbers: Tensor, starts: dict[str, int]) -> Run:
    first = int(numbers[0])
    if first == 0:
        return Run(None, 0, len(numbers))
    name = max((start, name) for name, start in starts.items() if start <= first)[1]
    return Run(name, first - starts[name], first - starts[name] + len(numbers))
