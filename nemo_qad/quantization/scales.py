"""Scales of a quantised model, the same on any number of ranks.

Block scales of static NVFP4 weights are searched here, from the weights alone or with the Hessian of `observe.py`. A
tensor-wide amax (global amax of a weight, amax of FP8 tensors and of K and V) is the largest of all ranks that hold
part of the tensor or saw part of the data. Maxima do not depend on their order, so scales of weights are equal bit
for bit at any tensor- and expert-parallel size; those of activations as far as the activations themselves are equal.

Collective calls are few and unconditional: each rank brings one vector with a value for every quantizer that it has,
whether calibration reached it or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad.choices import ScaleSearch
from nemo_qad.errors import UserError, show
from nemo_qad.models.placement import Placement, is_expert, union_of_names
from nemo_qad.quantization import modelopt, nvfp4, nvfp4_search

WEIGHT, INPUT = ".weight_quantizer", ".input_quantizer"
_MISSING = -1.0  # amax of a quantizer that saw nothing

Search = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # weight, global amax, Hessian -> block amax

_SEARCHES: dict[ScaleSearch, Search] = {
    ScaleSearch.max: lambda weight, outer, hessian: nvfp4.block_amax(weight),
    ScaleSearch.mse: lambda weight, outer, hessian: nvfp4_search.sweep_amax(
        weight, outer, nvfp4.E4M3_MAX, error_weights=hessian
    ),
    ScaleSearch.mse_256: lambda weight, outer, hessian: nvfp4_search.sweep_amax(
        weight, outer, nvfp4.FOUR_OVER_SIX_SCALE_MAX, error_weights=hessian
    ),
    ScaleSearch.four_over_six: lambda weight, outer, hessian: nvfp4_search.four_over_six_amax(
        weight, outer, error_weights=hessian
    ),
}


def choose_weight_scales(
    module: nn.Module, search: ScaleSearch, hessians: dict[str, Tensor] | None = None
) -> None:
    """Gives every static NVFP4 weight quantizer the block amax and global amax of the weights now in `module`.

    A collective call of all ranks. The global amax is that of the whole tensor, over its tensor-parallel ranks.

    Args:
        module: the bare, quantised HybridModel or a stage of it.
        hessians: error weights [I/16, 16, 16] by linear name; a linear that is not named weighs all errors alike.

    Raises:
        UserError: a weight is NaN or infinite, by name.
    """
    weights = {
        name: module.get_parameter(name.removesuffix(WEIGHT) + ".weight").detach()
        for name, quantizer in modelopt.enabled_quantizers(module)
        if name.endswith(WEIGHT) and quantizer.is_nvfp4_static
    }
    outer = {name: largest_magnitude(weight) for name, weight in weights.items()}
    reduce_max(module, outer)
    for name, weight in weights.items():
        if not outer[name].isfinite():
            continue  # named below, by all ranks together
        linear = name.removesuffix(WEIGHT)
        amax = _SEARCHES[search](weight, outer[name], (hessians or {}).get(linear))
        modelopt.set_static_scales(module.get_submodule(name), amax.reshape(-1, 1), outer[name])
    placement = Placement(module)
    broken = union_of_names([placement.global_name(name) for name in weights if not outer[name].isfinite()])
    if broken:
        names = [name.removesuffix(WEIGHT) + ".weight" for name in broken]
        raise UserError(f"NaN or infinite values in {show(names)}. The teacher's weights are damaged: load them again")


def largest_magnitude(tensor: Tensor) -> Tensor:
    """FP32 scalar, infinite where the tensor holds NaN (which a maximum over ranks could lose)."""
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    return torch.stack(tensor.aminmax()).abs().amax().float().nan_to_num(nan=float("inf"), posinf=float("inf"))


def share_amax(module: nn.Module) -> None:
    """Sets every scalar amax to the largest of the ranks that share the tensor or its data; a collective call.

    An expert that saw no token, or whose inputs were all zero, gets the largest input amax of the other experts of
    its layer, on whatever rank they are.
    """
    scalars = {name: q for name, q in modelopt.enabled_quantizers(module) if _has_one_amax(name, q)}
    values = {name: _amax_or_missing(module, quantizer) for name, quantizer in scalars.items()}
    reduce_max(module, values)
    _lend_among_experts(module, values)
    for name, quantizer in scalars.items():
        if float(values[name]) != _MISSING:
            modelopt.set_amax(quantizer, values[name])


def reduce_max(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Replaces each FP32 scalar by the largest of the ranks that hold its tensor or saw its data, in place.

    Dense modules: tensor-, data- and context-parallel ranks; experts: expert-tensor- and expert-data-parallel ranks.
    """
    groups: Any = module.pg_collection
    for names, members in (
        ([name for name in values if not is_expert(name)], (groups.tp, groups.dp_cp)),
        ([name for name in values if is_expert(name)], (groups.expt_tp, groups.expt_dp)),
    ):
        if not names:
            continue
        vector = torch.stack([values[name].float().reshape(()) for name in names])
        for group in members:
            if group.size() > 1:
                dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)
        values.update(zip(names, vector.unbind(), strict=True))


def _has_one_amax(name: str, quantizer: Any) -> bool:
    return not quantizer.is_nvfp4_static and not (name.endswith(WEIGHT) and quantizer.is_nvfp4_dynamic)


def _amax_or_missing(module: nn.Module, quantizer: Any) -> Tensor:
    amax = getattr(quantizer, "_amax", None)
    device = next(module.parameters()).device
    return torch.tensor(_MISSING, device=device) if amax is None else largest_magnitude(amax).to(device)


def _lend_among_experts(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Gives experts without a usable input amax the largest of their layer.

    Every rank brings one value for each linear of each of its expert layers, so ranks cannot wait for one another.
    """
    linears = sorted({_without_expert(name) for name, _ in module.named_modules() if is_expert(name + ".") and
                      name.endswith((".linear_fc1", ".linear_fc2"))})  # fmt: skip
    if not linears:
        return
    largest = dict.fromkeys(linears, torch.tensor(_MISSING, device=next(module.parameters()).device))
    inputs = [name for name in values if is_expert(name) and name.endswith(INPUT)]
    for name in inputs:
        key = _without_expert(name.removesuffix(INPUT))
        largest[key] = torch.maximum(largest[key], values[name])
    vector = torch.stack(list(largest.values()))
    groups: Any = module.pg_collection
    if groups.ep.size() > 1:
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=groups.ep)
    largest.update(zip(linears, vector.unbind(), strict=True))
    for name in inputs:
        if float(values[name]) <= 0:
            values[name] = largest[_without_expert(name.removesuffix(INPUT))]


def _without_expert(linear: str) -> str:
    """`...local_experts.3.linear_fc1` -> `...local_experts.linear_fc1`."""
    owner, _, leaf = linear.rpartition(".")
    return f"{owner.rpartition('.')[0]}.{leaf}"
