"""What a quantizer of ModelOpt computes: our numbers where we replaced its code, its own elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from quantised_layer import DYNAMIC, FP8, NVFP4_DYNAMIC, NVFP4_STATIC, STATIC, inputs, quantised, raw_weight
from torch import Tensor

from nemo_qad.quantization import fp8, nvfp4


@pytest.mark.parametrize("four_over_six", [False, True])
def test_static_weights_go_through_our_numerics(four_over_six: bool) -> None:
    layer = quantised({"num_bits": (2, 1), "block_sizes": {**STATIC, "four_over_six": four_over_six}})
    weight = raw_weight(layer)
    amax = nvfp4.block_amax(weight)
    expected = nvfp4.fake_quantize(weight, amax, amax.amax(), 256.0 if four_over_six else 448.0)
    assert torch.equal(layer[0].weight_quantizer(weight), expected)
    assert torch.equal(layer(inputs()), inputs() @ expected.T)


def test_dynamic_weights_recompute_block_and_global_scales() -> None:
    layer = quantised({"num_bits": (2, 1), "block_sizes": DYNAMIC, "type": "dynamic"})
    weight = raw_weight(layer)
    assert not list(layer[0].weight_quantizer.buffers())
    for factor in (1.0, 2.0, 40.0):  # with a frozen global amax, a doubled weight would clip
        got = layer[0].weight_quantizer(weight * factor)
        assert torch.equal(got, nvfp4.fake_quantize_dynamic(weight * factor))


def test_calibrated_global_amax_of_a_dynamic_tensor_is_kept() -> None:
    """What the NVFP4 KV cache does: global scale from calibration, blocks beyond it saturate."""
    layer = quantised({"num_bits": (2, 1), "block_sizes": DYNAMIC})
    weight = raw_weight(layer)
    outer = weight.abs().max()
    assert torch.equal(layer[0].weight_quantizer.amax, outer)
    got = layer[0].weight_quantizer(4 * weight)
    assert torch.equal(got, nvfp4.fake_quantize(4 * weight, nvfp4.block_amax(4 * weight), outer))
    assert got.abs().max() == pytest.approx(outer.item(), rel=1e-6)


def test_fp8_weights_and_inputs_go_through_our_numerics() -> None:
    layer = quantised({"num_bits": (4, 3), "axis": None}, {"num_bits": (4, 3), "axis": None})
    weight, x = raw_weight(layer), inputs()
    assert torch.equal(layer[0].input_quantizer.amax, x.abs().max())
    expected = fp8.fake_quantize(x, x.abs().max()) @ fp8.fake_quantize(weight, weight.abs().max()).T
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "cfg",
    [NVFP4_STATIC, NVFP4_DYNAMIC, FP8],
)
def test_gradient_is_straight_through(cfg: dict[str, Any]) -> None:
    layer = quantised(cfg)
    layer(inputs()).sum().backward()
    expected = inputs().sum(0).expand(48, 64)
    assert torch.allclose(layer[0]._parameters["weight"].grad, expected, rtol=1e-5, atol=1e-6)


def test_bf16_weights_give_the_fp32_values_rounded_once() -> None:
    layer = quantised({"num_bits": (2, 1), "block_sizes": STATIC})
    weight = raw_weight(layer).bfloat16()
    quantizer = layer[0].weight_quantizer
    expected = nvfp4.fake_quantize(weight, quantizer.amax, quantizer.global_amax)
    assert torch.equal(quantizer(weight), expected.bfloat16())


def test_four_over_six_equals_modelopts_own_search() -> None:
    cfg = {"num_bits": (2, 1), "block_sizes": {**STATIC, "four_over_six": True}}
    search = {"method": "mse", "start_multiplier": 1.0, "stop_multiplier": 1.5, "step_size": 0.5}
    layer = quantised(cfg, algorithm=search)
    weight, quantizer = raw_weight(layer), layer[0].weight_quantizer
    ours = nvfp4.four_over_six_amax(weight, quantizer.global_amax)
    assert torch.equal(ours.view(-1), quantizer.amax.view(-1))
    assert (ours > nvfp4.block_amax(weight)).any()


def test_sweep_finds_the_best_e4m3_scale_of_each_block() -> None:
    layer = quantised(
        {"num_bits": (2, 1), "block_sizes": STATIC}, algorithm={"method": "mse", "fp8_scale_sweep": True}
    )
    weight, quantizer = raw_weight(layer), layer[0].weight_quantizer
    outer = quantizer.global_amax

    def errors(amax: Tensor) -> Tensor:
        values = nvfp4.fake_quantize(weight, amax, outer).double()
        return (values - weight.double()).square().view(-1, 16).sum(-1)

    codes = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    truth = torch.stack([errors((c / 448 * outer.double()).float().expand(48 * 4)) for c in codes]).amin(0)
    assert torch.allclose(errors(quantizer.amax), truth, rtol=1e-5)
    assert (truth < errors(nvfp4.block_amax(weight))).float().mean() > 0.5


def test_modelopt_dequantises_our_bytes_to_the_same_values() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    amax = nvfp4.block_amax(weight)
    packed = nvfp4.pack(weight, amax, amax.amax())
    theirs = NVFP4QTensor(weight.shape, torch.float32, packed.codes).dequantize(
        scale=packed.block_scale, double_scale=packed.global_scale, block_sizes={-1: 16}
    )
    assert torch.equal(theirs, nvfp4.decode(packed))


def test_other_formats_keep_modelopts_code() -> None:
    layer = quantised({"num_bits": (4, 3), "axis": 0})
    weight = raw_weight(layer)
    per_row = torch.stack([fp8.fake_quantize(row, row.abs().max()) for row in weight])
    assert torch.allclose(layer[0].weight_quantizer(weight), per_row, rtol=1e-6)
