"""What a recipe does to a model: the format of each linear, ModelOpt's rules, and the coverage to expect.

A part of the model (routed experts, Mamba projections, ...) has one format. `formats` lists every
quantisable linear by name with its part and format; it is what ModelOpt's rules must reproduce, what the
coverage check compares with, and what the exported checkpoint says. Rules are globs over module names
below the model itself, so no wrapper's prefix can make one miss: callers pass the bare model.

Nothing here imports Megatron or ModelOpt.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nemo_qad.errors import ConfigError
from nemo_qad.huggingface.names import linear_names
from nemo_qad.quantization.nvfp4 import BLOCK_SIZE
from nemo_qad.schema import (
    Format,
    KvFormat,
    ModelConfig,
    QadScales,
    RecipeConfig,
    ScaleSearch,
    WeightScales,
)

# Field of RecipeConfig -> its linears, by Megatron-Core module name.
_PART_GLOBS: dict[str, tuple[str, ...]] = {
    "routed_experts": (
        "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1",
        "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2",
    ),
    "shared_experts": (
        "decoder.layers.*.mlp.shared_experts.linear_fc1",
        "decoder.layers.*.mlp.shared_experts.linear_fc2",
    ),
    "mamba": ("decoder.layers.*.mixer.in_proj", "decoder.layers.*.mixer.out_proj"),
    "dense_mlp": ("decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"),
    "attention": (
        "decoder.layers.*.self_attention.linear_qkv",
        "decoder.layers.*.self_attention.linear_proj",
    ),
    "output_layer": ("output_layer",),
}
_KV_QUANTIZERS = (
    "decoder.layers.*.self_attention.core_attention.k_bmm_quantizer",
    "decoder.layers.*.self_attention.core_attention.v_bmm_quantizer",
)
KV_PART = "kv_cache"
# Inputs, K and V in NVFP4: block scales from each vector, the global scale from calibration (it is stored).
_DYNAMIC_BLOCKS: dict[str, Any] = {
    "num_bits": (2, 1),
    "block_sizes": {-1: BLOCK_SIZE, "type": "dynamic", "scale_bits": (4, 3)},
}


@dataclass(frozen=True)
class LinearFormat:
    part: str
    format: Format


@dataclass(frozen=True)
class Expected:
    """A row of the coverage: how many quantizers of `kind` (weights, activations, kv) a part must have."""

    part: str
    format: str
    kind: str
    count: int


@dataclass(frozen=True)
class Rules:
    """`quant_cfg` in ModelOpt's schema, and the coverage it must give."""

    quant_cfg: list[dict[str, Any]]
    expected: tuple[Expected, ...]


def rules(recipe: RecipeConfig, model: ModelConfig, local: dict[str, str] | None = None) -> Rules:
    """Translates a recipe for one model.

    Args:
        local: local name -> global name of the linears of this rank, where they differ. Extra rules are globs over
            global names and are then spelt out; those of the parts mean all layers and all experts anyway.

    Raises:
        ConfigError: scales that do not go together, an extra rule that matches nothing, or a recipe
            without effect.
    """
    check_recipe(recipe, model)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for part, globs in _PART_GLOBS.items():
        for glob in globs:
            entries += _linear_entries(glob, part_format(recipe, part), recipe)
    for rule in recipe.extra_rules:
        matching = [name for name, whole in (local or {}).items() if fnmatchcase(whole, rule.modules)]
        for name in [rule.modules] if local is None else matching:
            entries += _linear_entries(name, Format(rule.format), recipe)
    if recipe.kv_cache != KvFormat.none:
        entries += [{"quantizer_name": name, "cfg": _kv_cfg(recipe.kv_cache)} for name in _KV_QUANTIZERS]
    return Rules(entries, tuple(expected_coverage(recipe, model)))


def formats(recipe: RecipeConfig, model: ModelConfig) -> dict[str, LinearFormat]:
    """Part and format of every quantisable linear of the model, by Megatron-Core module name."""
    table: dict[str, LinearFormat] = {}
    for name in linear_names(model):
        part = _part_of(name)
        chosen = part_format(recipe, part)
        for rule in recipe.extra_rules:
            if fnmatchcase(name, rule.modules):
                chosen = Format(rule.format)
        table[name] = LinearFormat(part, chosen)
    return table


def part_format(recipe: RecipeConfig, part: str) -> Format:
    """Format that the recipe gives a part; what no part claims (router, MTP block) stays BF16."""
    return Format(getattr(recipe, part)) if part in _PART_GLOBS else Format.bf16


def expected_coverage(recipe: RecipeConfig, model: ModelConfig) -> list[Expected]:
    """Quantizers by part, format and kind. Parts count by the architecture, extra rules by name."""
    counts: dict[tuple[str, Format], int] = {}
    for linear in formats(recipe, model).values():
        key = (linear.part, linear.format)
        counts[key] = counts.get(key, 0) + 1
    if not recipe.extra_rules:
        _check_counts(counts, model)
    rows = []
    for (part, chosen), count in counts.items():
        if chosen != Format.bf16:
            rows.append(Expected(part, chosen.value, "weights", count))
        if chosen.covers_inputs:
            rows.append(Expected(part, chosen.value, "activations", count))
    if recipe.kv_cache != KvFormat.none and num_layers(model, "*"):
        rows.append(Expected(KV_PART, KvFormat(recipe.kv_cache).value, "kv", 2 * num_layers(model, "*")))
    return rows


