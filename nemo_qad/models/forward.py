"""A model's hidden states over whole sequences, without gradients, in any parallel layout.

Every rank calls with the same tokens and takes part. Of a pipeline the last stage alone has hidden states, the others
get None. B batch, S whole sequence, L = S / CP local tokens, D hidden, V true vocabulary, v output columns of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_qad.models.build import bare, forward_hidden
from nemo_qad.models.context import Documents, join_sequence, split_sequence


@dataclass(frozen=True)
class Ranks:
    """The groups of a model, and what a rank is to them."""

    groups: Any

    @classmethod
    def of(cls, module: torch.nn.Module) -> Ranks:
        return cls(bare(module).pg_collection)

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    def from_last_stage(self, value: Any) -> Any:
        """A picklable value of the last pipeline stage, on all stages; a collective call of the pipeline."""
        if self.groups.pp.size() == 1:
            return value
        box = [value]
        last = dist.get_global_rank(self.groups.pp, self.groups.pp.size() - 1)
        dist.broadcast_object_list(box, src=last, group=self.groups.pp)
        return box[0]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over data-parallel ranks of what the last pipeline stage measured, the same to the last bit on all
        ranks; a collective call of them."""
        group = self.groups.dp
        every: list[Any] = [list(values)]
        if group.size() > 1:
            every = [None] * group.size()
            dist.all_gather_object(every, list(values), group=group)
        return self.from_last_stage([sum(column) for column in zip(*every, strict=True)])

    def merged(self, found: dict[int, Any]) -> dict[int, Any]:
        """What data-parallel ranks found, each of its own numbers, on all ranks of the last stage and from there on
        all; a collective call."""
        group, every = self.groups.dp, [found]
        if group.size() > 1:
            every = [{} for _ in range(group.size())]
            dist.all_gather_object(every, found, group=group)
        return self.from_last_stage({number: value for each in every for number, value in each.items()})

    def share(self, count: int) -> list[tuple[int, bool]]:
        """This data-parallel rank's part of the numbers below `count`, and whether each is its own to count.

        Every rank gets as many: experts on several ranks are called together or not at all, so a rank that has nothing
        left does number 0 again, which does not count.
        """
        size = self.groups.dp.size()
        numbers = [(number, True) for number in range(count)] + [(0, False)] * (-count % size)
        return numbers[self.groups.dp.rank() :: size]


def local_part(module: torch.nn.Module, values_BS: Tensor) -> Tensor:
    """This context-parallel rank's part [B, L] of values over the whole sequence."""
    return split_sequence(values_BS, Ranks.of(module).groups.cp)


def documents(module: torch.nn.Module, positions_BS: Tensor | None) -> Documents | None:
    """What the layers are told of the documents whose whole positions are given."""
    return None if positions_BS is None else Documents(positions_BL=local_part(module, positions_BS))


@torch.no_grad()
def local_hidden(module: torch.nn.Module, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor | None:
    """This rank's part of the normed hidden states that the output layer reads, [B, L / sequence-parallel ranks, D].

    Args:
        tokens_BS: int64, on the model's device.
        positions_BS: int64 positions in packed documents; None: each row is one document.
    """
    model = bare(module)
    tokens_BL, packed = local_part(module, tokens_BS), documents(module, positions_BS)
    if Ranks.of(module).groups.pp.size() == 1:
        return forward_hidden(model, tokens_BL, packed)
    return _through_pipeline(model, tokens_BL, packed)


@torch.no_grad()
def whole_hidden(module: torch.nn.Module, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor | None:
    """As `local_hidden`, gathered: [B, S, D] on each rank of the last stage."""
    hidden, groups = local_hidden(module, tokens_BS, positions_BS), Ranks.of(module).groups
    if hidden is None:
        return None
    if bare(module).config.sequence_parallel:
        hidden_LBD = hidden.transpose(0, 1).contiguous()
        hidden = gather_from_sequence_parallel_region(hidden_LBD, group=groups.tp).transpose(0, 1)
    return join_sequence(hidden.contiguous(), groups.cp)


def _through_pipeline(model: torch.nn.Module, tokens_BL: Tensor, packed: Documents | None) -> Tensor | None:
    def step(batches: Iterator[Tensor], stage: torch.nn.Module) -> Any:
        hidden = forward_hidden(stage, next(batches), packed)

        def collect(output_LBD: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            zero = torch.zeros((), device=output_LBD.device)
            return zero, torch.ones((), dtype=torch.int32), {"hidden": output_LBD.transpose(0, 1)}

        return hidden.transpose(0, 1).contiguous(), collect

    num_rows, length = tokens_BL.shape
    found = get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter([tokens_BL]), model=[model], num_microbatches=1,
        seq_length=length * Ranks.of(model).groups.cp.size(), micro_batch_size=num_rows, forward_only=True,
    )  # fmt: skip
    return found[0]["hidden"] if found else None
