"""The quantised student: its scales as tensors, what each of its linears ships, and deployed weights.

Frozen scales live in ModelOpt's buffers (block amax and global amax of a static NVFP4 weight, amax of FP8
and of K and V); the E4M3 block scales follow from them by `nvfp4.block_scale`, in training and export
alike. Dynamic scales have no buffer: they follow from the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nemo_qad.errors import UserError, show
from nemo_qad.models.placement import Placement
from nemo_qad.models.shipped import shipped_dtype
from nemo_qad.quantization import fp8, modelopt, nvfp4
from nemo_qad.quantization.coverage import check_coverage, check_scales, check_structure, local_linears
from nemo_qad.quantization.recipes import formats, rules
from nemo_qad.schema import ModelConfig, RecipeConfig

_AMAX, _GLOBAL_AMAX = "_amax", "_global_amax"


def quantizer_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers of every enabled quantizer, FP32 on CPU, by full buffer name."""
    return {
        f"{name}.{buffer}": value.detach().to("cpu", torch.float32, copy=True)
        for name, quantizer in modelopt.enabled_quantizers(module)
        for buffer, value in quantizer.named_buffers(recurse=False)
    }


def restore_quantizers(module: nn.Module, recipe: RecipeConfig, model: ModelConfig, state: dict[str, Tensor]) -> None:
    """Makes a plain model the quantised one whose `quantizer_state` was saved, without calibration.

    Args:
        module: the bare HybridModel without quantizers; changed in place.
        state: what `quantizer_state` returned under the same recipe and model.

    Raises:
        UserError: naming scales that are missing, not asked for, misshapen, zero, NaN or infinite.
    """
    table = formats(recipe, model)
    check_structure(module, table)
    local = None if Placement(module).is_trivial else local_linears(module, table)
    plan = rules(recipe, model, local)
    modelopt.insert_quantizers(module, plan.quant_cfg)
    check_coverage(module, table, plan.expected, recipe)
    set_scales(module, state)


