"""Quantizer scales as Megatron-Core's sharded tensors, so that a checkpoint of one layout loads under another.

Keys are global names. Block amax of a weight lies as the weight does: cut over the same dimension in the same pieces
(one key a piece), per expert under the expert's own name. Tensor-wide scales are the same on every rank that has them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, nn

from nemo_qad.models.placement import Pieces, Placement, is_expert, pieces
from nemo_qad.models.whole import Cut, fitted, gather
from nemo_qad.quantization import modelopt, nvfp4

_AMAX = "_amax"


class ShardedScales:
    """The scales of one rank: what `quantizer_state` gives, and back, through a sharded checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        """`module`: the bare, quantised HybridModel, or this rank's part of it."""
        self._module = module
        self._placement = Placement(module)
        self._groups: Any = module.pg_collection
        self._cut = scale_cut(module)

    def sharded_state(self, state: dict[str, Tensor]) -> dict[str, ShardedTensor]:
        """Sharded tensors, by key, over the storage of `state` (local buffer name -> scale).

        To load, pass `empty_like(state)`, load into what this returns, and read `state_of` it.
        """
        sharded: dict[str, ShardedTensor] = {}
        for name, value in state.items():
            for key, part, cut in self._parts(name, value):
                sharded[key] = self._sharded(key, part, cut, is_expert(name))
        return sharded

    def state_of(self, loaded: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Local buffer name -> scale, from the tensors that a checkpoint gave for the keys of `sharded_state(like)`."""
        state = {}
        for name, value in like.items():
            parts = [loaded[key] for key, _, _ in self._parts(name, value)]
            cut = self._cut(name)
            whole = torch.cat(parts, cut.dim) if cut else parts[0]
            state[name] = whole.reshape(value.shape)
        return state

    def _parts(self, name: str, value: Tensor) -> list[tuple[str, Tensor, Pieces | None]]:
        key, cut = f"quantizer.{self._placement.global_name(name)}", self._cut(name)
        if cut is None:
            return [(key, value, None)]
        blocks = value.reshape(self._weight(name).shape[0], -1)
        found = blocks.split(cut.sizes, cut.dim)
        names = [key] if len(found) == 1 else [f"{key}.{index}" for index in range(len(found))]
        return [(n, part.contiguous(), cut) for n, part in zip(names, found, strict=True)]

    def _weight(self, name: str) -> Tensor:
        linear = name.rpartition(".")[0].rpartition(".")[0]
        return self._module.get_submodule(linear).get_parameter("weight")

    def _sharded(self, key: str, part: Tensor, cut: Pieces | None, expert: bool) -> ShardedTensor:
        tensor, data = (
            (self._groups.expt_tp, self._groups.expt_dp) if expert else (self._groups.tp, self._groups.dp_cp)
        )
        if cut is None:
            return ShardedTensor.from_rank_offsets(key, part, replica_id=(0, tensor.rank(), data.rank()))
        offsets = (cut.dim, cut.group.rank(), cut.group.size())
        return ShardedTensor.from_rank_offsets(key, part, offsets, replica_id=(0, 0, data.rank()))


def scale_cut(module: nn.Module) -> Cut:
    """How a scale, by local buffer name, is cut: block amax [O, I/16] as its weight [O, I], others not at all."""

    def cut(name: str) -> Pieces | None:
        quantizer, _, buffer = name.rpartition(".")
        owner: Any = module.get_submodule(quantizer)
        if buffer != _AMAX or not owner.is_nvfp4_static:
            return None
        linear: Any = module.get_submodule(quantizer.rpartition(".")[0])
        found = pieces(linear.get_parameter("weight"), linear.tp_group)
        return found and found.per_block(nvfp4.BLOCK_SIZE)

    return cut


def whole_scales(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`quantizer_state` of every rank as whole tensors by global name, on the first rank; a collective call.

    Block amax of a weight [O, I] is [O, I/16] of the whole weight.
    """
    cut, shaped = scale_cut(module), {}
    for name, value in state.items():
        owner = module.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
        is_blocks = value.numel() > 1
        shaped[name] = value.reshape(owner.get_parameter("weight").shape[0], -1) if is_blocks else value
    return gather(module, shaped, cut)


def own_scales(module: nn.Module, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of `whole_scales` that belongs to this rank, by local name; `module` may be without quantizers yet."""
    placement = Placement(module)
    local = {placement.global_name(name): name for name, _ in module.named_modules()}
    found = {}
    for name, value in whole.items():
        quantizer, _, buffer = name.rpartition(".")
        owner, _, leaf = quantizer.rpartition(".")
        if owner not in local:
            continue
        if value.dim() == 2:
            linear: Any = module.get_submodule(local[owner])
            cut = pieces(linear.get_parameter("weight"), linear.tp_group)
            if cut is not None:
                rows = len(linear.get_parameter("weight")) * (cut.group.size() if cut.dim == 0 else 1)
                value = cut.per_block(nvfp4.BLOCK_SIZE).own(fitted(value, rows))
        found[f"{local[owner]}.{leaf}.{buffer}"] = value
    return found


def empty_like(module: nn.Module) -> dict[str, Tensor]:
    """Local buffer name -> uninitialised FP32 tensor for every scale that the enabled quantizers of `module` have."""
    return {
        f"{name}.{buffer}": torch.empty_like(value, dtype=torch.float32, device="cpu")
        for name, quantizer in modelopt.enabled_quantizers(module)
        for buffer, value in quantizer.named_buffers(recurse=False)
    }
