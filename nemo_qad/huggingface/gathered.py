"""A model's tensors one at a time, whole, on the first rank, whatever parts of them the ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad.errors import UserError
from nemo_qad.huggingface.names import Mapping, held_names, mappings, tensor_cut
from nemo_qad.models.placement import Pieces
from nemo_qad.models.shipped import set_shipped_dtype, shipped_dtype
from nemo_qad.models.whole import is_first_replica, is_writer
from nemo_qad.schema import ModelConfig


class Part(NamedTuple):
    """What a rank holds of a tensor, and how the whole is cut; None: every rank holds all of it."""

    tensor: Tensor
    cut: Pieces | None

    def like(self, other: Tensor) -> Part:
        """`other`, made of this tensor [O, I], with the same cut: [O, I / n], or one value for all of it."""
        if self.cut is None or other.dim() == 0:
            return Part(other, None)
        if self.cut.dim == 0:
            return Part(other, self.cut)
        shrink = self.tensor.shape[1] // other.shape[1]
        return Part(other, replace(self.cut, sizes=tuple(size // shrink for size in self.cut.sizes)))


Held = MappingOf[str, str]  # name in the whole model -> name of this rank's module or tensor
Own = Callable[[str, str], dict[str, Part]]  # the two names -> this rank's parts


def gathered_mappings(
    module: nn.Module, model: ModelConfig, own: Callable[[Mapping, str, Part], dict[str, Part]]
) -> Iterator[tuple[Mapping, dict[str, Tensor]]]:
    """Every mapping of the model with the whole of what `own` makes of each rank's tensor; see `gathered`.

    Args:
        own: (mapping, local name, the rank's tensor) -> what is gathered, by keys of the caller's.

    Raises:
        UserError: the model lacks a tensor.
    """
    table = {mapping.mcore: mapping for mapping in mappings(model)}
    held = held_names(module, list(table.values()))
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())

    def parts(name: str, local: str) -> dict[str, Part]:
        marked, tensor = tensors[local], tensors[local].detach()
        default = torch.float32 if table[name].is_fp32 else torch.bfloat16
        set_shipped_dtype(tensor, shipped_dtype(marked, default))
        return own(table[name], local, Part(tensor, tensor_cut(module, local, marked)))

    try:
        for name, found in gathered(module, list(table), held, parts):
            yield table[name], found
    except KeyError as error:
        raise UserError(f"The model has no tensor {error.args[0]}, which model.name={model.name} has") from None


def gathered(module: nn.Module, names: list[str], held: Held, own: Own) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(name, whole tensors) in the order of `names` on the first rank; others get nothing and must run through too.

    Memory beyond the model: the tensors of one name. On one rank each part is the whole.

    Raises:
        KeyError: a name that no rank holds.
    """
    holder = _holders(module, held)
    for name in names:
        if name not in holder:
            raise KeyError(name)
        source, found = holder[name], None
        if name in held and is_first_replica(module, held[name]):
            found = {key: _whole(part) for key, part in own(name, held[name]).items()}
        if dist.get_world_size() > 1 and source != 0:
            found = _passed_on(found, source)
        if dist.get_rank() == 0:
            assert found is not None
            yield name, found


def _holders(module: nn.Module, held: Held) -> dict[str, int]:
    """Of each name the rank that has the whole once its tensor-parallel ranks have put it together."""
    mine = [name for name, local in held.items() if is_writer(module, local)]
    if dist.get_world_size() == 1:
        return dict.fromkeys(mine, 0)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: rank for rank in reversed(range(len(everyone))) for name in everyone[rank]}


def _whole(part: Part) -> Tensor:
    tensor, cut = part
    if cut is None or cut.group.size() == 1:
        return tensor
    return cut.whole(_bytes(tensor)).view(tensor.dtype)


def _passed_on(found: dict[str, Tensor] | None, source: int) -> dict[str, Tensor] | None:
    """From rank `source` to the first, on the CPU there."""
    if dist.get_rank() == source:
        assert found is not None
        dist.send_object_list([{key: (_bytes(tensor).cpu(), tensor.dtype) for key, tensor in found.items()}], dst=0)
    elif dist.get_rank() == 0:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source)
        return {key: tensor.view(dtype) for key, (tensor, dtype) in box[0].items()}
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """FP8 as bytes, which collectives and pickle know; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
