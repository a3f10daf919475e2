"""The error of each layer on several ranks is that of one rank: parts are added, copies are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layouts import LAYOUTS, ONE, batches, build, hybrid, weights_of
from ranks import Results, run_ranks

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.models.placement import Placement
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.layers import measure_layers
from nemo_qad.quantization.recipes import formats
from nemo_qad.schema import Format, ParallelConfig, RecipeConfig

MODEL = hybrid()
RECIPES = ("four_over_six", "max")  # static and dynamic scales
FIELDS = ("values", "sqnr_db", "block_sqnr_db", "mse", "mse_ratio", "share_of_fours", "tokens")


def recipe_named(name: str) -> RecipeConfig:
    """With FP8 attention beside NVFP4: both kinds of sums, and every kind of cut."""
    return dataclasses.replace(compose([f"+recipe={name}"]).recipe, attention=Format.fp8)


def measure(rank: int, parallel: ParallelConfig, weights: Results | None) -> Results:
    """recipe|global name -> the numbers of FIELDS, NaN for None; on one rank the weights, too."""
    found: Results = {}
    with runtime.process_groups(parallel, seed=1, threads=1):
        for name in RECIPES:
            module, recipe = build(MODEL, parallel, weights), recipe_named(name)
            found |= {f"parameter|{n}": p for n, p in weights_of(module).items() if weights is None}
            calibrated = quantize(module, recipe, MODEL, batches(MODEL, 2))
            errors = measure_layers(
                module, formats(recipe, MODEL), recipe.scale_search, Placement(module).global_name,
                expert_tokens=calibrated.expert_tokens, idle_experts=calibrated.idle_experts,
            )  # fmt: skip
            for line in errors.linears:
                numbers = [float("nan") if n is None else n for n in (getattr(line, field) for field in FIELDS)]
                found[f"{name}|{line.name}"] = torch.tensor(numbers, dtype=torch.float64)
    return found


@pytest.fixture(scope="module")
def one_rank() -> Results:
    return run_ranks(measure, 1, ONE, None, environment=True)[0]


@pytest.mark.parametrize("layout", ["tp2_ep2", "dp4_ep2"])
def test_every_rank_has_the_numbers_of_one(one_rank: Results, layout: str) -> None:
    weights = {n.removeprefix("parameter|"): w for n, w in one_rank.items() if n.startswith("parameter|")}
    expected = {n: numbers for n, numbers in one_rank.items() if not n.startswith("parameter|")}
    quantised = [f for name in RECIPES for f in formats(recipe_named(name), MODEL).values() if f.format != Format.bf16]
    assert len(expected) == len(quantised)
    parallel = LAYOUTS[layout]
    for found in run_ranks(measure, parallel.ranks_per_node, parallel, weights, environment=True):
        assert found.keys() == expected.keys()
        for linear, numbers in expected.items():
            assert torch.equal(found[linear][0], numbers[0]), linear
            assert torch.allclose(found[linear][:-1], numbers[:-1], rtol=1e-9, equal_nan=True), linear
            # A near tie of the router may fall otherwise where sums have another order.
            assert torch.allclose(found[linear][-1], numbers[-1], atol=1, rtol=0, equal_nan=True), linear
