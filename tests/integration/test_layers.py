"""The error of each layer, against FP64 computations of the plain definitions on a real small model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log10
from typing import Any

import pytest
import torch
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.evaluation.layer_errors import LayerErrors
from nemo_qad.models.placement import Placement
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.layers import measure_layers
from nemo_qad.quantization.recipes import formats
from nemo_qad.quantization.student import effective_weight
from nemo_qad.schema import Format, ParallelConfig, RecipeConfig, ScaleSearch

MODEL = small_model()
RECIPES = (
    "max", "mamba_fp8_max", "mse", "four_over_six", "four_over_six_nvfp4_kv", "lightning_release", "four_over_six_w4a4"
)  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# Positive E4M3 numbers, from their definition: 3 bits of fraction, the smallest exponent without a leading 1.
E4M3 = torch.tensor(
    [(8 * (e > 0) + fraction) * 2.0 ** (max(e, 1) - 10) for e in range(16) for fraction in range(8)],
    dtype=torch.float64,
)[1:127]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def measured(module: nn.Module, recipe: RecipeConfig, **changes: Any) -> LayerErrors:
    """Calibrates a plain module and measures it."""
    calibrated = quantize(module, recipe, MODEL, batches(MODEL))
    arguments = {"expert_tokens": calibrated.expert_tokens, "idle_experts": calibrated.idle_experts}
    table, place = formats(recipe, MODEL), Placement(module).global_name
    return measure_layers(module, table, ScaleSearch(recipe.scale_search), place, **{**arguments, **changes})


def decibel(ratio: Tensor) -> float:
    return 10 * log10(float(ratio))


def sweep_error(weight: Tensor, scale_max: float) -> float:
    """FP64: the squared error of a tensor whose blocks each take the best of all 126 E4M3 scales."""
    blocks = weight.reshape(-1, 16)
    outer = weight.abs().max() / (6 * scale_max)
    lowest = torch.full((len(blocks),), torch.inf, dtype=torch.float64)
    for scale in E4M3:
        quotient = (blocks / (scale * outer)).abs()
        error = (quotient[..., None] - E2M1).abs().amin(-1).mul(scale * outer).square().sum(-1)
        lowest = torch.minimum(lowest, error)
    return float(lowest.sum())


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_are_those_of_fp64_definitions(name: str) -> None:
    recipe, module = load_recipe(name), build(MODEL)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    errors = measured(module, recipe)
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    expected = {linear: row for linear, row in formats(recipe, MODEL).items() if row.format != Format.bf16}
    assert [line.name for line in errors.linears] == list(expected)
    for line in errors.linears:
        weight = module.get_parameter(f"{line.name}.weight").detach().double()
        lost = effective_weight(module.get_submodule(line.name)).double() - weight
        assert (line.part, line.format) == (expected[line.name].part, expected[line.name].format.value)
        assert line.values == weight.numel()
        assert line.sqnr_db == pytest.approx(decibel(weight.square().sum() / lost.square().sum()), abs=1e-4)
        assert line.mse == pytest.approx(float(lost.square().mean()), rel=1e-5)
        assert (line.share_of_fours is not None) == (
            recipe.scale_search == ScaleSearch.four_over_six and line.format != "fp8"
        )
        if line.format == "fp8":
            assert line.block_sqnr_db is None and line.mse_ratio is None and line.level_db == line.sqnr_db > 27
        else:
            relative = lost.view(-1, 16).square().sum(-1) / weight.view(-1, 16).square().sum(-1)
            assert line.block_sqnr_db == pytest.approx(decibel(1 / relative.mean()), abs=1e-4)


@pytest.mark.parametrize("search", ["max", "mse", "mse_256", "four_over_six"])
def test_ratio_to_the_best_sweep_is_within_half_a_percent_of_trying_all_scales(search: str) -> None:
    module = build(MODEL)
    errors = measured(module, load_recipe("four_over_six", scale_search=ScaleSearch(search)))
    for line in errors.linears[::3]:
        weight = module.get_parameter(f"{line.name}.weight").detach().double()
        lost = effective_weight(module.get_submodule(line.name)).double() - weight
        exact = float(lost.square().sum()) / min(sweep_error(weight, limit) for limit in (448.0, 256.0))
        assert line.mse_ratio is not None and exact >= 1 - 1e-6
        assert exact / 1.005 <= line.mse_ratio <= exact * (1 + 1e-6), line.name
        assert (line.mse_ratio < 1.05) == search.startswith("mse"), line.name


def test_share_of_fours_is_that_of_blocks_with_an_enlarged_amax() -> None:
    """1.5 times their largest value, so that this becomes 4."""
    module = build(MODEL)
    for line in measured(module, load_recipe("four_over_six")).linears:
        linear: Any = module.get_submodule(line.name)
        amax = linear.weight.detach().view(-1, 16).abs().amax(-1)
        chosen = linear.weight_quantizer.amax.view(-1) / amax
        assert torch.isclose(chosen, torch.tensor(1.0)).logical_or(torch.isclose(chosen, torch.tensor(1.5))).all()
        assert line.share_of_fours == pytest.approx(float((chosen > 1.25).double().mean()))
        assert 0.2 < line.share_of_fours < 0.8


def spoil(module: nn.Module, name: str, factor: float) -> None:
    """Makes one block of a linear huge."""
    module.get_parameter(f"{name}.weight").data[2, 16:32] *= factor


@pytest.mark.parametrize(
    "name", ["decoder.layers.3.mixer.out_proj", "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1"]
)
def test_a_linear_with_one_huge_block_comes_first(name: str) -> None:
    """SQNR alone is that of the huge block; the others have lost everything."""
    module = build(MODEL)
    spoil(module, name, 1e7)
    errors = measured(module, load_recipe("four_over_six"))
    worst = errors.rows[0].worst
    assert worst.name == name and errors.standing_out == [worst]
    assert worst.sqnr_db is not None and worst.sqnr_db > 15 and worst.block_sqnr_db == pytest.approx(0, abs=0.1)


def test_a_linear_of_awkward_values_comes_first_by_sqnr() -> None:
    """Blocks of a 6 and fifteen values of 2.5, half-way between 2 and 3."""
    module, name = build(MODEL), "decoder.layers.4.mlp.linear_fc2"
    weight = module.get_parameter(f"{name}.weight").data
    weight.view(-1, 16)[:] = 2.5 / 6
    weight.view(-1, 16)[:, 0] = 1.0
    errors = measured(module, load_recipe("max"))
    assert errors.rows[0].worst.name == name and errors.standing_out[0].name == name


def test_experts_have_their_tokens_and_idle_ones_are_named() -> None:
    module: Any = build(MODEL)
    module.decoder.layers[1].mlp.router.expert_bias[:] = torch.tensor([9.0, 9.0, -9.0, -9.0])
    seen = sum(batch["tokens"].numel() for batch in batches(MODEL))
    errors = measured(module, load_recipe("four_over_six"))
    tokens = {line.expert: line.tokens for line in errors.linears if line.expert is not None}
    assert tokens == {0: seen, 1: seen, 2: 0, 3: 0}
    experts = "decoder.layers.1.mlp.experts.local_experts"
    assert errors.idle_experts == [f"{experts}.2", f"{experts}.3"]
    assert [row.num_idle for row in errors.rows if row.num_idle is not None] == [2]
    assert all(line.tokens is None and line.idle is None for line in errors.linears if line.expert is None)


def test_progress_and_exact_weights() -> None:
    """Weights that NVFP4 holds exactly have no error to speak of, and no infinity in the record."""
    module, steps = build(MODEL), []
    weight = module.get_parameter("output_layer.weight").data
    weight.view(-1, 16)[:] = torch.tensor([*E2M1.tolist(), *(-E2M1).tolist()])
    errors = measured(module, load_recipe("max"), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, len(errors.linears)) for done in range(1, len(errors.linears) + 1)]
    exact = next(line for line in errors.linears if line.name == "output_layer")
    assert exact == replace(exact, sqnr_db=None, block_sqnr_db=None, mse=0.0, mse_ratio=None)
    assert errors.rows[-1].worst == exact


def test_blocks_of_zeros_count_neither_as_lost_nor_as_kept() -> None:
    module, name = build(MODEL), "decoder.layers.0.mixer.in_proj"
    weight = module.get_parameter(f"{name}.weight").data
    weight[::2] = 0
    line = next(line for line in measured(module, load_recipe("four_over_six")).linears if line.name == name)
    lost = (effective_weight(module.get_submodule(name)) - weight)[1::2].double().reshape(-1, 16).square().sum(-1)
    relative = lost / weight[1::2].double().reshape(-1, 16).square().sum(-1)
    assert line.block_sqnr_db == pytest.approx(decibel(1 / relative.mean()), abs=1e-4)
