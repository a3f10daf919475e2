"""Calibration data dealt out to ranks, experts that no token reached, scales resharded, and gated MLPs under TP."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, ONE, SEQUENCE, batches, build, cut, hybrid
from megatron.core import dist_checkpointing
from megatron.core.models.hybrid.hybrid_model import HybridModel
from ranks import Results, run_ranks

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.errors import UserError
from nemo_qad.models.build import stage_pattern, transformer_config
from nemo_qad.models.hybrid import torch_spec
from nemo_qad.models.placement import Placement
from nemo_qad.quantization import nvfp4
from nemo_qad.quantization.calibrate import deal, quantize
from nemo_qad.quantization.sharded_scales import ShardedScales
from nemo_qad.quantization.student import effective_weight, quantizer_state, restore_quantizers
from nemo_qad.schema import CalibrationConfig, Format, IdleExperts, ParallelConfig, RecipeConfig, ScaleError

MODEL = hybrid()
IDLE = "decoder.layers.1.mlp.experts.local_experts.3"
FIRST = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1"
OTHERS = re.compile(r"decoder\.layers\.1\.mlp\.experts\.local_experts\.[012]\.")


def recipe_named(name: str, **changes: Any) -> RecipeConfig:
    return dataclasses.replace(compose([f"+recipe={name}"]).recipe, **changes)


def part(results: Results, prefix: str) -> Results:
    return {name.removeprefix(prefix): value for name, value in results.items() if name.startswith(prefix)}


def test_every_sample_counts_once_whatever_the_number_of_ranks() -> None:
    for count in range(1, 12):
        samples = batches(MODEL, count)
        for ranks in range(1, 6):
            weights = dict.fromkeys(range(count), 0.0)
            numbers = [list(deal(samples, rank, ranks)) for rank in range(ranks)]
            assert len({len(each) for each in numbers}) == 1  # else a rank waits for another
            for batch, share in (item for each in numbers for item in each):
                weights[next(i for i, s in enumerate(samples) if s is batch)] += share
            assert all(weight == pytest.approx(1) for weight in weights.values())


def test_a_short_batch_goes_to_all_ranks() -> None:
    """Ranks of one round exchange tokens: their batches must have one shape."""
    samples = [*batches(MODEL, 3), *batches(MODEL, 1, size=1)]
    assert [[share for _, share in deal(samples, rank, 2)] for rank in (0, 1)] == [[1.0, 0.5, 0.5]] * 2


# Data-parallel ranks


def calibrate_fp8(rank: int, parallel: ParallelConfig, weights: Results | None, samples: int) -> Results:
    """Everything that depends on data: FP8 inputs, K and V, tokens of experts, scales weighed by Hessians."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        module = build(MODEL, parallel, weights)
        parameters = {f"parameter|{n}": p.detach().clone() for n, p in module.named_parameters()}
        recipe = recipe_named("lightning_release", routed_experts=Format.fp8)
        settings = CalibrationConfig(error=ScaleError.hessian)
        calibrated = quantize(module, recipe, MODEL, batches(MODEL, samples), calibration=settings)
        placement = Placement(module)
        found = {placement.global_name(n): v for n, v in quantizer_state(module).items() if v.numel() == 1}
        found |= {f"tokens|{n}": torch.tensor(count) for n, count in calibrated.expert_tokens.items()}
        if hasattr(module, "output_layer"):  # the last stage of a pipeline
            found["output_layer"] = effective_weight(module.get_submodule("output_layer"))
        return found | (parameters if weights is None else {})


@pytest.fixture(scope="module")
def seven_samples() -> Results:
    return run_ranks(calibrate_fp8, 1, ONE, None, 7, environment=True)[0]


@pytest.mark.parametrize("layout", ["dp4", "dp4_ep2", "cp2", "pp2", "tp2_cp2", "pp2_dp2_ep2"])
def test_seven_samples_on_several_ranks(seven_samples: Results, layout: str) -> None:
    """E18: no rank waits, none counts a sample twice, and every rank has the scales of one rank."""
    parallel, weights = LAYOUTS[layout], part(seven_samples, "parameter|")
    ranks = run_ranks(calibrate_fp8, parallel.ranks_per_node, parallel, weights, 7, environment=True)
    names = {name for found in ranks for name in found}
    assert names == {name for name in seven_samples if not name.startswith("parameter|")}
    for found in ranks:
        held = {name: value for name, value in found.items() if name != "output_layer"}
        for name, value in held.items():
            if name.startswith("tokens|"):
                assert abs(int(value) - int(seven_samples[name])) <= 1, name  # a near tie of the router may flip
            else:
                assert torch.allclose(value, seven_samples[name].view(value.shape), rtol=1e-5), name
        if "output_layer" in found and parallel.tensor == 1:
            # Sums of X^T X have another order: a near tie of two scales may fall otherwise, seldom.
            same = (found["output_layer"] == seven_samples["output_layer"]).float().mean()
            assert same > 0.999


# Idle experts


