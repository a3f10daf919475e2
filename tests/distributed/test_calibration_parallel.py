"""Calibration on several ranks gives the scales of one rank: TP 1, 2, 4, EP 1, 2 and both; DP deals out the data."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, ONE, batches, build, cut, hybrid
from ranks import Results, run_ranks

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.models.placement import Placement
from nemo_qad.quantization import nvfp4
from nemo_qad.quantization.calibrate import Calibrated, quantize
from nemo_qad.quantization.student import effective_weight, is_quantised, quantizer_state
from nemo_qad.schema import CalibrationConfig, ParallelConfig, RecipeConfig, ScaleError

MODEL = hybrid()
RECIPES = (
    "mse", "four_over_six", "four_over_six_nvfp4_kv", "mse_256", "max", "lightning_release", "four_over_six_w4a4"
)  # fmt: skip


def recipe_named(name: str) -> RecipeConfig:
    """mse_256 is a choice of search, not a recipe: four_over_six with it. Attention is quantised too: q, k, v."""
    changes = ["recipe.scale_search=mse_256"] if name == "mse_256" else []
    base = "four_over_six" if name == "mse_256" else name
    return dataclasses.replace(compose([f"+recipe={base}", "recipe.attention=nvfp4", *changes]).recipe)


def measure(module: Any, calibrated: Calibrated) -> Results:
    """Whole scales and quantised weights by global name, as far as this rank's experts go."""
    found: Results = {}
    placement = Placement(module)
    for name, value in quantizer_state(module).items():
        found[f"scale|{placement.global_name(name)}"] = value
    for name, child in module.named_modules():
        if is_quantised(child):
            pieces_ = cut(module, f"{name}.weight", child.get_parameter("weight"))
            key = placement.global_name(name)
            weight = effective_weight(child)
            found[f"weight|{key}"] = pieces_.whole(weight) if pieces_ else weight
            if child.weight_quantizer.is_nvfp4_static:
                amax = child.weight_quantizer.amax.view(weight.shape[0], -1)
                blocks = pieces_.per_block(nvfp4.BLOCK_SIZE) if pieces_ else None
                found[f"scale|{key}.weight_quantizer._amax"] = blocks.whole(amax) if blocks else amax
    for name, count in calibrated.expert_tokens.items():
        found[f"tokens|{name}"] = torch.tensor(count)
    return found


def calibrate(
    rank: int, parallel: ParallelConfig, weights: Results | None, names: list[str], samples: int, error: str
) -> Results:
    with runtime.process_groups(parallel, seed=1, threads=1):
        found: Results = {}
        for name in names:
            module = build(MODEL, parallel, weights)
            if weights is None:
                found |= {f"parameter|{n}": p.detach().clone() for n, p in module.named_parameters()}
            settings = CalibrationConfig(error=ScaleError(error))
            calibrated = quantize(module, recipe_named(name), MODEL, batches(MODEL, samples), calibration=settings)
            found |= {f"{name}|{key}": value for key, value in measure(module, calibrated).items()}
        return found


def part(results: Results, prefix: str) -> Results:
    return {name.removeprefix(prefix): value for name, value in results.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def one() -> Results:
    return run_ranks(calibrate, 1, ONE, None, list(RECIPES), 4, "squared", environment=True)[0]


def compare(one: Results, ranks: list[Results], recipe: str) -> set[str]:
    """Scales and weights of every rank against those of one rank; returns the names that were compared."""
    expected = part(one, f"{recipe}|")
    seen: set[str] = set()
    for found in ranks:
        for name, value in part(found, f"{recipe}|").items():
            kind, _, what = name.partition("|")
            if kind == "tokens":
                continue
            reference = expected[name].view(value.shape) if kind == "scale" else expected[name]
            if what.endswith(("bmm_quantizer._amax", "input_quantizer._amax")):
                # Of activations: the sums of a layer's output have another order on several ranks.
                assert torch.allclose(value, reference, rtol=1e-5), name
            else:
                assert torch.equal(value.view(torch.int32), reference.view(torch.int32)), name
            seen.add(name)
    return seen


@pytest.mark.parametrize("layout", ["tp2", "ep2", "tp2_ep2", "tp4"])
def test_scales_and_weights_equal_those_of_one_rank(one: Results, layout: str) -> None:
    parallel = LAYOUTS[layout]
    ranks = run_ranks(
        calibrate, parallel.ranks_per_node, parallel, part(one, "parameter|"), list(RECIPES), 4, "squared",
        environment=True,
    )  # fmt: skip
    for recipe in RECIPES:
        wanted = {name for name in part(one, f"{recipe}|") if not name.startswith("tokens|")}
        assert compare(one, ranks, recipe) == wanted, recipe