def set_scales(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Gives the enabled quantizers of a quantised model the scales of `quantizer_state`; a collective call.

    Raises:
        UserError: naming scales that are missing, not asked for, misshapen, zero, NaN or infinite.
    """
    expected = _expected_shapes(module)
    _check_names(state, expected)
    device = next(module.parameters()).device
    for name, quantizer in modelopt.enabled_quantizers(module):
        values = {b: state[f"{name}.{b}"].to(device) for b in (_AMAX, _GLOBAL_AMAX) if f"{name}.{b}" in expected}
        if _GLOBAL_AMAX in values:
            modelopt.set_static_scales(quantizer, values[_AMAX], values[_GLOBAL_AMAX])
        elif _AMAX in values:
            modelopt.set_amax(quantizer, values[_AMAX])
    check_scales(module)


def stored_linear(module_name: str, linear: nn.Module) -> dict[str, Tensor]:
    """Tensors that a quantised linear ships: exactly the values that its forward uses.

    NVFP4: weight uint8 [O, I/2], weight_scale float8_e4m3fn [O, I/16], weight_scale_2 FP32 scalar; where inputs are
    quantised too, input_scale FP32 scalar: an engine makes their block scales in units of it.
    FP8: weight float8_e4m3fn [O, I], weight_scale and input_scale FP32 scalars.

    Raises:
        UserError: the linear is not quantised, or its weight is NaN or infinite.
    """
    weight, quantizer = _quantised_weight(module_name, linear)
    if not torch.stack(weight.aminmax()).isfinite().all():
        raise UserError(f"{module_name}.weight holds NaN or infinite values and cannot be stored")
    if modelopt.is_nvfp4(quantizer):
        packed = nvfp4.pack(weight, *nvfp4_scales(quantizer, weight))
        return {
            "weight": packed.codes,
            "weight_scale": packed.block_scale,
            "weight_scale_2": packed.global_scale,
            **_input_scale(linear),
        }
    scale = fp8.scale_of(quantizer.amax)
    return {"weight": fp8.encode(weight, scale), "weight_scale": scale, **_input_scale(linear)}


def _input_scale(linear: nn.Module) -> dict[str, Tensor]:
    quantizer: Any = linear.input_quantizer
    return {"input_scale": _tensor_scale(quantizer)} if quantizer.is_enabled else {}


def _tensor_scale(quantizer: Any) -> Tensor:
    """FP32 scalar: what E4M3 codes, or NVFP4's block scales, are multiplied by."""
    to_scale = nvfp4.global_scale if modelopt.is_nvfp4(quantizer) else fp8.scale_of
    return to_scale(quantizer.amax).reshape(())


def effective_weight(linear: nn.Module) -> Tensor:
    """FP32 [O, I]: the fake-quantised weight of a quantised linear, before any cast to the model's dtype."""
    return EffectiveRows(linear, linear.get_parameter("weight").shape[0])[:]


class EffectiveRows:
    """`effective_weight` of a linear, made some rows at a time: an FP32 copy of a large weight never exists.

    shape: the first `num_rows` rows of the weight, as a vocabulary may be padded beyond them.
    """

    def __init__(self, linear: nn.Module, num_rows: int) -> None:
        self._weight, self._quantizer = _quantised_weight(type(linear).__name__, linear)
        self.shape = (num_rows, self._weight.shape[1])
        if modelopt.is_nvfp4(self._quantizer):
            amax, self._outer, self._scale_max = nvfp4_scales(self._quantizer, self._weight)
            self._amax = amax.reshape(self._weight.shape[0], -1)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        if not modelopt.is_nvfp4(self._quantizer):
            return fp8.fake_quantize(self._weight[: self.shape[0]][rows], self._quantizer.amax)
        weight, amax = (tensor[: self.shape[0]][rows] for tensor in (self._weight, self._amax))
        return nvfp4.fake_quantize(weight, amax, self._outer, self._scale_max)


def is_quantised(linear: nn.Module) -> bool:
    """Whether the weight of a module passes through an enabled quantizer."""
    quantizer = getattr(linear, "weight_quantizer", None)
    return quantizer is not None and bool(quantizer.is_enabled)


def linear_operands(linear: nn.Module, inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of a linear's product, as its forward has them: fake-quantised where its quantizers are on.

    Args:
        inputs: [..., I]; weight: [O, I], which may be shared with another module.

    Raises:
        UserError: the linear quantises its output, which is not part of the product.
    """
    if not hasattr(linear, "weight_quantizer"):
        return inputs, weight
    quantized: Any = linear
    if quantized.output_quantizer.is_enabled:
        raise UserError("A quantised output of the output layer is not supported: logits stay as they are")
    return quantized.input_quantizer(inputs), quantized.weight_quantizer(weight)


def kv_scales(core_attention: nn.Module) -> tuple[Tensor, Tensor] | None:
    """FP32 scalars k_scale and v_scale of an attention layer, or None where the cache is not quantised.

    FP8: value = e4m3 * scale. NVFP4: value = e2m1 * (block_scale * scale), the block scales being made
    when the cache is written. Scales are stored as calibrated, with no lower bound of 1.
    """
    scales = []
    for which in ("k_bmm_quantizer", "v_bmm_quantizer"):
        quantizer = getattr(core_attention, which, None)
        if quantizer is None or not quantizer.is_enabled:
            return None
        scales.append(_tensor_scale(quantizer))
    return scales[0], scales[1]


@contextmanager
def deployed_weights(module: nn.Module) -> Iterator[None]:
    """Inside, what is not quantised has the values that ship, as export rounds them: BF16, or FP32 or FP16 where the
    checkpoint that the model came from has it.

    Every floating parameter but the weights of quantised linears is rounded in place; buffers (the
    router's expert_bias, quantizer scales) stay as they are. Left, each is restored bit for bit.
    """
    saved: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for parameter in _unquantised_parameters(module):
            dtype = shipped_dtype(parameter)
            if dtype not in (parameter.dtype, torch.float32):
                saved.append((parameter, parameter.detach().clone()))
                parameter.data.copy_(parameter.detach().to(dtype))
        yield
    finally:
        for parameter, value in saved:
            parameter.data.copy_(value)


def _unquantised_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    for child in module.modules():
        quantised = is_quantised(child)
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.is_floating_point() and id(parameter) not in seen and not (quantised and name == "weight"):
                seen.add(id(parameter))
                yield parameter


def _quantised_weight(module_name: str, linear: nn.Module) -> tuple[Tensor, Any]:
    if not is_quantised(linear):
        raise UserError(f"{module_name} is not quantised: the recipe keeps it in BF16")
    return linear.get_parameter("weight").detach(), linear.weight_quantizer


def nvfp4_scales(quantizer: Any, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Block amax, global amax and largest block scale with which the forward quantises the weight."""
    if quantizer.is_nvfp4_static:
        return quantizer.amax, quantizer.global_amax, modelopt.scale_max(quantizer)
    amax = nvfp4.block_amax(weight)
    outer, group = amax.amax(), getattr(quantizer, "amax_group", None)
    return amax, outer if group is None else modelopt.largest_of_ranks(outer, group), modelopt.scale_max(quantizer)


def _expected_shapes(module: nn.Module) -> dict[str, int]:
    """Elements of each buffer that the enabled quantizers of a module must have."""
    expected: dict[str, int] = {}
    for name, quantizer in modelopt.enabled_quantizers(module):
        if quantizer.is_nvfp4_static:
            weight = module.get_parameter(f"{name.rpartition('.')[0]}.weight")
            expected[f"{name}.{_AMAX}"] = weight.numel() // nvfp4.BLOCK_SIZE
            expected[f"{name}.{_GLOBAL_AMAX}"] = 1
        elif not (quantizer.is_nvfp4_dynamic and name.endswith("weight_quantizer")):
            expected[f"{name}.{_AMAX}"] = 1
    return expected


def _check_names(state: dict[str, Tensor], expected: dict[str, int]) -> None:
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    misshapen = [
        f"{name} ({state[name].numel()} values, not {count})"
        for name, count in expected.items()
        if name in state and state[name].numel() != count
    ]
    for problem, names in (("lack", missing), ("hold, against the recipe,", extra), ("misshape", misshapen)):
        if names:
            raise UserError(
                f"The saved quantizer scales {problem} {show(names)}. They belong to another recipe "
                "or model, or are damaged: run the ptq stage again"
            )
