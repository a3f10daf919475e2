"""PTQ of a real hybrid model: coverage, scales, and a restored model that computes the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_model import batches, build, load_recipe, small_model
from torch import nn

from nemo_qad import runtime
from nemo_qad.errors import UserError
from nemo_qad.models.build import forward_logits, logits_fn
from nemo_qad.quantization import calibrate, fp8, modelopt, nvfp4
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.recipes import formats
from nemo_qad.quantization.student import (
    deployed_weights,
    effective_weight,
    is_quantised,
    quantizer_state,
    restore_quantizers,
    stored_linear,
)
from nemo_qad.schema import ExtraRule, Format, KvFormat, ParallelConfig, Precision

RECIPES = (
    "max", "mamba_fp8_max", "mse", "four_over_six", "four_over_six_nvfp4_kv", "lightning_release", "four_over_six_w4a4"
)  # fmt: skip
MODEL = small_model()


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def quantised(recipe: str, **changes: Any) -> nn.Module:
    module = build(MODEL)
    quantize(module, load_recipe(recipe, **changes), MODEL, batches(MODEL))
    return module


def logits(module: nn.Module) -> torch.Tensor:
    return logits_fn(module, MODEL.vocab_size)(batches(MODEL)[0]["tokens"])


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_quantises_and_restores_bit_for_bit(name: str) -> None:
    recipe = load_recipe(name)
    module, spoken = build(MODEL), []
    plain = logits(module)
    coverage = quantize(module, recipe, MODEL, batches(MODEL), spoken.append).coverage
    assert spoken and all(row.matched == row.expected > 0 for row in coverage.rows)
    assert {"part", "format", "kind", "expected", "matched"} == coverage.to_json()[0].keys()
    quantised_logits = logits(module)
    moved = (quantised_logits - plain).norm() / plain.norm()
    assert 1e-3 < moved < 0.5
    for linear, fields in formats(recipe, MODEL).items():
        assert is_quantised(module.get_submodule(linear)) == (fields.format != Format.bf16), linear

    other = build(MODEL)
    restore_quantizers(other, recipe, MODEL, quantizer_state(module))
    assert torch.equal(logits(other), quantised_logits)
    assert quantizer_state(other).keys() == quantizer_state(module).keys()


@pytest.mark.parametrize("name", ["max", "mamba_fp8_max", "mse", "four_over_six"])
@pytest.mark.parametrize("factor", [1.0, 1.6])
def test_stored_bytes_are_what_the_forward_uses(name: str, factor: float) -> None:
    """Also after the weights have moved, with frozen scales and with dynamic ones."""
    recipe = load_recipe(name)
    module = quantised(name)
    for linear_name, fields in formats(recipe, MODEL).items():
        if fields.format == Format.bf16:
            continue
        linear: Any = module.get_submodule(linear_name)
        linear.weight.data.mul_(factor)
        used = linear.weight_quantizer(linear.weight)
        stored = stored_linear(linear_name, linear)
        if fields.format == Format.fp8:
            decoded = fp8.decode(stored["weight"], stored["weight_scale"])
            assert stored.keys() == {"weight", "weight_scale", "input_scale"}
        else:
            decoded = nvfp4.decode(
                nvfp4.PackedTensor(stored["weight"], stored["weight_scale"], stored["weight_scale_2"])
            )
        for values in (used, effective_weight(linear)):
            assert torch.equal(decoded.view(torch.int32), values.detach().view(torch.int32)), linear_name


def test_frozen_block_scales_do_not_follow_the_weights() -> None:
    name = "decoder.layers.0.mixer.in_proj"
    for recipe, follows in (("four_over_six", False), ("max", True)):
        linear: Any = quantised(recipe).get_submodule(name)
        before = stored_linear(name, linear)
        linear.weight.data[0].mul_(0.5)
        linear.weight.data[1].mul_(8.0)
        after = stored_linear(name, linear)
        for key in ("weight_scale", "weight_scale_2"):
            assert torch.equal(before[key].float(), after[key].float()) != follows


def test_global_amax_is_each_linears_own() -> None:
    module = quantised("four_over_six")
    for name, quantizer in modelopt.enabled_quantizers(module):
        if name.endswith("weight_quantizer"):
            weight: Any = module.get_submodule(name.removesuffix(".weight_quantizer")).weight
            assert torch.equal(quantizer.global_amax.view(()), weight.detach().abs().max()), name


def test_search_lowers_the_weight_error() -> None:
    def error(module: nn.Module) -> float:
        total = 0.0
        for name, fields in formats(load_recipe("max"), MODEL).items():
            if fields.format == Format.nvfp4:
                linear: Any = module.get_submodule(name)
                total += (effective_weight(linear) - linear.weight.detach()).double().square().sum().item()
        return total

    errors = {name: error(quantised(name)) for name in ("max", "four_over_six", "mse")}
    assert errors["mse"] < errors["four_over_six"] < errors["max"]


@pytest.mark.parametrize("kv_format", [KvFormat.fp8, KvFormat.nvfp4])
def test_kv_cache_is_quantised_in_the_forward(kv_format: KvFormat) -> None:
    parts = ("routed_experts", "shared_experts", "mamba", "dense_mlp", "output_layer")
    module = quantised("four_over_six", kv_cache=kv_format, **dict.fromkeys(parts, Format.bf16))
    attention: Any = module.get_submodule("decoder.layers.2.self_attention.core_attention")
    seen: dict[str, torch.Tensor] = {}
    attention.k_bmm_quantizer.register_forward_hook(
        lambda _, args, out: seen.update(before=args[0], after=out)
    )
    assert not torch.equal(logits(module), logits(build(MODEL)))
    amax = attention.k_bmm_quantizer.amax
    if kv_format == KvFormat.fp8:
        expected = fp8.fake_quantize(seen["before"], amax)
    else:
        expected = nvfp4.fake_quantize(seen["before"], nvfp4.block_amax(seen["before"]), amax)
    assert torch.equal(seen["after"], expected) and not torch.equal(seen["before"], expected)


def test_calibration_sees_every_batch() -> None:
    module, largest = build(MODEL), []
    attention: Any = module.get_submodule("decoder.layers.2.self_attention.core_attention")
    attention.register_forward_pre_hook(lambda _, args: largest.append(args[1].abs().max()))
    calibration = batches(MODEL, 4)
    quantize(module, load_recipe("max"), MODEL, calibration)
    assert len(largest) == 4
    assert torch.equal(attention.k_bmm_quantizer.amax, torch.stack(largest).max())


def test_every_parameter_gets_a_gradient() -> None:
    module = quantised("four_over_six_nvfp4_kv")
    tokens = torch.cat([batch["tokens"] for batch in batches(MODEL, 8)])
    forward_logits(module, tokens).float().square().mean().backward()
    assert [
        name for name, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ] == []


def test_deployed_weights_round_what_is_not_quantised() -> None:
    module = quantised("four_over_six")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    biases = {name: b.clone() for name, b in module.named_buffers()}
    linears = formats(load_recipe("four_over_six"), MODEL)
    kept = {f"{name}.weight" for name, fields in linears.items() if fields.format != Format.bf16}
    with deployed_weights(module):
        inside = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, value in inside.items():
        assert torch.equal(value, before[name] if name in kept else before[name].bfloat16().float()), name
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(torch.equal(b, biases[name]) for name, b in module.named_buffers())
    assert any(not torch.equal(inside[name], before[name]) for name in before)


def test_deployed_weights_are_restored_after_an_error() -> None:
    module = quantised("four_over_six")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}

    def fail() -> None:
        with deployed_weights(module):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_bf16_model() -> None:
    model = small_model(precision=Precision.bf16)
    module, recipe = build(model), load_recipe("lightning_release")
    quantize(module, recipe, model, batches(model))
    linear: Any = module.get_submodule("decoder.layers.0.mixer.out_proj")
    assert torch.equal(linear.weight_quantizer(linear.weight), effective_weight(linear).bfloat16())
    got = forward_logits(module, batches(model)[0]["tokens"])
    assert got.dtype == torch.bfloat16 and got.isfinite().all()
    other = build(model)
    restore_quantizers(other, recipe, model, quantizer_state(module))
    assert torch.equal(forward_logits(other, batches(model)[0]["tokens"]), got)


def test_zero_weight_is_named() -> None:
    module: Any = build(MODEL)
    module.output_layer.weight.data.zero_()
    for recipe in ("max", "four_over_six"):
        with pytest.raises(UserError, match=r"output_layer.weight_quantizer \(zero\)"):
            quantize(module, load_recipe(recipe), MODEL, batches(MODEL))
        module = build(MODEL)
        module.output_layer.weight.data.zero_()


def test_nan_weight_is_named() -> None:
    module: Any = quantised("four_over_six")
    module.output_layer.weight.data[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"output_layer.weight holds NaN"):
        stored_linear("output_layer", module.output_layer)


def test_expert_that_no_token_reached_is_named() -> None:
    """FP8 activations need calibration; an expert pushed out by its bias never sees a token."""
    module: Any = build(MODEL)
    module.decoder.layers[1].mlp.router.expert_bias[:] = torch.tensor([9.0, 9.0, -9.0, -9.0])
    extra = [ExtraRule("decoder.layers.1.mlp.experts.local_experts.3.*", Format.fp8)]
    with pytest.raises(UserError, match=r"local_experts.3.linear_fc1.input_quantizer \(missing\)"):
        quantize(module, load_recipe("max", extra_rules=extra), MODEL, batches(MODEL))


def test_rule_without_effect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """E1: a quantizer that is not calibrated stops the run; fused experts need Transformer Engine, not tested here."""
    original = calibrate.rules

    def damaged(*args: Any) -> Any:
        plan = original(*args)
        for entry in plan.quant_cfg:
            name = entry["quantizer_name"].replace(
                "decoder.layers.*.mixer.out_proj", "decoder.*.mixer.proj_out"
            )
            entry["quantizer_name"] = name
        return plan

    monkeypatch.setattr(calibrate, "rules", damaged)
    with pytest.raises(
        UserError, match=r"leaves out decoder.layers.0.mixer.out_proj.weight_quantizer, decoder.layers.3"
    ):
        quantize(build(MODEL), load_recipe("max"), MODEL, batches(MODEL))


def test_rule_that_catches_too_much_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = calibrate.rules

    def greedy(*args: Any) -> Any:
        plan = original(*args)
        entry = {"quantizer_name": "*linear_qkv.weight_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}
        plan.quant_cfg.append(entry)
        return plan

    monkeypatch.setattr(calibrate, "rules", greedy)
    with pytest.raises(
        UserError, match=r"quantises decoder.layers.2.self_attention.linear_qkv.weight_quantizer"
    ):
        quantize(build(MODEL), load_recipe("max"), MODEL, batches(MODEL))


def test_no_calibration_batches() -> None:
    with pytest.raises(UserError, match=r"calibration.num_samples"):
        quantize(build(MODEL), load_recipe("max"), MODEL, [])


def test_damaged_saved_scales_are_named() -> None:
    recipe = load_recipe("four_over_six")
    state = quantizer_state(quantised("four_over_six"))
    key = "output_layer.weight_quantizer._amax"
    outer = "output_layer.weight_quantizer._global_amax"
    cases = [
        ({k: v for k, v in state.items() if k != key}, f"lack {key}"),
        (
            {**state, "output_layer.input_quantizer._amax": torch.ones(())},
            "hold, against the recipe, output_layer.input",
        ),
        ({**state, key: state[key][:-1]}, rf"misshape {key} \(1023 values, not 1024\)"),
        ({**state, outer: torch.zeros(())}, r"output_layer.weight_quantizer \(zero\)"),
        (
            {**state, key: state[key] * float("inf")},
            r"output_layer.weight_quantizer \(block amax is NaN or inf",
        ),
    ]
    for damaged, message in cases:
        with pytest.raises(UserError, match=message):
            restore_quantizers(build(MODEL), recipe, MODEL, damaged)
