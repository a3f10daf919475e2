"""Where the optimizer keeps the truth about each parameter: whole, or this rank's shard of it.

    precision   optimizer      main values
    fp32        ordinary       the parameter itself
    bf16        ordinary       an FP32 copy in its shape
    fp32        distributed    a flat view of this rank's part of the parameter
    bf16        distributed    an FP32 copy of this rank's flat part

A rank may have no part of a parameter. With the distributed optimizer parameters are views of Megatron's
contiguous buffers, from which the other ranks' parts are gathered: they are written in place, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn


@dataclass(frozen=True)
class MainPart:
    """This rank's main values of one parameter, what the optimizer updates.

    values: in the parameter's shape or flat; start: number of the first of them in the flattened parameter.
    """

    parameter: nn.Parameter
    values: Tensor
    start: int

    @property
    def is_parameter(self) -> bool:
        """Whether the main values lie in the parameter's own memory."""
        return self.values.dtype == self.parameter.dtype

    def write(self, values: Tensor) -> None:
        """Puts other values [as `self.values`] into this part of the parameter, rounded to its dtype."""
        flat = self.parameter.detach().view(-1)
        flat[self.start : self.start + values.numel()].copy_(values.detach().view(-1))


def wrapped(module: nn.Module, *, distributed: bool) -> DistributedDataParallel:
    """`module` in Megatron's DDP, with gradients summed in FP32; `distributed`: for the distributed optimizer."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    layout = None
    if distributed:
        layout = DistributedOptimizer.compute_full_param_layout(
            [p for p in module.parameters() if p.requires_grad],
            None,  # one bucket: nothing overlaps
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            settings,
            parallel_state.get_expert_data_parallel_world_size(),
        )
    return DistributedDataParallel(module.config, settings, module, full_param_layout=layout)


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers inside one: dense and expert parameters may have one each."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class MainParameters:
    """The parts of all parameters by name, and the way from them back into the parameters."""

    def __init__(self, module: nn.Module, ddp: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
        self._ddp = ddp
        self.is_distributed = bool(ddp.ddp_config.use_distributed_optimizer)
        shards = _shards(optimizer) if self.is_distributed else {}
        self.parts: dict[str, MainPart] = {}
        for name, parameter in module.named_parameters():
            # Without BF16 the parameter is its own main parameter.
            values, start = getattr(parameter, "main_param", parameter), 0
            if self.is_distributed:
                if id(parameter) not in shards:
                    continue
                values, start = shards[id(parameter)]
            self.parts[name] = MainPart(parameter, values, start)

    def group(self, *, expert: bool) -> dist.ProcessGroup:
        """Ranks that share the main values of a parameter if they are distributed."""
        return self._ddp.intra_expt_dp_group if expert else self._ddp.intra_dp_cp_group

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of every parameter."""
        groups = [self.group(expert=expert) for expert in (False, True)]
        return not self.is_distributed or all(group.size() == 1 for group in groups)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Puts values [as the parts] into the parameters of all ranks; a collective call if distributed."""
        for name, part in self.parts.items():
            if name in values:
                part.write(values[name])
        self.gather()

    def gather(self) -> None:
        """Brings the other ranks' parts of all parameters."""
        if not self.is_whole:
            self._ddp.start_param_sync(force_sync=True)


def _shards(optimizer: MegatronOptimizer) -> dict[int, tuple[Tensor, int]]:
    """id of a parameter -> its flat main values on this rank and where they start."""
    found = {}
    for each in chained(optimizer):
        assert isinstance(each, DistributedOptimizer)
        if each.is_stub_optimizer:
            continue
        pairs = (
            (each.model_float16_groups, each.shard_fp32_from_float16_groups),
            (each.model_fp32_groups, each.shard_fp32_groups),
        )
        for models, mains in pairs:
            for model_group, main_group in zip(models, mains, strict=True):
                for parameter, main in zip(model_group, main_group, strict=True):
                    own = each._get_model_param_range_map(parameter)["param"]
                    found[id(parameter)] = (main, own.start)
    return found