def part_counts(model: ModelConfig) -> dict[str, int]:
    """Linears of each part by arithmetic on the layer pattern, independent of the table of names."""
    moe_layers = num_layers(model, "E")
    routed = 2 * moe_layers * model.moe.num_experts if moe_layers else 0
    return {
        "routed_experts": routed,
        "shared_experts": 2 * moe_layers if model.moe.shared_expert_ffn_hidden_size else 0,
        "mamba": 2 * num_layers(model, "M"),
        "dense_mlp": 2 * num_layers(model, "-"),
        "attention": 2 * num_layers(model, "*"),
        "output_layer": 0 if model.tied_output else 1,
    }


def num_layers(model: ModelConfig, kind: str) -> int:
    """Layers of a kind (M, *, E, -) in the pattern, the MTP block not counted."""
    return model.hybrid_pattern.count(kind)


def check_recipe(recipe: RecipeConfig, model: ModelConfig) -> None:
    """Raises ConfigError where a recipe and a model do not go together (`rules` lists the cases).

    Widths and choices that need no table of names are refused earlier, when the configuration is loaded.
    """
    kept = {WeightScales.static: QadScales.frozen, WeightScales.dynamic: QadScales.dynamic}[
        recipe.weight_scales
    ]
    if recipe.qad_scales != kept or (kept == QadScales.dynamic and recipe.scale_search != ScaleSearch.max):
        raise ConfigError(
            "recipe.weight_scales",
            recipe.weight_scales,
            f"does not go with qad_scales={recipe.qad_scales} and scale_search={recipe.scale_search}: "
            "static scales are searched once and kept in QAD, dynamic ones always follow the weights",
            "Use static with frozen and any search, or dynamic with dynamic and max",
        )
    table = formats(recipe, model)
    for index, rule in enumerate(recipe.extra_rules):
        if not any(fnmatchcase(name, rule.modules) for name in table):
            raise ConfigError(
                f"recipe.extra_rules[{index}].modules",
                rule.modules,
                "matches no linear of the model",
                f"Names look like {', '.join(list(table)[:3])}",
            )
    if recipe.kv_cache == KvFormat.none and all(linear.format == Format.bf16 for linear in table.values()):
        raise ConfigError(
            "recipe.name", recipe.name, "quantises nothing in this model", "Give a part a format"
        )


def _check_counts(counts: dict[tuple[str, Format], int], model: ModelConfig) -> None:
    for part, count in part_counts(model).items():
        named = sum(n for (name, _), n in counts.items() if name == part)
        assert named == count, f"{part}: the table of names has {named} linears, the layer pattern {count}"


def _part_of(name: str) -> str:
    for part, globs in _PART_GLOBS.items():
        if any(fnmatchcase(name, glob) for glob in globs):
            return part
    return "other"


def _linear_entries(glob: str, chosen: Format, recipe: RecipeConfig) -> list[dict[str, Any]]:
    weight, inputs = f"{glob}.weight_quantizer", f"{glob}.input_quantizer"
    if chosen == Format.bf16:
        return [{"quantizer_name": weight, "enable": False}, {"quantizer_name": inputs, "enable": False}]
    if chosen == Format.fp8:
        return [
            {"quantizer_name": name, "cfg": {"num_bits": (4, 3), "axis": None}} for name in (weight, inputs)
        ]
    rule: dict[str, Any] = {"cfg": _DYNAMIC_BLOCKS} if chosen.covers_inputs else {"enable": False}
    return [{"quantizer_name": weight, "cfg": _nvfp4_weight_cfg(recipe)}, {"quantizer_name": inputs, **rule}]


def _nvfp4_weight_cfg(recipe: RecipeConfig) -> dict[str, Any]:
    """Static: amax buffers from calibration. Dynamic: no buffer, block scales and global scale follow the
    weights at each forward, since a frozen global scale would clip blocks that outgrow it."""
    blocks: dict[Any, Any] = {
        -1: BLOCK_SIZE,
        "type": WeightScales(recipe.weight_scales).value,
        "scale_bits": (4, 3),
    }
    if ScaleSearch(recipe.scale_search).leaves_room:
        blocks["four_over_six"] = True  # ModelOpt's name for block scales of up to 256
    cfg: dict[str, Any] = {"num_bits": (2, 1), "block_sizes": blocks}
    if recipe.weight_scales == WeightScales.dynamic:
        cfg["type"] = "dynamic"
    return cfg


def _kv_cfg(kv_format: KvFormat) -> dict[str, Any]:
    return {"num_bits": (4, 3), "axis": None} if kv_format == KvFormat.fp8 else _DYNAMIC_BLOCKS
