"""Calibration on one rank: searches and their errors, amax that stays FP32, shared scales, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.errors import UserError
from nemo_qad.huggingface.export import stored_tensors
from nemo_qad.models.build import forward_logits
from nemo_qad.quantization import modelopt, nvfp4, nvfp4_search
from nemo_qad.quantization.calibrate import Calibrated, quantize
from nemo_qad.quantization.coverage import check_scales
from nemo_qad.quantization.observe import DAMPING
from nemo_qad.quantization.student import effective_weight, quantizer_state
from nemo_qad.schema import CalibrationConfig, Format, ParallelConfig, Precision, ScaleError, ScaleSearch

MODEL = small_model()
LINEAR = "decoder.layers.0.mixer.in_proj"


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def calibrated(recipe: str, error: ScaleError = ScaleError.squared, **changes: Any) -> tuple[nn.Module, Calibrated]:
    module = build(MODEL)
    settings = CalibrationConfig(error=error)
    return module, quantize(module, load_recipe(recipe, **changes), MODEL, batches(MODEL), calibration=settings)


def inputs_of(linear: str) -> Tensor:
    """FP64 [T, I]: what a linear of the plain model is given over the calibration set."""
    module, seen = build(MODEL), []
    module.get_submodule(linear).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches(MODEL):
            forward_logits(module, batch["tokens"])
    return torch.cat(seen).double()


@pytest.mark.parametrize(
    ("search", "scale_max", "find"),
    [
        (ScaleSearch.mse, 448.0, nvfp4_search.sweep_amax),
        (ScaleSearch.mse_256, 256.0, nvfp4_search.sweep_amax),
        (ScaleSearch.four_over_six, 256.0, None),
    ],
)
def test_each_search_gives_its_scales(search: ScaleSearch, scale_max: float, find: Any) -> None:
    module, _ = calibrated("four_over_six", scale_search=search)
    linear: Any = module.get_submodule(LINEAR)
    weight, outer = linear.weight.detach(), linear.weight.detach().abs().max()
    amax = find(weight, outer, scale_max) if find else nvfp4.four_over_six_amax(weight, outer)
    assert torch.equal(effective_weight(linear), nvfp4.fake_quantize(weight, amax, outer, scale_max))
    assert torch.equal(linear.weight_quantizer(weight), effective_weight(linear))


def test_the_sweep_is_as_good_as_modelopts() -> None:
    """The recipe mse, block by block; where two scales tie the two may choose differently."""
    module, _ = calibrated("mse")
    other = build(MODEL)
    from nemo_qad.quantization.recipes import rules

    modelopt.insert_quantizers(other, rules(load_recipe("mse"), MODEL).quant_cfg)
    modelopt.calibrate(
        other,
        {"method": "mse", "fp8_scale_sweep": True},
        lambda: [forward_logits(other, batch["tokens"]) for batch in batches(MODEL)],  # type: ignore[arg-type, return-value]
    )
    for name in (LINEAR, "output_layer", "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2"):
        ours, theirs = module.get_submodule(name), other.get_submodule(name)
        weight: Any = ours.get_parameter("weight").detach()
        errors = [
            (effective_weight(linear) - weight).double().square().view(-1, 16).sum(-1) for linear in (ours, theirs)
        ]
        assert torch.allclose(*errors, rtol=1e-5), name


@pytest.mark.parametrize("recipe", ["four_over_six", "mse"])
def test_hessian_lowers_the_error_of_the_outputs(recipe: str) -> None:
    """Summed over blocks as if the others were exact, which is what the Hessian of each block weighs."""
    plain, weighed = (calibrated(recipe, error)[0] for error in ScaleError)
    for name in (LINEAR, "decoder.layers.0.mixer.out_proj", "output_layer"):
        x_TBK = inputs_of(name).unflatten(1, (-1, 16))
        hessian_BKK = torch.einsum("tbi,tbj->bij", x_TBK, x_TBK)
        mean_square = hessian_BKK.diagonal(dim1=-2, dim2=-1).mean()
        hessian_BKK = hessian_BKK / mean_square + DAMPING * torch.eye(16, dtype=torch.float64)
        errors = []
        for module in (plain, weighed):
            linear: Any = module.get_submodule(name)
            error_OBK = (effective_weight(linear) - linear.weight.detach()).double().unflatten(1, (-1, 16))
            errors.append(torch.einsum("obi,bij,obj->", error_OBK, hessian_BKK, error_OBK))
        assert errors[1] < errors[0] * 0.999, name
    embedded = quantizer_state(weighed).keys()
    assert embedded == quantizer_state(plain).keys()


def test_a_linear_without_inputs_keeps_plain_scales() -> None:
    """An idle expert has no X^T X: its weights are searched by squared error, as the policy `weights` says."""
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1"
    modules = []
    for error in ScaleError:
        module: Any = build(MODEL)
        module.decoder.layers[1].mlp.router.expert_bias[:] = torch.tensor([9.0, 9.0, -9.0, -9.0])
        settings = CalibrationConfig(error=error)
        found = quantize(module, load_recipe("mse"), MODEL, batches(MODEL), calibration=settings)
        assert found.idle_experts == [f"decoder.layers.1.mlp.experts.local_experts.{e}" for e in (2, 3)]
        assert sum(found.expert_tokens.values()) == 2 * 2 * 3 * 32 * MODEL.hybrid_pattern.count("E")
        modules.append(module)
    idle = [effective_weight(module.get_submodule(name)) for module in modules]
    used = [effective_weight(module.get_submodule(name.replace(".3.", ".0."))) for module in modules]
    assert torch.equal(*idle)
    assert not torch.equal(*used)


@pytest.mark.parametrize("recipe", ["four_over_six_nvfp4_kv", "lightning_release", "mse"])
def test_amax_stays_fp32_when_the_model_becomes_bf16(recipe: str) -> None:
    module, _ = calibrated(recipe)
    before = quantizer_state(module)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
    module.bfloat16()
    assert next(module.parameters()).dtype == torch.bfloat16
    for name, quantizer in modelopt.enabled_quantizers(module):
        for buffer, value in quantizer.named_buffers(recurse=False):
            assert value.dtype == torch.float32, name
            assert torch.equal(value.cpu(), before[f"{name}.{buffer}"].view(value.shape)), name


def test_amax_of_a_bf16_model_is_fp32() -> None:
    model = small_model(precision=Precision.bf16)
    module = build(model)
    quantize(module, load_recipe("lightning_release"), model, batches(model))
    assert {b.dtype for _, q in modelopt.enabled_quantizers(module) for b in q.buffers()} == {torch.float32}


def test_query_key_and_value_ship_one_global_scale() -> None:
    """Engines fuse them into one matrix, after PTQ and after the weights have moved in QAD."""
    for recipe in ("four_over_six", "max"):
        module, _ = calibrated(recipe, attention=Format.nvfp4)
        qkv: Any = module.get_submodule("decoder.layers.2.self_attention.linear_qkv")
        for _ in range(2):
            stored = dict(stored_tensors(module, MODEL))
            scales = [stored[f"backbone.layers.2.mixer.{which}_proj.weight_scale_2"] for which in "qkv"]
            assert torch.equal(scales[0], scales[1])
            assert torch.equal(scales[0], scales[2])
            qkv.weight.data[:40].mul_(3)  # the first group's query and key


def test_kv_scales_that_are_all_one_are_reported() -> None:
    module, found = calibrated("four_over_six")
    assert found.warnings == []
    for name, quantizer in modelopt.enabled_quantizers(module):
        if name.endswith("bmm_quantizer"):
            quantizer.amax = torch.tensor(448.0)
    assert check_scales(module) == ["every scale of the KV cache is exactly 1: was it calibrated on real text?"]


def test_fused_gradient_accumulation_is_refused() -> None:
    """E19: it adds weight gradients past autograd, so past the quantizers."""
    module: Any = build(MODEL)
    module.decoder.layers[0].mixer.in_proj.gradient_accumulation_fusion = True
    with pytest.raises(UserError, match=rf"gradient_accumulation_fusion .* of {LINEAR} .*=False"):
        quantize(module, load_recipe("max"), MODEL, batches(MODEL))


def test_width_that_blocks_do_not_divide_is_refused_by_name() -> None:
    """E7, E8: nothing is padded, so no padding can enter an error or an export."""
    model = small_model(ffn_hidden_size=40)
    with pytest.raises(UserError, match=r"Blocks of 16 do not divide .* decoder.layers.4.mlp.linear_fc2 \(40\)"):
        quantize(build(model), load_recipe("mse"), model, batches(model))


def test_scales_of_experts_are_their_own() -> None:
    """E7: ten times the weights, ten times the amax, in this expert alone."""
    module: Any = build(MODEL)
    experts = module.decoder.layers[1].mlp.experts.local_experts
    experts[2].linear_fc1.weight.data.copy_(10 * experts[1].linear_fc1.weight.data)
    quantize(module, load_recipe("mse"), MODEL, batches(MODEL))
    one, ten = (experts[index].linear_fc1.weight_quantizer for index in (1, 2))
    assert torch.allclose(ten.global_amax, 10 * one.global_amax)
    assert torch.allclose(ten.amax, 10 * one.amax, rtol=0.15)


def test_nan_in_a_weight_is_named() -> None:
    module: Any = build(MODEL)
    module.decoder.layers[0].mixer.in_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(UserError, match=rf"NaN or infinite values in {LINEAR}.weight"):
        quantize(module, load_recipe("mse", mamba=Format.nvfp4), MODEL, [_blank(batches(MODEL)[0])])


def _blank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in batch.items()}


def test_activations_that_overflow_are_reported() -> None:
    module: Any = build(MODEL)
    module.decoder.layers[0].mixer.conv1d_weight.data.fill_(1e38)
    with pytest.raises(UserError, match="calibration: an activation is NaN or infinite"):
        quantize(module, load_recipe("lightning_release"), MODEL, batches(MODEL))


def test_a_forward_that_raises_leaves_other_models_alone() -> None:
    """ModelOpt puts a linear's quantised product in the place of Megatron's for the time of its forward."""
    plain, batch = build(MODEL), batches(MODEL)[0]["tokens"]
    with torch.no_grad():
        before = forward_logits(plain, batch)
        failing, _ = calibrated("four_over_six")

        def fail(*_: Any) -> None:
            raise RuntimeError("stop")

        quantizer: Any = failing.get_submodule(f"{LINEAR}.weight_quantizer")
        quantizer.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            forward_logits(failing, batch)
        assert torch.equal(forward_logits(plain, batch), before)
