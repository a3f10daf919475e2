"""From the parts that ranks hold to whole tensors on the first rank, and back: names and values of one rank's model.

What is written this way reads in any layout. It moves whole tensors through the first rank's memory, one set at a
time: meant for students that fit there, not for the sharded checkpoints of large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad.models.placement import Pieces, Placement, is_expert, pieces

VOCABULARY = ("embedding.word_embeddings.", "output_layer.")
Cut = Callable[[str], Pieces | None]  # of a tensor, by its local name


def parameter_cut(module: nn.Module) -> Cut:
    """How each parameter of a bare model is cut over the tensor-parallel ranks of its kind."""
    parameters, groups = dict(module.named_parameters()), _groups(module)

    def cut(name: str) -> Pieces | None:
        if name not in parameters:
            return None
        return pieces(parameters[name], groups.expt_tp if is_expert(name) else groups.tp)

    return cut


def is_writer(module: nn.Module, name: str) -> bool:
    """Whether this rank is the one that answers for a tensor, by local name: the first of its replicas."""
    groups = _groups(module)
    return is_first_replica(module, name) and (groups.expt_tp if is_expert(name) else groups.tp).rank() == 0


def is_first_replica(module: nn.Module, name: str) -> bool:
    """Whether this rank is the first of those that hold the same part of a tensor, by local name."""
    groups = _groups(module)
    found: bool = (groups.expt_dp if is_expert(name) else groups.dp_cp).rank() == 0
    return found


def gather(module: nn.Module, tensors: Mapping[str, Tensor], cut: Cut) -> dict[str, Tensor]:
    """Whole tensors by global name on the first rank, nothing on the others; a collective call of all ranks.

    Args:
        tensors: this rank's parts by local name; ranks of one tensor-parallel group bring the same names.
    """
    placement, mine = Placement(module), {}
    for name, value in tensors.items():
        pieces_ = cut(name)
        whole = pieces_.whole(value.detach()) if pieces_ and pieces_.group.size() > 1 else value.detach()
        if is_writer(module, name):
            mine[placement.global_name(name)] = whole.cpu()
    if dist.get_world_size() == 1:
        return mine
    boxes: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, boxes, dst=0)
    merged: dict[str, Tensor] = {}
    for box in boxes or []:
        merged |= box
    return merged


def own_parts(
    module: nn.Module, shapes: Mapping[str, torch.Size], whole: Mapping[str, Tensor], cut: Cut
) -> dict[str, Tensor]:
    """This rank's parts, by local name, of whole tensors by global name.

    Args:
        shapes: of the local tensors that are wanted.

    Raises:
        KeyError: the global name, where there is no such tensor.
    """
    placement, found = Placement(module), {}
    for name, shape in shapes.items():
        value, pieces_ = whole[placement.global_name(name)], cut(name)
        if pieces_ is None:
            found[name] = value
            continue
        if pieces_.dim == 0 and name.startswith(VOCABULARY):
            value = fitted(value, shape[0] * pieces_.group.size())
        found[name] = pieces_.own(value)
    return found


def assembled(flat: Tensor, start: int, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A whole FP32 tensor in the shape of `like`, of the flat parts that the ranks of `group` hold of it.

    A rank without a part brings an empty one. A collective call of the group.
    """
    whole = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    whole[start : start + flat.numel()] = flat.detach().view(-1)
    if group.size() > 1:
        dist.all_reduce(whole, group=group)  # each number comes from one rank: no sum is rounded
    return whole.view(like.shape)


def fitted(whole: Tensor, rows: int) -> Tensor:
    """`whole` with so many rows: the padding of a vocabulary depends on the number of tensor-parallel ranks."""
    if len(whole) >= rows:
        return whole[:rows]
    return torch.cat([whole, whole.new_zeros(rows - len(whole), *whole.shape[1:])])


def _groups(module: nn.Module) -> Any:
    return module.pg_collection
