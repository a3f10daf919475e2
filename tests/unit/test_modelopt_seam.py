"""The seam into ModelOpt: everything that we replace or rely on is still there, and still what ModelOpt calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from modelopt.torch.distill.plugins.megatron import LogitsKLLoss
from modelopt.torch.quantization import model_calib, tensor_quant
from modelopt.torch.quantization.nn import QuantModuleRegistry, StaticBlockScaleQuantizer, TensorQuantizer
from modelopt.torch.quantization.nn.modules import tensor_quantizer
from modelopt.torch.quantization.plugins import megatron as megatron_plugin
from modelopt.torch.utils.distributed import ParallelState
from quantised_layer import DYNAMIC, FP8, NVFP4_DYNAMIC, NVFP4_STATIC, STATIC, inputs, quantised, raw_weight
from torch import nn

from nemo_qad.models.attention import CoreAttention
from nemo_qad.quantization import modelopt


def test_pinned_version() -> None:
    assert version("nvidia-modelopt") == "0.47.0", (
        "read quantization/modelopt.py again, then change this test"
    )


def test_our_attention_is_known_to_modelopt() -> None:
    modelopt.install()
    modelopt.install()
    assert CoreAttention in QuantModuleRegistry


# What modelopt.py replaces: is it there, is it what ModelOpt calls, and with these arguments?


@pytest.mark.parametrize(
    ("where", "name", "cfg"),
    [
        (tensor_quantizer, "static_blockwise_fp4_fake_quant", NVFP4_STATIC),
        (tensor_quantizer, "scaled_e4m3", FP8),
        (tensor_quant, "dynamic_block_quantize_op", NVFP4_DYNAMIC),
        (TensorQuantizer, "_get_amax", NVFP4_DYNAMIC),
    ],
)
def test_what_is_replaced_is_what_a_forward_calls(
    where: Any, name: str, cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, calls = quantised(cfg), []
    original = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **more: (calls.append(args), original(*args, **more))[1])
    layer(inputs())
    assert len(calls) == 1


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


def test_what_is_replaced_takes_the_arguments_of_its_stand_in() -> None:
    """By position; only the name of the largest block scale differs, which ModelOpt gives by position."""
    theirs, ours = tensor_quant.StaticBlockwiseFP4FakeQuantFunction.forward, modelopt._StaticNvfp4.forward
    renamed = [("scale_max" if n == "fp8_max_for_normalization" else n, default) for n, default in parameters(theirs)]
    assert renamed == parameters(ours)
    theirs, ours = tensor_quant.ScaledE4M3Function.forward, modelopt._scaled_e4m3(lambda: None)
    assert [n for n, _ in parameters(theirs)] == ["ctx", *(n for n, _ in parameters(ours))]
    assert [n for n, _ in parameters(tensor_quant._dynamic_block_quantize_impl)] == [
        "inputs", "block_size", "amax", "num_bits", "exponent_bits", "scale_num_bits", "scale_exponent_bits"
    ]  # fmt: skip
    assert [n for n, _ in parameters(TensorQuantizer._apply)] == ["self", "fn", "recurse"]
    assert [n for n, _ in parameters(nn.Module._apply)] == ["self", "fn", "recurse"]


@pytest.mark.parametrize("cfg", [NVFP4_STATIC, FP8])
def test_clipping_gradients_go_through_modelopts_two_functions(
    cfg: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pass_through_bwd=False; our forward hands them the input and the amax."""
    names = [n for n, _ in parameters(tensor_quant._save_for_backward_if_needed)]
    assert names == ["ctx", "pass_through_bwd", "inputs", "amax"]
    assert [n for n, _ in parameters(tensor_quant._fake_quant_backward_function)] == ["ctx", "grad_outputs", "num_args"]
    layer, calls = quantised({**cfg, "pass_through_bwd": False}), []
    for name in ("_save_for_backward_if_needed", "_fake_quant_backward_function"):
        original = getattr(tensor_quant, name)
        monkeypatch.setattr(
            tensor_quant, name, lambda *a, name=name, f=original, **k: (calls.append(name), f(*a, **k))[1]
        )
    weight = raw_weight(layer).clone()
    weight[0, :16] *= 100  # beyond its amax
    weight.requires_grad_()
    layer[0].weight_quantizer(weight).sum().backward()
    assert calls == ["_save_for_backward_if_needed", "_fake_quant_backward_function"]
    amax = layer[0].weight_quantizer.amax
    inside = weight.detach().abs().view(-1, 16) <= amax.view(-1, 1)
    assert torch.equal(weight.grad.view(-1, 16), inside.float()) and not inside.all()


