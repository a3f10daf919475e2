"""The recipes as shipped: ModelOpt's rules, formats by name, and counts worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

import pytest

from nemo_qad.config import compose
from nemo_qad.errors import ConfigError
from nemo_qad.quantization.recipes import Expected, Rules, expected_coverage, formats, part_counts, rules
from nemo_qad.schema import (
    ExtraRule,
    Format,
    KvFormat,
    ModelConfig,
    QadScales,
    RecipeConfig,
    ScaleSearch,
    WeightScales,
)

NANO = "nemotron_3_nano_30b_a3b"
RECIPES = (
    "max", "mamba_fp8_max", "mse", "four_over_six", "four_over_six_nvfp4_kv", "lightning_release", "four_over_six_w4a4"
)  # fmt: skip


def recipe(name: str, **changes: Any) -> RecipeConfig:
    return dataclasses.replace(compose([f"+recipe={name}"]).recipe, **changes)


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    return compose(["+recipe=max", "model=tiny_hybrid"]).model


def rule_of(plan: Rules, quantizer: str) -> dict[str, Any] | None:
    """What ModelOpt would apply to a quantizer: the last entry that matches, None where it is off."""
    last = [entry for entry in plan.quant_cfg if fnmatchcase(quantizer, entry["quantizer_name"])][-1]
    return None if last.get("enable", True) is False else last["cfg"]


@pytest.mark.parametrize("name", RECIPES)
def test_rules_give_every_linear_its_format(name: str, tiny: ModelConfig) -> None:
    chosen = recipe(name)
    plan, table = rules(chosen, tiny), formats(chosen, tiny)
    bits = {Format.nvfp4: (2, 1), Format.nvfp4_w4a4: (2, 1), Format.fp8: (4, 3)}
    for linear, fields in table.items():
        weight = rule_of(plan, f"{linear}.weight_quantizer")
        inputs = rule_of(plan, f"{linear}.input_quantizer")
        assert (weight or {}).get("num_bits") == bits.get(fields.format), linear
        assert (inputs is not None) == (fields.format in (Format.fp8, Format.nvfp4_w4a4)), linear
    for other in ("decoder.layers.1.mlp.router", "embedding.word_embeddings", "mtp.layers.0.mixer.in_proj"):
        assert rule_of(plan, f"{other}.weight_quantizer") is None


@pytest.mark.parametrize("name", RECIPES)
def test_published_table(name: str, tiny: ModelConfig) -> None:
    chosen = recipe(name)
    assert chosen.name == name
    experts_and_head = (chosen.routed_experts, chosen.shared_experts, chosen.output_layer)
    w4a4 = name == "four_over_six_w4a4"
    assert set(experts_and_head) == ({Format.nvfp4_w4a4, Format.bf16} if w4a4 else {Format.nvfp4})
    assert chosen.attention == Format.bf16
    mamba = Format.fp8 if name in ("mamba_fp8_max", "lightning_release") else chosen.routed_experts
    assert chosen.mamba == mamba
    dynamic = name in ("max", "mamba_fp8_max")
    assert chosen.weight_scales == (WeightScales.dynamic if dynamic else WeightScales.static)
    assert chosen.qad_scales == (QadScales.dynamic if dynamic else QadScales.frozen)
    assert chosen.kv_cache == (KvFormat.nvfp4 if name == "four_over_six_nvfp4_kv" else KvFormat.fp8)
    search = {"mse": ScaleSearch.mse}.get(name, ScaleSearch.max if dynamic else ScaleSearch.four_over_six)
    assert chosen.scale_search == search
    blocks = rule_of(rules(chosen, tiny), "decoder.layers.1.mlp.shared_experts.linear_fc1.weight_quantizer")
    assert blocks is not None
    assert blocks["block_sizes"]["type"] == chosen.weight_scales.value
    assert blocks["block_sizes"].get("four_over_six", False) == (search == ScaleSearch.four_over_six)


def test_counts_of_the_tiny_model_by_hand(tiny: ModelConfig) -> None:
    assert tiny.hybrid_pattern == "ME*ME" and tiny.moe.num_experts == 8
    assert expected_coverage(recipe("mamba_fp8_max"), tiny) == [
        Expected("mamba", "fp8", "weights", 4),
        Expected("mamba", "fp8", "activations", 4),
        Expected("routed_experts", "nvfp4", "weights", 32),
        Expected("shared_experts", "nvfp4", "weights", 4),
        Expected("output_layer", "nvfp4", "weights", 1),
        Expected("kv_cache", "fp8", "kv", 2),
    ]


def test_counts_of_the_released_checkpoint() -> None:
    """The released Lightning layout has 5,935 W4A16_NVFP4 and 46 FP8 layers; the 46 are Mamba projections."""
    model = compose(["+recipe=max", f"model={NANO}"]).model
    formats_of = Counter(linear.format for linear in formats(recipe("lightning_release"), model).values())
    assert formats_of[Format.nvfp4] == 23 * 128 * 2 + 23 * 2 + 1 == 5935
    assert formats_of[Format.fp8] == 23 * 2
    assert formats_of[Format.bf16] == 6 * 2
    assert part_counts(model)["routed_experts"] == 5888


def test_extra_rules_override_a_part(tiny: ModelConfig) -> None:
    extra = [ExtraRule("decoder.layers.0.mixer.*", Format.bf16), ExtraRule("*.linear_proj", Format.fp8)]
    chosen = recipe("four_over_six", extra_rules=extra)
    plan, table = rules(chosen, tiny), formats(chosen, tiny)
    assert table["decoder.layers.0.mixer.in_proj"].format == Format.bf16
    assert rule_of(plan, "decoder.layers.0.mixer.in_proj.weight_quantizer") is None
    assert rule_of(plan, "decoder.layers.3.mixer.in_proj.weight_quantizer") is not None
    proj = "decoder.layers.2.self_attention.linear_proj"
    assert table[proj].format == Format.fp8 and rule_of(plan, f"{proj}.input_quantizer") is not None
    assert Expected("mamba", "nvfp4", "weights", 2) in plan.expected
    assert Expected("attention", "fp8", "activations", 1) in plan.expected


def test_extra_rule_that_matches_nothing_is_named(tiny: ModelConfig) -> None:
    extra = [ExtraRule("language_model.decoder.*", Format.bf16)]
    with pytest.raises(ConfigError, match=r"extra_rules\[0\].modules=language_model.*: matches no"):
        rules(recipe("max", extra_rules=extra), tiny)


@pytest.mark.parametrize(
    "changes",
    [
        {"qad_scales": QadScales.frozen},
        {"weight_scales": WeightScales.static},
        {"scale_search": ScaleSearch.mse},
    ],
)
def test_scales_that_do_not_go_together_are_refused(changes: dict[str, Any], tiny: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"recipe.weight_scales="):
        rules(recipe("max", **changes), tiny)


def test_recipe_without_effect_is_refused(tiny: ModelConfig) -> None:
    parts = ("routed_experts", "shared_experts", "mamba", "dense_mlp", "output_layer")
    nothing = recipe("max", kv_cache=KvFormat.none, **dict.fromkeys(parts, Format.bf16))
    with pytest.raises(ConfigError, match=r"quantises nothing"):
        rules(nothing, tiny)
