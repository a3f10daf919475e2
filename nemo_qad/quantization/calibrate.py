"""Post-training quantisation of a model: ModelOpt's calibration, then a check that all of it took effect.

A rule that matches nothing, a linear left out, or a scale that is zero, NaN or infinite does not raise an
error in ModelOpt; here each stops the run with the names concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_qad.errors import UserError
from nemo_qad.quantization import modelopt, nvfp4
from nemo_qad.quantization.recipes import KV_PART, Expected, LinearFormat, formats, rules
from nemo_qad.schema import Format, KvFormat, ModelConfig, RecipeConfig, ScaleSearch

NUM_NAMES_SHOWN = 5
_WEIGHT, _INPUT = ".weight_quantizer", ".input_quantizer"


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


def quantize(
    module: nn.Module,
    recipe: RecipeConfig,
    model: ModelConfig,
    batches: Iterable[dict[str, Tensor]],
    progress: Callable[[str], None] | None = None,
) -> Coverage:
    """Inserts quantizers into `module` in place and calibrates them.

    Args:
        module: the bare HybridModel (no DDP or Float16Module around it).
        batches: calibration set, "tokens" int64 [B, S] each; every batch goes through the model once.
        progress: called with a short text before each step and every tenth of the batches.

    Raises:
        UserError: no batches, tensor parallelism, a rule or module without effect, a bad scale.
        ConfigError: a recipe that does not fit the model.
    """
    plan = rules(recipe, model)
    table = formats(recipe, model)
    check_structure(module, table)
    tell = progress or (lambda _: None)
    modelopt.insert_quantizers(module, plan.quant_cfg)
    coverage = check_coverage(module, table, plan.expected, recipe)
    samples = list(batches)
    if not samples:
        raise UserError("calibration.num_samples: no calibration batch came. Set it to at least 1")
    modelopt.calibrate(module, plan.algorithm, lambda: _forward_all(module, samples, tell))
    if recipe.scale_search == ScaleSearch.four_over_six:
        tell("Choosing four or six for each block")
        choose_four_over_six(module)
    check_scales(module)
    return coverage


def choose_four_over_six(module: nn.Module) -> None:
    """Folds the four-over-six choice into the block amax of every static NVFP4 weight quantizer."""
    for name, quantizer in modelopt.enabled_quantizers(module):
        if name.endswith(_WEIGHT) and quantizer.is_nvfp4_static:
            weight = module.get_parameter(name.removesuffix(_WEIGHT) + ".weight").detach()
            try:
                amax = nvfp4.four_over_six_amax(weight, quantizer.global_amax)
            except ValueError as error:
                raise UserError(f"{name}: {error}. The teacher's weights are damaged: load them again") from None
            quantizer.amax = amax.view(quantizer.amax.shape)


def check_structure(module: nn.Module, table: dict[str, LinearFormat]) -> None:
    """Raises UserError when the model lacks a linear of its table, splits one over tensor ranks, or has one
    that NVFP4 cannot cut into blocks."""
    present = dict(module.named_modules())
    missing = [name for name in table if name not in present]
    if missing:
        raise UserError(
            f"Linears of the model that are not in it: {show(missing)}. Pass the bare, whole model"
        )
    split = [n for n in table if getattr(getattr(present[n], "tp_group", None), "size", lambda: 1)() > 1]
    if split:
        raise UserError(
            "Quantisation over tensor-parallel ranks is not supported: a rank would make the scales of its "
            f"own shard of {show(split)}. Set parallel.tensor=1"
        )
    blocked = [name for name, linear in table.items() if linear.format == Format.nvfp4]
    widths = {name: module.get_parameter(f"{name}.weight").shape[-1] for name in blocked}
    odd = [f"{name} ({width})" for name, width in widths.items() if width % nvfp4.BLOCK_SIZE]
    if odd:
        raise UserError(
            f"Blocks of {nvfp4.BLOCK_SIZE} do not divide the inputs of {show(odd)}. Choose fp8 or bf16"
        )


def check_coverage(
    module: nn.Module,
    table: dict[str, LinearFormat],
    expected: tuple[Expected, ...],
    recipe: RecipeConfig,
) -> Coverage:
    """Compares the enabled quantizers with what the recipe asks for, one by one and in number.

    Raises:
        UserError: naming quantizers that are missing, and enabled ones that nothing asked for.
    """
    wanted = dict(_wanted(module, table, recipe))
    enabled = {name: _format_of(quantizer) for name, quantizer in modelopt.enabled_quantizers(module)}
    missing = [name for name, (_, chosen, _) in wanted.items() if enabled.get(name) != chosen]
    extra = [name for name in enabled if name not in wanted]
    if missing:
        raise UserError(f"recipe.name={recipe.name} leaves out {show(missing)}: no rule gave it its format")
    if extra:
        raise UserError(f"recipe.name={recipe.name} quantises {show(extra)}, which it does not name")
    matched: dict[tuple[str, str, str], int] = {}
    for key in wanted.values():
        matched[key] = matched.get(key, 0) + 1
    rows = tuple(
        CoverageRow(
            row.part, row.format, row.kind, row.count, matched.get((row.part, row.format, row.kind), 0)
        )
        for row in expected
    )
    short = [
        f"{row.part} {row.kind}: {row.matched} of {row.expected}"
        for row in rows
        if row.matched != row.expected
    ]
    if short:
        raise UserError(f"recipe.name={recipe.name} covers the model in part only: {show(short)}")
    return Coverage(rows)


def check_scales(module: nn.Module) -> None:
    """Raises UserError naming every quantizer whose scale is missing, zero, NaN or infinite."""
    bad = []
    for name, quantizer in modelopt.enabled_quantizers(module):
        problem = _scale_problem(module, name, quantizer)
        if problem:
            bad.append(f"{name} ({problem})")
    if bad:
        raise UserError(
            f"Unusable scales after calibration: {show(bad)}. A missing one means that no calibration token "
            "reached the module (raise calibration.num_samples); zero or NaN, that the teacher is damaged"
        )


def show(names: list[str]) -> str:
    """The first names of a list and how many more there are."""
    more = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _forward_all(module: nn.Module, samples: list[dict[str, Tensor]], tell: Callable[[str], None]) -> None:
    from nemo_qad.models.build import forward_logits

    every = max(1, len(samples) // 10)
    with torch.no_grad():
        for index, batch in enumerate(samples):
            if index % every == 0:
                tell(f"Calibrating, batch {index + 1} of {len(samples)}")
            forward_logits(module, batch["tokens"])


def _wanted(
    module: nn.Module, table: dict[str, LinearFormat], recipe: RecipeConfig
) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Quantizer name -> (part, format, kind)."""
    for name, linear in table.items():
        if linear.format != Format.bf16:
            yield name + _WEIGHT, (linear.part, linear.format.value, "weights")
        if linear.format == Format.fp8:
            yield name + _INPUT, (linear.part, linear.format.value, "activations")
    if recipe.kv_cache == KvFormat.none:
        return
    for name in table:
        if name.endswith("self_attention.linear_qkv"):
            attention = name.removesuffix("linear_qkv") + "core_attention"
            for which in "kv":
                yield f"{attention}.{which}_bmm_quantizer", (KV_PART, KvFormat(recipe.kv_cache).value, "kv")


def _format_of(quantizer: Any) -> tuple[str, str, str] | str:
    return "nvfp4" if modelopt.is_nvfp4(quantizer) else "fp8" if quantizer.is_fp8 else str(quantizer.num_bits)


def _scale_problem(module: nn.Module, name: str, quantizer: Any) -> str | None:
    """What is wrong with the amax that the stored scales come from, or None."""
    amax: Tensor | None
    if name.endswith(_WEIGHT) and quantizer.is_nvfp4_dynamic:
        amax = module.get_parameter(name.removesuffix(_WEIGHT) + ".weight").detach().abs().amax()
    elif quantizer.is_nvfp4_static:
        if not torch.isfinite(quantizer.amax).all():
            return "block amax is NaN or infinite"
        amax = quantizer.global_amax
    else:
        amax = getattr(quantizer, "_amax", None)
    if amax is None:
        return "missing"
    if not torch.isfinite(amax).all():
        return "NaN or infinite"
    return "zero" if bool((amax <= 0).any()) else None
