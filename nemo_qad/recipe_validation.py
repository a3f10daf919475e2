"""Recipes, calibration and the quantised side of QAD: choices that cannot work together, and widths without blocks."""

from __future__ import annotations

from nemo_qad.errors import ConfigError
from nemo_qad.schema import (
    Format,
    KvFormat,
    ModelConfig,
    ParallelConfig,
    QadScales,
    RecipeConfig,
    RunConfig,
    ScaleError,
    ScaleSearch,
    WeightScales,
)

BLOCK = 16  # values that share an NVFP4 block scale


def check_recipe(run: RunConfig) -> None:
    """Raises ConfigError for the first choice of recipe, calibration or QAD scales that cannot work."""
    _check_scales(run.recipe, run.model)
    _check_block_sizes(run.recipe, run.model, run.parallel)
    _check_calibration(run)
    _check_training(run)


def _check_calibration(run: RunConfig) -> None:
    recipe = run.recipe
    if run.calibration.error is ScaleError.hessian and recipe.scale_search is ScaleSearch.max:
        raise ConfigError(
            "calibration.error",
            run.calibration.error,
            f"recipe.scale_search={recipe.scale_search} takes scales from the largest values and weighs no errors",
            "Give a recipe that searches its scales (mse, four_over_six), or calibration.error=squared.",
        )


def _check_training(run: RunConfig) -> None:
    qad, recipe = run.qad, run.recipe
    parts = ("routed_experts", "shared_experts", "mamba", "dense_mlp", "attention", "output_layer")
    fp8 = any(getattr(recipe, part) is Format.fp8 for part in parts)
    fp8 = fp8 or any(rule.format is Format.fp8 for rule in recipe.extra_rules)
    if qad.clip_weights and recipe.qad_scales is QadScales.dynamic and not fp8:
        problem = "recipe.qad_scales=dynamic lets scales follow the weights, none of which is ever out of range"
        raise ConfigError("qad.clip_weights", "true", problem, "Leave it out, or choose a recipe with frozen scales.")
    if qad.refresh_scales_every and recipe.qad_scales is QadScales.dynamic:
        problem = "recipe.qad_scales=dynamic chooses scales anew at every step"
        remedy = "Leave it out, or choose a recipe with frozen scales."
        raise ConfigError("qad.refresh_scales_every", qad.refresh_scales_every, problem, remedy)
    if qad.refresh_scales_every and run.calibration.error is ScaleError.hessian:
        problem = "calibration.error=hessian weighs errors by calibration's inputs, which QAD does not keep"
        remedy = "Give qad.refresh_scales_every=0 or calibration.error=squared."
        raise ConfigError("qad.refresh_scales_every", qad.refresh_scales_every, problem, remedy)


def _check_scales(recipe: RecipeConfig, model: ModelConfig) -> None:
    if recipe.scale_search is not ScaleSearch.max and recipe.weight_scales is WeightScales.dynamic:
        raise ConfigError(
            "recipe.scale_search",
            recipe.scale_search,
            "a search needs scales that are kept, and recipe.weight_scales=dynamic recomputes them",
            "Give recipe.weight_scales=static or recipe.scale_search=max.",
        )
    if recipe.qad_scales is QadScales.frozen and recipe.weight_scales is WeightScales.dynamic:
        raise ConfigError(
            "recipe.qad_scales",
            recipe.qad_scales,
            "recipe.weight_scales=dynamic leaves nothing to freeze",
            "Give recipe.weight_scales=static or recipe.qad_scales=dynamic.",
        )
    if recipe.qad_scales is QadScales.dynamic and recipe.weight_scales is WeightScales.static:
        raise ConfigError(
            "recipe.qad_scales",
            recipe.qad_scales,
            "recipe.weight_scales=static keeps the scales of calibration",
            "Give recipe.qad_scales=frozen or recipe.weight_scales=dynamic.",
        )
    if model.tied_output and recipe.output_layer is not Format.bf16:
        raise ConfigError(
            "recipe.output_layer",
            recipe.output_layer,
            "model.tied_output=true shares this weight with the embedding, which stays BF16",
            "Give recipe.output_layer=bf16, or model.tied_output=false with model.path: an output layer of its own.",
        )


def _linear_inputs(model: ModelConfig, parallel: ParallelConfig) -> dict[str, list[tuple[str, int]]]:
    """For each part of a recipe that the model has: (field, input width on one rank) of its linears."""
    layers, tensor = model.hybrid_pattern, parallel.tensor
    hidden = ("model.hidden_size", model.hidden_size)
    parts: dict[str, list[tuple[str, int]]] = {"output_layer": [hidden]}
    if "E" in layers:
        expert, shared = model.moe.ffn_hidden_size, model.moe.shared_expert_ffn_hidden_size
        parts["routed_experts"] = [hidden, ("model.moe.ffn_hidden_size", expert // parallel.expert_tensor)]
        if shared:
            parts["shared_experts"] = [hidden, ("model.moe.shared_expert_ffn_hidden_size", shared // tensor)]
    if "M" in layers:
        width = model.mamba.num_heads * model.mamba.head_dim
        parts["mamba"] = [hidden, ("model.mamba.head_dim", width // tensor)]
    if "*" in layers:
        width = model.attention.num_heads * model.attention.head_dim
        parts["attention"] = [hidden, ("model.attention.head_dim", width // tensor)]
    if "-" in layers:
        parts["dense_mlp"] = [hidden, ("model.ffn_hidden_size", model.ffn_hidden_size // tensor)]
    return parts


def _check_block_sizes(recipe: RecipeConfig, model: ModelConfig, parallel: ParallelConfig) -> None:
    for part, inputs in _linear_inputs(model, parallel).items():
        chosen = Format(getattr(recipe, part))
        if not chosen.has_blocks:
            continue
        for field, width in inputs:
            if width % BLOCK:
                raise ConfigError(
                    field,
                    _lookup(model, field),
                    f"recipe.{part}={chosen} shares a scale among {BLOCK} inputs, and a rank has {width}",
                    f"Make that a multiple of {BLOCK} with fewer tensor-parallel ranks or another width, or give "
                    f"recipe.{part}=bf16.",
                )
    head_dim = model.attention.head_dim
    if recipe.kv_cache is KvFormat.nvfp4 and "*" in model.hybrid_pattern and head_dim % BLOCK:
        problem = f"recipe.kv_cache=nvfp4 needs a multiple of {BLOCK}"
        remedy = "Change it, or give recipe.kv_cache=fp8."
        raise ConfigError("model.attention.head_dim", head_dim, problem, remedy)


def _lookup(model: ModelConfig, field: str) -> object:
    value: object = model
    for name in field.split(".")[1:]:
        value = getattr(value, name)
    return value