def starve(module: Any) -> None:
    """No token reaches expert 3 of layer 1, wherever it is."""
    placement = Placement(module)
    for name, child in module.named_modules():
        if hasattr(child, "expert_bias") and placement.global_name(name).startswith("decoder.layers.1."):
            child.expert_bias[:] = torch.tensor([0.0, 0.0, 0.0, -99.0])


def calibrate_starved(rank: int, parallel: ParallelConfig, weights: Results | None) -> Results:
    """Scalar scales, by policy and name, and the message of the policy that is an error."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        module, found = build(MODEL, parallel, weights), {}
        if weights is None:  # expert 0, which another rank than expert 3's holds at EP 2, shall have the largest
            module.get_submodule(FIRST).weight.data.mul_(3)
            weights = {name: p.detach().clone() for name, p in module.named_parameters()}
            found = {f"parameter|{name}": p for name, p in weights.items()}
        recipe = recipe_named("four_over_six", routed_experts=Format.fp8)
        for policy in IdleExperts:
            module = build(MODEL, parallel, weights)
            starve(module)
            settings = CalibrationConfig(idle_experts=policy)
            try:
                calibrated = quantize(module, recipe, MODEL, batches(MODEL, 4), calibration=settings)
            except UserError as error:
                found[f"{policy}|message"] = torch.tensor(list(str(error).encode()), dtype=torch.uint8)
                continue
            assert calibrated.idle_experts == [IDLE]
            assert calibrated.expert_tokens[IDLE] == 0
            name_of = Placement(module).global_name
            state = quantizer_state(module).items()
            found |= {f"{policy}|{name_of(name)}": value for name, value in state if value.numel() == 1}
        return found


@pytest.fixture(scope="module")
def starved_whole() -> Results:
    return run_ranks(calibrate_starved, 1, ONE, None, environment=True)[0]


@pytest.fixture(scope="module")
def starved(starved_whole: Results) -> dict[str, Results]:
    return {policy: part(starved_whole, f"{policy}|") for policy in IdleExperts}


def amax(found: Results, expert: str, linear: str) -> float:
    return float(found[f"{expert}.{linear}.input_quantizer._amax"])


@pytest.mark.parametrize("linear", ["linear_fc1", "linear_fc2"])
def test_idle_expert_takes_the_largest_input_scale_of_its_layer(starved: dict[str, Results], linear: str) -> None:
    """E3, E5: `weights` lends a scale, finite and positive; the other experts keep their own."""
    found = starved["weights"]
    end = f"{linear}.input_quantizer._amax"
    others = [value for name, value in found.items() if OTHERS.match(name) and name.endswith(end)]
    assert len(others) == 3 and len({float(value) for value in others}) > 1
    assert amax(found, IDLE, linear) == max(map(float, others))


def test_idle_expert_may_see_all_tokens(starved: dict[str, Results]) -> None:
    """Its first linear then meets every token of the layer, hence at least what each other expert met."""
    shown, lent = starved["all_tokens"], starved["weights"]
    assert amax(shown, IDLE, "linear_fc1") >= amax(lent, IDLE, "linear_fc1")
    assert amax(shown, IDLE, "linear_fc2") != amax(lent, IDLE, "linear_fc2")  # its own, no longer lent
    for name, value in lent.items():
        if OTHERS.match(name):
            assert torch.equal(value, shown[name]), name  # routing stayed as it is


def test_idle_expert_may_be_an_error(starved: dict[str, Results]) -> None:
    message = bytes(starved["error"]["message"].tolist()).decode()
    assert message.startswith(f"calibration.idle_experts=error: no calibration token reached {IDLE}. Raise")


def test_idle_expert_on_one_of_two_ranks(starved_whole: Results) -> None:
    """E3: no rank hangs, the lent scale comes from the other rank's experts too, and both ranks tell the same."""
    weights = part(starved_whole, "parameter|")
    ranks = run_ranks(calibrate_starved, 2, LAYOUTS["ep2"], weights, environment=True)
    for found in ranks:
        assert {name.partition("|")[0] for name in found} == set(IdleExperts)
        for name, value in found.items():
            assert torch.allclose(value.float(), starved_whole[name].view(value.shape).float(), rtol=1e-5), name
    assert any(f"weights|{IDLE}.linear_fc1.input_quantizer._amax" in found for found in ranks)


# Scales in a sharded checkpoint


def save_scales(rank: int, parallel: ParallelConfig, weights: Results | None, folder: str) -> Results:
    with runtime.process_groups(parallel, seed=1, threads=1):
        module = build(MODEL, parallel, weights)
        parameters = {f"parameter|{n}": p.detach().clone() for n, p in module.named_parameters()}
        quantize(module, recipe_named("mse", mamba=Format.nvfp4), MODEL, batches(MODEL, 2))
        state = quantizer_state(module)
        Path(folder).mkdir(exist_ok=True)
        dist_checkpointing.save(ShardedScales(module).sharded_state(state), folder)
        return {f"scale|{n}": v for n, v in state.items()} | (parameters if weights is None else {})


