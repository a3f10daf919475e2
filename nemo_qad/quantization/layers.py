"""How far the values that a quantised model computes with are from its weights, linear by linear.

Works on one rank or many: each adds up what it holds, data-parallel ranks share the linears among them, and the sums
are put together by global name, so that the numbers are those of the whole tensor whatever way it is cut.

The best sweep is the lower of two, on the grids of 448 and of 256, each of the 12 scales around that of max for every
block (`nvfp4_search.bounded_sweep_amax`), with the global scale that the linear has. It stands for the exhaustive
sweep of all 126 scales, whose squared error it exceeds by at most 0.5 %; a recipe that makes that sweep may therefore
stand at a ratio a little below 1. Squared errors of weights, also where the recipe searched with a Hessian.

Squared errors of a block are FP32, all sums over blocks FP64. Memory: one FP32 number for each block of one linear,
a few times, and a chunk of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log10
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad.choices import ScaleSearch
from nemo_qad.evaluation.layer_errors import LayerErrors, LinearError
from nemo_qad.models.placement import is_expert, pieces
from nemo_qad.quantization import fp8, modelopt, nvfp4
from nemo_qad.quantization.nvfp4_search import block_errors, bounded_sweep_amax
from nemo_qad.quantization.recipes import LinearFormat
from nemo_qad.quantization.student import is_quantised, nvfp4_scales

CHUNK_VALUES = 2**22
Progress = Callable[[int, int], None]  # linears done, linears of this rank


class _Sums(NamedTuple):
    """Of the part of a linear that a rank holds. The last five are 0 for FP8."""

    values: float
    signal: float
    error: float
    blocks: float = 0.0  # with a value other than 0
    relative: float = 0.0  # error / signal, over those blocks
    fours: float = 0.0
    best_448: float = 0.0
    best_256: float = 0.0


def measure_layers(
    module: nn.Module,
    table: Mapping[str, LinearFormat],
    search: ScaleSearch,
    global_name: Callable[[str], str],
    *,
    expert_tokens: Mapping[str, int],
    idle_experts: list[str],
    progress: Progress | None = None,
) -> LayerErrors:
    """Measures every quantised linear; a collective call of all ranks, each of which gets all of them.

    Args:
        module: the bare, quantised HybridModel, or this rank's part of it.
        table: part and format of each linear by global name (`recipes.formats`).
        search: the recipe's; only four-over-six has blocks that chose 4.
        global_name: of a module of this rank by its local name (`Placement.global_name`).
        expert_tokens, idle_experts: what calibration saw, by global name (`calibrate.Calibrated`).
    """
    local = {name: global_name(name) for name, child in module.named_modules() if is_quantised(child)}
    sums: dict[tuple[str, int], _Sums] = {}
    for index, (name, whole) in enumerate(local.items()):
        replica, shard = _place(module, name)
        if index % replica.size() == replica.rank():
            sums[whole, shard] = _measure(module.get_submodule(name))
        if progress is not None:
            progress(index + 1, len(local))
    merged = _merge(sums)
    reached = _Experts(expert_tokens, set(idle_experts))
    return LayerErrors(
        _error(name, linear, merged[name], search, reached) for name, linear in table.items() if name in merged
    )


class _Experts(NamedTuple):
    tokens: Mapping[str, int]
    idle: set[str]


def _place(module: nn.Module, name: str) -> tuple[dist.ProcessGroup, int]:
    """Ranks that hold the same part of a linear (one of them measures it), and which part that is.

    A weight that tensor parallelism does not cut is part 0 on each of its ranks, and counts once.
    """
    groups: Any = module.pg_collection
    tensor, replicas = (groups.expt_tp, groups.expt_dp) if is_expert(name) else (groups.tp, groups.dp_cp)
    cut = pieces(module.get_parameter(f"{name}.weight"), tensor)
    return replicas, 0 if cut is None else cut.group.rank()


def _measure(linear: Any) -> _Sums:
    """Of one rank's part. A dynamic NVFP4 scale is a collective call of the tensor-parallel ranks."""
    weight, quantizer = linear.weight.detach(), linear.weight_quantizer
    if not modelopt.is_nvfp4(quantizer):
        return _measure_fp8(weight, quantizer.amax)
    amax, outer, scale_max = nvfp4_scales(quantizer, weight)
    signal_N = _block_signals(weight)
    error_N = block_errors(weight, amax, outer, scale_max).reshape(-1)
    kept = signal_N > 0
    relative_N = torch.where(kept, error_N.double() / signal_N, 0.0)
    best = {}
    for limit in (nvfp4.E4M3_MAX, nvfp4.FOUR_OVER_SIX_SCALE_MAX):
        swept = bounded_sweep_amax(weight, outer, limit)
        best[limit] = float(block_errors(weight, swept, outer, limit).sum(dtype=torch.float64))
    return _Sums(
        values=weight.numel(),
        signal=float(signal_N.sum()),
        error=float(error_N.sum(dtype=torch.float64)),
        blocks=float(kept.sum()),
        relative=float(relative_N.sum()),
        fours=float((amax.reshape(-1) > nvfp4.block_amax(weight).reshape(-1)).sum()),
        best_448=best[nvfp4.E4M3_MAX],
        best_256=best[nvfp4.FOUR_OVER_SIX_SCALE_MAX],
    )


def _measure_fp8(weight: Tensor, amax: Tensor) -> _Sums:
    signal = error = 0.0
    for part in weight.reshape(-1).split(CHUNK_VALUES):
        exact = part.float()
        signal += float(exact.square().sum(dtype=torch.float64))
        error += float((fp8.fake_quantize(exact, amax) - exact).square_().sum(dtype=torch.float64))
    return _Sums(weight.numel(), signal, error)


def _block_signals(weight: Tensor) -> Tensor:
    """FP64 [N]: sum of the squares of each block."""
    parts = nvfp4.blocks(weight).split(CHUNK_VALUES // nvfp4.BLOCK_SIZE)
    return torch.cat([part.float().square().sum(-1, dtype=torch.float64) for part in parts])


def _merge(sums: dict[tuple[str, int], _Sums]) -> dict[str, _Sums]:
    """Sums of whole linears, of all ranks: one of each part."""
    parts = dict(sums)
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {key: tuple(part) for key, part in sums.items()})
        parts = {key: _Sums(*part) for each in gathered for key, part in each.items()}
    merged: dict[str, _Sums] = {}
    for (name, _), part in sorted(parts.items()):
        merged[name] = _Sums(*map(sum, zip(merged[name], part, strict=True))) if name in merged else part
    return merged


def _error(name: str, linear: LinearFormat, sums: _Sums, search: ScaleSearch, reached: _Experts) -> LinearError:
    best = min(sums.best_448, sums.best_256)
    fours = search == ScaleSearch.four_over_six and sums.blocks > 0
    expert = name.rpartition(".")[0] if is_expert(name) else None
    return LinearError(
        name=name,
        part=linear.part,
        format=linear.format.value,
        values=int(sums.values),
        sqnr_db=_decibel(sums.signal, sums.error),
        block_sqnr_db=_decibel(sums.blocks, sums.relative),
        mse=sums.error / sums.values,
        mse_ratio=sums.error / best if best else None,
        share_of_fours=sums.fours * nvfp4.BLOCK_SIZE / sums.values if fours else None,
        tokens=reached.tokens.get(expert, 0) if expert else None,
        idle=expert in reached.idle if expert else None,
    )


def _decibel(signal: float, error: float) -> float | None:
    return 10 * log10(signal / error) if signal > 0 and error > 0 else None
