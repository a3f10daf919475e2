"""What a recipe must cover and what it covered: structure before, quantizers after, scales in the end.

A rule that matches nothing, a linear left out, or a scale that is zero, NaN or infinite does not raise an error in
ModelOpt; here each stops the run with the names concerned. On several ranks each looks at its own part, names are
global ones, and all ranks stop together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_qad.errors import UserError, show
from nemo_qad.models.placement import Placement, union_of_names
from nemo_qad.quantization import modelopt, nvfp4
from nemo_qad.quantization.recipes import KV_PART, Expected, LinearFormat
from nemo_qad.quantization.scales import INPUT, WEIGHT
from nemo_qad.schema import Format, KvFormat, RecipeConfig


@dataclass(frozen=True)
class CoverageRow:
    """Quantizers of one part and kind: how many the architecture asks for, how many are enabled."""

    part: str
    format: str
    kind: str
    expected: int
    matched: int


@dataclass(frozen=True)
class Coverage:
    rows: tuple[CoverageRow, ...]

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


def local_linears(module: nn.Module, table: Iterable[str]) -> dict[str, str]:
    """Linears of the table that this rank holds: local name -> global name."""
    placement, wanted = Placement(module), set(table)
    names = {name: placement.global_name(name) for name, _ in module.named_modules()}
    return {name: whole for name, whole in names.items() if whole in wanted}


def check_structure(module: nn.Module, table: dict[str, LinearFormat]) -> None:
    """A collective call.

    Raises:
        UserError: no rank has a linear of the table, or NVFP4 cannot cut one into blocks, or one adds its weight
            gradient behind the back of autograd.
    """
    local = local_linears(module, table)
    held = set(union_of_names(list(local.values())))
    missing = [name for name in table if name not in held]
    if missing:
        raise UserError(f"Linears of the model that are not in it: {show(missing)}. Pass the bare, whole model")
    odd = []
    for name, whole in local.items():
        width = module.get_parameter(f"{name}.weight").shape[-1]
        if table[whole].format.has_blocks and width % nvfp4.BLOCK_SIZE:
            odd.append(f"{whole} ({width})")
    odd = union_of_names(odd)
    if odd:
        raise UserError(
            f"Blocks of {nvfp4.BLOCK_SIZE} do not divide the inputs that a rank has of {show(odd)}. Choose fp8 or "
            "bf16, or fewer tensor-parallel ranks"
        )
    fused = [whole for name, whole in local.items() if _fuses_gradients(module.get_submodule(name))]
    fused = union_of_names([name for name in fused if table[name].format != Format.bf16])
    if fused:
        raise UserError(
            f"gradient_accumulation_fusion adds the weight gradient of {show(fused)} without autograd, which "
            "quantised linears need. Build the model with gradient_accumulation_fusion=False"
        )


def _fuses_gradients(linear: nn.Module) -> bool:
    return bool(getattr(linear, "gradient_accumulation_fusion", False))


def check_weights(module: nn.Module) -> None:
    """Raises UserError naming every parameter that holds NaN or infinite values; a collective call."""
    placement = Placement(module)
    broken = union_of_names(
        [placement.global_name(name) for name, p in module.named_parameters() if not torch.isfinite(p.detach()).all()]
    )
    if broken:
        raise UserError(f"NaN or infinite values in {show(broken)}. The teacher's weights are damaged: load them again")


def check_coverage(
    module: nn.Module, table: dict[str, LinearFormat], expected: tuple[Expected, ...], recipe: RecipeConfig
) -> Coverage:
    """Compares the enabled quantizers with what the recipe asks for, one by one and in number; a collective call.

    Raises:
        UserError: naming quantizers that are missing, and enabled ones that nothing asked for.
    """
    wanted = dict(_wanted(table, recipe))
    placement = Placement(module)
    present = {placement.global_name(name) for name, _ in module.named_modules()}
    enabled = {placement.global_name(name): _format_of(q) for name, q in modelopt.enabled_quantizers(module)}
    held = [name for name in wanted if name.rpartition(".")[0] in present]
    elements = {name: fields[1].partition("_")[0] for name, fields in wanted.items()}  # nvfp4_w4a4: both are nvfp4
    missing = union_of_names([name for name in held if enabled.get(name) != elements[name]])
    extra = union_of_names([name for name in enabled if name not in wanted])
    if missing:
        raise UserError(f"recipe.name={recipe.name} leaves out {show(missing)}: no rule gave it its format")
    if extra:
        raise UserError(f"recipe.name={recipe.name} quantises {show(extra)}, which it does not name")
    matched: dict[tuple[str, str, str], int] = {}
    for name in union_of_names(held):
        matched[wanted[name]] = matched.get(wanted[name], 0) + 1
    rows = tuple(
        CoverageRow(row.part, row.format, row.kind, row.count, matched.get((row.part, row.format, row.kind), 0))
        for row in expected
    )
    short = [f"{r.part} {r.kind}: {r.matched} of {r.expected}" for r in rows if r.matched != r.expected]
    if short:
        raise UserError(f"recipe.name={recipe.name} covers the model in part only: {show(short)}")
    return Coverage(rows)


def check_scales(module: nn.Module) -> list[str]:
    """Looks at every scale; a collective call.

    Returns:
        Warnings: scales that are sound and still look as if nothing had been calibrated.

    Raises:
        UserError: naming every quantizer whose scale is missing, zero, NaN or infinite.
    """
    bad, placement = [], Placement(module)
    for name, quantizer in modelopt.enabled_quantizers(module):
        problem = _scale_problem(module, name, quantizer)
        if problem:
            bad.append(f"{placement.global_name(name)} ({problem})")
    bad = union_of_names(bad)
    if bad:
        raise UserError(
            f"Unusable scales: {show(bad)}. After calibration a missing one means that no calibration token "
            "reached the module (raise calibration.num_samples); zero or NaN, that the teacher is damaged. In a "
            "checkpoint it means that what wrote it was damaged: continue from another one"
        )
    return _kv_warnings(module)


def _kv_warnings(module: nn.Module) -> list[str]:
    """K and V scales that are all 1: what an engine assumes of a checkpoint without calibrated ones."""
    amaxes = {
        float(quantizer.amax) / (nvfp4.E4M3_MAX * (nvfp4.E2M1_MAX if modelopt.is_nvfp4(quantizer) else 1))
        for name, quantizer in modelopt.enabled_quantizers(module)
        if name.endswith((".k_bmm_quantizer", ".v_bmm_quantizer"))
    }
    if amaxes == {1.0}:
        return ["every scale of the KV cache is exactly 1: was it calibrated on real text?"]
    return []


def _wanted(table: dict[str, LinearFormat], recipe: RecipeConfig) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Quantizer name -> (part, format, kind)."""
    for name, linear in table.items():
        if linear.format != Format.bf16:
            yield name + WEIGHT, (linear.part, linear.format.value, "weights")
        if linear.format.covers_inputs:
            yield name + INPUT, (linear.part, linear.format.value, "activations")
    if recipe.kv_cache == KvFormat.none:
        return
    for name in table:
        if name.endswith("self_attention.linear_qkv"):
            attention = name.removesuffix("linear_qkv") + "core_attention"
            for which in "kv":
                yield f"{attention}.{which}_bmm_quantizer", (KV_PART, KvFormat(recipe.kv_cache).value, "kv")


def _format_of(quantizer: Any) -> str:
    return "nvfp4" if modelopt.is_nvfp4(quantizer) else "fp8" if quantizer.is_fp8 else str(quantizer.num_bits)


def _scale_problem(module: nn.Module, name: str, quantizer: Any) -> str | None:
    """What is wrong with the amax that the stored scales come from, or None."""
    amax: Tensor | None
    if name.endswith(WEIGHT) and quantizer.is_nvfp4_dynamic:
        amax = module.get_parameter(name.removesuffix(WEIGHT) + ".weight").detach().abs().amax()
    elif quantizer.is_nvfp4_static:
        if not torch.isfinite(quantizer.amax).all():
            return "block amax is NaN or infinite"
        if not bool(quantizer.amax.any()):
            return "zero"
        amax = quantizer.global_amax
    else:
        amax = getattr(quantizer, "_amax", None)
    if amax is None:
        return "missing"
    if not torch.isfinite(amax).all():
        return "NaN or infinite"
    return "zero" if bool((amax <= 0).any()) else None