def reshard(rank: int, parallel: ParallelConfig, weights: Results, source: str, target: str) -> Results:
    """Loads the scales under another layout, gives them to a plain model's quantizers, and saves them again."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        donor = build(MODEL, parallel, weights)
        quantize(donor, recipe_named("max", weight_scales="static", qad_scales="frozen"), MODEL, batches(MODEL, 1))
        scales = ShardedScales(donor)
        like = {name: torch.zeros_like(value) for name, value in quantizer_state(donor).items()}
        loaded = dist_checkpointing.load(scales.sharded_state(like), source)
        state = scales.state_of(loaded, like)
        module = build(MODEL, parallel, weights)
        restore_quantizers(module, recipe_named("mse"), MODEL, state)
        Path(target).mkdir(exist_ok=True)
        dist_checkpointing.save(ShardedScales(module).sharded_state(quantizer_state(module)), target)
        placement, found = Placement(module), {}
        for name in ("decoder.layers.0.mixer.in_proj", "decoder.layers.0.mixer.out_proj", "output_layer"):
            linear: Any = module.get_submodule(name)
            pieces = cut(module, f"{name}.weight", linear.weight)
            weight = effective_weight(linear)
            found[placement.global_name(name)] = pieces.whole(weight) if pieces else weight
        return found | {f"scale|{placement.global_name(n)}": v for n, v in state.items()}


def test_scales_reshard_from_one_rank_to_two_and_back(tmp_path: Path) -> None:
    """E7: to TP 2 with EP 2 and to one rank again: every block scale as it was, bit for bit."""
    first = run_ranks(save_scales, 1, ONE, None, str(tmp_path / "one"), environment=True)[0]
    weights = part(first, "parameter|")
    run_ranks(reshard, 2, LAYOUTS["tp2_ep2"], weights, str(tmp_path / "one"), str(tmp_path / "two"), environment=True)
    back = run_ranks(reshard, 1, ONE, weights, str(tmp_path / "two"), str(tmp_path / "back"), environment=True)[0]
    for name, value in part(first, "scale|").items():
        assert torch.equal(back[f"scale|{name}"], value.view(back[f"scale|{name}"].shape)), name


# Gated MLPs


def gated_model(parallel: ParallelConfig) -> Any:
    """Dense MLPs as Llama and Qwen have them: linear_fc1 holds gate and up."""
    model = hybrid(hybrid_pattern="*-")
    config = transformer_config(model, parallel)
    config.gated_linear_unit, config.activation_func = True, F.silu
    runtime.set_seeds(1)
    module = HybridModel(
        config, torch_spec(model), vocab_size=512, max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=stage_pattern(model.hybrid_pattern, 1), share_embeddings_and_output_weights=False,
        position_embedding_type="none",
    )  # fmt: skip
    return model, module.eval()


def calibrate_gated(rank: int, parallel: ParallelConfig, weights: Results | None) -> Results:
    with runtime.process_groups(parallel, seed=1, threads=1):
        model, module = gated_model(parallel)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                pieces = cut(module, name, parameter)
                if weights:
                    parameter.copy_(pieces.own(weights[name]) if pieces else weights[name])
                elif name.endswith("linear_fc1.weight"):
                    parameter[: len(parameter) // 2] *= 5  # gate and up of different size: the scale must be shared
        found = {f"parameter|{n}": p.detach().clone() for n, p in module.named_parameters()}
        quantize(module, recipe_named("four_over_six", attention=Format.nvfp4), model, batches(model, 2))
        for name in ("decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"):
            linear: Any = module.get_submodule(name)
            pieces, weight = cut(module, f"{name}.weight", linear.weight), effective_weight(linear)
            found[f"weight|{name}"] = pieces.whole(weight) if pieces else weight
            found[f"global|{name}"] = linear.weight_quantizer.global_amax
        return found


def test_gate_and_up_share_a_global_scale_at_any_tp() -> None:
    one = run_ranks(calibrate_gated, 1, ONE, None, environment=True)[0]
    weights = part(one, "parameter|")
    fc1 = weights["decoder.layers.1.mlp.linear_fc1.weight"]
    gate, up = fc1.chunk(2)
    assert gate.abs().max() > 2 * up.abs().max()
    assert torch.equal(one["global|decoder.layers.1.mlp.linear_fc1"].view(()), fc1.abs().max())
    for found in run_ranks(calibrate_gated, 2, LAYOUTS["tp2"], weights, environment=True):
        for name in [name for name in found if name.startswith(("weight|", "global|"))]:
            assert torch.equal(found[name].view(one[name].shape), one[name]), name
    own = nvfp4.block_amax(up)
    alone = nvfp4.fake_quantize(up, nvfp4.four_over_six_amax(up, own.amax()), own.amax(), 256.0)
    assert not torch.equal(one["weight|decoder.layers.1.mlp.linear_fc1"][len(gate) :], alone)
