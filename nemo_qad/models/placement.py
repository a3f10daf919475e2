"""Where a rank's part lies in the whole model: global names of its modules, and how its tensors are cut.

Layers are numbered within a pipeline stage and experts within a rank; a global name counts both over the whole model,
as on one rank. A tensor-parallel tensor is cut along one dimension, piece by piece: Mamba's in_proj holds five pieces
(z, x, B, C, dt) of each rank's heads, a gated linear_fc1 two (gate, up), others one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPERT = ".mlp.experts.local_experts."
_GROUPED = ".mlp.experts.linear_fc"  # Transformer Engine's experts: linear_fc1.weight3 is the rank's fourth
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.|$)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.|$)|(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$")


class Placement:
    """Translates names of a bare model (or one of its pipeline stages) to global ones and back."""

    def __init__(self, module: nn.Module) -> None:
        layers: Any = getattr(getattr(module, "decoder", None), "layers", ())
        self._layers = [layer.layer_number - 1 for layer in layers]
        self._first_expert = next((_first_of(m) for m in module.modules() if _holds_experts(m)), 0)

    @property
    def is_trivial(self) -> bool:
        """Whether local names are global ones. They are on one rank."""
        return not self._first_expert and self._layers == list(range(len(self._layers)))

    def global_name(self, name: str) -> str:
        """`decoder.layers.0...local_experts.1...` of this rank, by its numbers in the whole model."""
        name = _LAYER.sub(lambda found: str(self._layers[int(found[0])]), name)
        return _EXPERT.sub(lambda found: str(int(found[0]) + self._first_expert), name)


def _holds_experts(module: nn.Module) -> bool:
    return hasattr(module, "local_expert_indices") and hasattr(module, "token_dispatcher")


def _first_of(layer: Any) -> int:
    return layer.local_expert_indices[0]


def is_expert(name: str) -> bool:
    """Whether a module, by local or global name, is part of a routed expert."""
    return EXPERT in name or _GROUPED in name


@dataclass(frozen=True)
class Pieces:
    """How a tensor is cut over the ranks of `group`: along `dim`, in pieces of these sizes on each rank."""

    dim: int
    sizes: tuple[int, ...]
    group: dist.ProcessGroup

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        ranks, rank = self.group.size(), self.group.rank()
        pieces = whole.split([size * ranks for size in self.sizes], self.dim)
        return torch.cat([piece.chunk(ranks, self.dim)[rank] for piece in pieces], self.dim)

    def whole(self, own: Tensor) -> Tensor:
        """The whole tensor, gathered: a collective call of the group."""
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        by_rank = [part.split(self.sizes, self.dim) for part in parts]
        return torch.cat([piece for pieces in zip(*by_rank, strict=True) for piece in pieces], self.dim)

    def per_block(self, block_size: int) -> Pieces:
        """The same cut of a tensor that has one value for each block of the last of two dimensions."""
        if self.dim == 0:
            return self
        return Pieces(self.dim, tuple(size // block_size for size in self.sizes), self.group)


def pieces(parameter: Tensor, group: dist.ProcessGroup) -> Pieces | None:
    """How a parameter is cut over `group`, its tensor-parallel (for experts, expert-tensor-parallel) ranks.

    None: every rank holds all of it. On one rank a parameter that could be cut has its pieces too.
    """
    attributes: Any = parameter
    if not getattr(attributes, "tensor_model_parallel", False):
        return None
    dim, stride = attributes.partition_dim, getattr(attributes, "partition_stride", 1)
    even = [parameter.shape[dim] // stride] * stride
    return Pieces(dim, tuple(getattr(attributes, "partition_sizes", None) or even), group)


def union_of_names(names: list[str]) -> list[str]:
    """Names that any rank brings, sorted; a collective call of all ranks, so that all stop together or none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sorted(set(names))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return sorted({name for each in gathered for name in each})


def expert_biases(module: nn.Module) -> dict[str, Tensor]:
    """By local name: the buffers of routers that balancing moves."""
    return {name: buffer for name, buffer in module.named_buffers() if name.endswith("expert_bias")}