def test_max_calibration_asks_for_tensor_parallelism_where_we_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported when it is called, so the replacement in the plugin is what runs; and it can be told not to sync."""
    layer, calls = quantised(NVFP4_STATIC), []
    monkeypatch.setattr(megatron_plugin, "_check_nvfp4_static_tp_supported", calls.append)
    synced: list[bool] = []
    original = model_calib.max_calibrate
    taken = inspect.signature(original).parameters
    assert taken["distributed_sync"].default is True and "forward_loop" in taken
    monkeypatch.setattr(model_calib, "_has_expert_parallelism", lambda module: bool(synced.append(True)))
    modelopt.calibrate(layer, modelopt.MAX, lambda: layer(inputs()))
    assert len(calls) == 1 and not synced
    modelopt.calibrate(layer, "max", lambda: layer(inputs()))
    assert len(calls) == 2 and synced  # and with it on, ModelOpt does look


@pytest.mark.parametrize("cfg", [NVFP4_STATIC, {"num_bits": (2, 1), "block_sizes": DYNAMIC}, FP8])
def test_amax_stays_fp32_through_bfloat16(cfg: dict[str, Any]) -> None:
    layer = quantised(cfg)
    before = {name: value.clone() for name, value in layer[0].weight_quantizer.named_buffers()}
    assert before.keys() == ({"_amax", "_global_amax"} if cfg is NVFP4_STATIC else {"_amax"})
    layer.bfloat16()
    assert raw_weight(layer).dtype == torch.bfloat16
    after = dict(layer[0].weight_quantizer.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n], v) and after[n].dtype == v.dtype == torch.float32 for n, v in before.items())


def test_quantizers_of_a_linear_and_their_kinds() -> None:
    """The properties by which the rest of the package knows what a quantizer is."""
    kinds = {}
    for name, cfg in (("static", NVFP4_STATIC), ("dynamic", NVFP4_DYNAMIC), ("fp8", FP8)):
        layer = quantised(cfg, FP8)
        linear, quantizer = layer[0], layer[0].weight_quantizer
        found = [part for part, _ in linear.named_children()]
        assert {"weight_quantizer", "input_quantizer", "output_quantizer"} <= set(found)
        assert [each for each, _ in modelopt.enabled_quantizers(layer)] == ["0.input_quantizer", "0.weight_quantizer"]
        assert not linear.output_quantizer.is_enabled
        kinds[name] = (quantizer.is_nvfp4_static, quantizer.is_nvfp4_dynamic, quantizer.is_fp8)
        assert isinstance(quantizer, StaticBlockScaleQuantizer) == (name == "static")
        assert quantizer.num_bits == cfg["num_bits"]
        blocks = quantizer.block_sizes
        assert (blocks is None) if name == "fp8" else (blocks[-1] == 16 and blocks.get("four_over_six", False) is False)
    assert kinds == {"static": (True, False, False), "dynamic": (False, True, False), "fp8": (False, False, True)}
    with_flag = quantised({"num_bits": (2, 1), "block_sizes": {**STATIC, "four_over_six": True}})
    assert modelopt.scale_max(with_flag[0].weight_quantizer) == 256


def test_fake_quantisation_switches_off_without_disabling() -> None:
    """What in-place quantisation relies on: weights pass as they are, and the quantizer still counts as enabled."""
    layer = quantised(NVFP4_STATIC)
    quantizer, weight = layer[0].weight_quantizer, raw_weight(layer)
    quantised_weight = quantizer(weight)
    state = dict(quantizer.named_buffers())
    quantizer.disable_quant()
    assert torch.equal(quantizer(weight), weight) and quantizer.is_enabled
    assert torch.equal(layer(inputs()), inputs() @ weight.T)
    quantizer.enable_quant()
    assert torch.equal(quantizer(weight), quantised_weight) and quantizer.is_enabled
    assert all(torch.equal(state[name], value) for name, value in quantizer.named_buffers())
    assert not torch.equal(quantised_weight, weight)


def test_static_scales_can_be_set_and_replaced() -> None:
    """from_tensor_quantizer changes the class in place; an amax may be deleted and take another shape."""
    layer = quantised(FP8)
    quantizer = layer[0].weight_quantizer
    modelopt.set_amax(quantizer, torch.ones(3))
    assert quantizer._amax.tolist() == [1, 1, 1] and "_amax" in dict(quantizer.named_buffers())
    plain = TensorQuantizer(mtq.config.QuantizerAttributeConfig(**NVFP4_STATIC))
    assert not isinstance(plain, StaticBlockScaleQuantizer) and plain.is_nvfp4_static
    modelopt.set_static_scales(plain, torch.ones(192, 1, dtype=torch.bfloat16), torch.tensor(4.0))
    assert type(plain) is StaticBlockScaleQuantizer and plain.is_enabled and plain.is_nvfp4_static
    assert plain.amax.dtype == torch.float32 and plain.global_amax == 4
    again = plain(raw_weight(layer))
    modelopt.set_static_scales(plain, 2 * torch.ones(192, 1), torch.tensor(8.0))
    assert plain.amax.eq(2).all() and plain.global_amax == 8 and not torch.equal(plain(raw_weight(layer)), again)


def test_experts_are_registered_under_our_class() -> None:
    """ModelOpt's own class would share input amax; ours makes the parallel state that its linears look for."""
    modelopt.install()
    assert SequentialMLP in QuantModuleRegistry and issubclass(QuantModuleRegistry[SequentialMLP], SequentialMLP)
    assert issubclass(QuantModuleRegistry[SequentialMLP], modelopt._QuantSequentialMLP)
    theirs = megatron_plugin._MegatronSequentialMLP
    assert not issubclass(QuantModuleRegistry[SequentialMLP], theirs)
    made = inspect.getsource(theirs._setup)
    for name in ("linear_fc1._parallel_state", "linear_fc2._parallel_state", "self.parallel_state = ParallelState("):
        assert name in made
    names = [n for n, _ in parameters(ParallelState.__init__)]
    assert names[1:4] == ["data_parallel_group", "tensor_parallel_group", "expert_model_parallel_group"]


def test_stock_loss_has_the_form_that_we_call() -> None:
    """distillation/modelopt.py: LogitsKLLoss(config, temperature)(student, teacher) -> (loss, partial, _)."""
    assert {"temperature", "model_config"} <= {n for n, _ in parameters(LogitsKLLoss.__init__)}
    assert [n for n, _ in parameters(LogitsKLLoss.forward)][1:3] == ["predictions", "targets"]
