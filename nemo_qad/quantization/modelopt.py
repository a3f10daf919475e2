"""The one seam into ModelOpt: its fake-quantisation functions, quantizers on our attention, and its state.

ModelOpt 0.47 has no NVFP4 on CPU, and what its kernels compute differs in rounding order from what its
exporter packs. `install` therefore routes NVFP4 (static and dynamic block scales) and per-tensor E4M3
through `nvfp4.py` and `fp8.py`, on CPU and GPU alike: training then sees the bytes that are shipped.
Its documented hook (`register_quant_backend`) does not reach static block scales, hence the replacement
of module attributes; `tests/unit/test_modelopt_seam.py` proves that they are still what it calls.
Every other format keeps ModelOpt's own code.

More is changed where ModelOpt would go wrong or refuse: scalar amax stay FP32 under `.bfloat16()`; static block scales
are allowed under tensor parallelism (`scales.py` reduces the global amax, which is what was missing); dynamic ones take
the global amax of all tensor-parallel ranks; the experts of a layer keep their own input amax instead of sharing that
of the experts that happen to be on one rank; and a forward that raises leaves Megatron's functions as they were.

The gradient is straight-through, ModelOpt's default; with `pass_through_bwd=False` it is zero where the
input lies beyond its amax.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import torch.distributed as dist
from modelopt.torch.opt.dynamic import DynamicModule
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.nn import (
    QuantModule,
    QuantModuleRegistry,
    StaticBlockScaleQuantizer,
    TensorQuantizer,
)
from modelopt.torch.quantization.nn.modules import tensor_quantizer
from modelopt.torch.quantization.plugins import custom as custom_plugin
from modelopt.torch.quantization.plugins import megatron as megatron_plugin
from modelopt.torch.utils.distributed import ParallelState
from torch import Tensor, nn
from torch.autograd import Function

from nemo_qad.errors import UserError
from nemo_qad.quantization import fp8, nvfp4

MAX: dict[str, Any] = {"method": "max", "distributed_sync": False}  # `scales.py` brings the ranks together
_NVFP4_DYNAMIC = (4, 2, 8, 4)  # bits and exponent bits of the element, then of the block scale


class _StaticNvfp4(Function):
    """Stands for `static_blockwise_fp4_fake_quant`, whose positional arguments it takes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        amax: Tensor,
        global_amax: Tensor | None = None,
        quantize_block_scales: bool = True,
        scale_max: float = nvfp4.E4M3_MAX,
        out_dtype: torch.dtype | None = None,
        pass_through_bwd: bool = False,
    ) -> Tensor:
        if not quantize_block_scales:
            raise ValueError(
                "NVFP4 with block scales that are not E4M3 is not supported: it has no stored form"
            )
        tensor_quant._save_for_backward_if_needed(ctx, pass_through_bwd, x, amax)
        outer = amax.amax() if global_amax is None else global_amax
        return nvfp4.fake_quantize(x, amax, outer, scale_max).to(out_dtype or x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tensor_quant._fake_quant_backward_function(ctx, grads[0], num_args=7)


class _PerTensorFp8(Function):
    """Stands for `scaled_e4m3` with one scale a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, pass_through_bwd: bool) -> Tensor:
        tensor_quant._save_for_backward_if_needed(ctx, pass_through_bwd, x, amax)
        return fp8.fake_quantize(x, amax).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tensor_quant._fake_quant_backward_function(ctx, grads[0], num_args=3)


def _dynamic_op(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Stands for `dynamic_block_quantize_op`, called inside ModelOpt's own autograd function."""

    def dynamic_block_quantize_op(inputs: Tensor, block_size: int, amax: Tensor, *formats: int) -> Tensor:
        if formats != _NVFP4_DYNAMIC or block_size != nvfp4.BLOCK_SIZE or amax is None:
            return original(inputs, block_size, amax, *formats)
        blocks = nvfp4.block_amax(inputs)
        return nvfp4.fake_quantize(inputs, blocks, amax.amax()).to(inputs.dtype)

    return dynamic_block_quantize_op


def _scaled_e4m3(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_e4m3(
        inputs: Tensor,
        amax: Tensor | None,
        bias: Tensor | None,
        E: int,
        M: int,
        trt_high_precision_dtype: str | None = None,
        pass_through_bwd: bool = False,
    ) -> Tensor:
        if amax is None or amax.numel() != 1 or bias is not None or (E, M) != (4, 3):
            return original(inputs, amax, bias, E, M, trt_high_precision_dtype, pass_through_bwd)
        return _PerTensorFp8.apply(inputs, amax, pass_through_bwd)

    return scaled_e4m3


class _QuantCoreAttention(QuantModule):
    """Quantizers for K and V as they enter attention, where a serving engine writes its cache."""

    def _setup(self) -> None:
        from megatron.core import parallel_state

        self.k_bmm_quantizer = TensorQuantizer()
        self.v_bmm_quantizer = TensorQuantizer()
        self.parallel_state = ParallelState(
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_tensor_model_parallel_group(),
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        key, value = self.k_bmm_quantizer(key), self.v_bmm_quantizer(value)
        return super().forward(query, key, value, *args, **kwargs)

    def modelopt_post_restore(self, prefix: str = "") -> None:
        """Nothing to reshape: both scales are scalars at any tensor-parallel size."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


class _QuantSequentialMLP(DynamicModule):
    """Experts on their own: ModelOpt's class shares input amax among a rank's experts and refuses TP beside EP."""

    def _setup(self) -> None:
        from megatron.core import parallel_state as groups

        state = ParallelState(
            groups.get_expert_data_parallel_group(),
            tensor_parallel_group=groups.get_expert_tensor_parallel_group(),
            expert_model_parallel_group=groups.get_expert_model_parallel_group(),
        )
        self.parallel_state = state
        for expert in self.local_experts:
            expert.linear_fc1._parallel_state = expert.linear_fc2._parallel_state = state


def _returns_early(original: Callable[[TensorQuantizer, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Stands for `TensorQuantizer.forward`, which reshapes its input even where it neither quantises nor observes.

    That is every weight quantizer of a student whose weights hold their quantised values: 3 % of a small step.
    """

    def forward(self: TensorQuantizer, inputs: Tensor) -> Tensor:
        state = self.__dict__
        if state["_if_quant"] or state["_if_calib"] or state["_disabled"]:
            return original(self, inputs)
        return inputs

    return forward


@contextlib.contextmanager
def _replaced(package: Any, name: str, function: Any, kept_as: str | None = None) -> Iterator[None]:
    """Stands for `replace_function`, by which a parallel linear puts its quantised product in place of Megatron's.

    ModelOpt's does not put the product back when the forward raises. Every other linear of the process would then pass
    through the failed one's quantizers: the next job of a sweep, for one.
    """
    original, kept_as = getattr(package, name), kept_as or f"_{name}"
    setattr(package, name, function)
    setattr(package, kept_as, original)
    try:
        yield
    finally:
        setattr(package, name, original)
        delattr(package, kept_as)


def _keeps_fp32(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Stands for `TensorQuantizer._apply`: moves amax to another device, never to another dtype."""

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kept = {n: b for n, b in self.named_buffers(recurse=False) if b.dtype == torch.float32}
        module = original(self, fn, recurse)
        for name, value in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != torch.float32 and value.device.type != "meta":
                self._buffers[name] = value.to(moved.device)
        return module

    return _apply


def _amax_of_all_ranks(original: Callable[[TensorQuantizer, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Stands for `TensorQuantizer._get_amax`: a dynamic amax is that of the whole tensor, not of the rank's part."""

    def _get_amax(self: TensorQuantizer, inputs: Tensor) -> Tensor:
        amax = original(self, inputs)
        group = getattr(self, "amax_group", None)
        return amax if group is None or hasattr(self, "_amax") else largest_of_ranks(amax, group)

    return _get_amax


def largest_of_ranks(amax: Tensor, group: dist.ProcessGroup) -> Tensor:
    """FP32 copy of `amax`, the largest of the ranks of `group`."""
    amax = amax.float().clone()
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return amax


_installed = False


def install() -> None:
    """Makes the changes that the module's head lists, and registers our core attention. Idempotent."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from nemo_qad.models.attention import CoreAttention

    global _installed
    if _installed:
        return
    tensor_quantizer.static_blockwise_fp4_fake_quant = _StaticNvfp4.apply
    tensor_quantizer.scaled_e4m3 = _scaled_e4m3(tensor_quantizer.scaled_e4m3)
    tensor_quant.dynamic_block_quantize_op = _dynamic_op(tensor_quant.dynamic_block_quantize_op)
    engine: Any = sys.modules.get("modelopt.torch.quantization.plugins.transformer_engine")
    for plugin in (custom_plugin, engine):
        if plugin is not None:
            plugin.replace_function = _replaced
    TensorQuantizer.forward = _returns_early(TensorQuantizer.forward)
    TensorQuantizer._apply = _keeps_fp32(TensorQuantizer._apply)
    TensorQuantizer._get_amax = _amax_of_all_ranks(TensorQuantizer._get_amax)
    # A process group is this run's, not the checkpoint's.
    skipped = {*TensorQuantizer._skip_properties_for_save_restore, "amax_group"}
    TensorQuantizer._skip_properties_for_save_restore = skipped
    megatron_plugin._check_nvfp4_static_tp_supported = lambda model: None
    QuantModuleRegistry.register({CoreAttention: "nemo_qad_CoreAttention"})(_QuantCoreAttention)
    QuantModuleRegistry.unregister(SequentialMLP)
    QuantModuleRegistry.register({SequentialMLP: "nemo_qad_SequentialMLP"})(_QuantSequentialMLP)
    _installed = True


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[], contextlib.ExitStack]]:
    """Holds back what ModelOpt prints (counts of quantizers, tqdm bars).

    Yields a function whose context lets output through again, for the caller's own progress.
    """
    out, err = sys.stdout, sys.stderr

    def loud() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        return stack

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield loud


def insert_quantizers(module: nn.Module, quant_cfg: list[dict[str, Any]]) -> None:
    """Converts the linears and attention of `module` in place and applies the rules; no calibration."""
    install()
    with quiet():
        mtq.quantize(module, {"quant_cfg": quant_cfg, "algorithm": None})
    children: Iterator[Any] = module.modules()
    for child in children:
        group = getattr(child, "tp_group", None)
        if hasattr(child, "weight_quantizer") and group is not None and group.size() > 1:
            child.weight_quantizer.amax_group = group


def calibrate(module: nn.Module, algorithm: str | dict[str, Any], forward: Callable[[], None]) -> None:
    """Runs ModelOpt's calibration; `forward` sends the whole calibration set through the model.

    Raises:
        UserError: an activation is NaN or infinite, which ModelOpt's calibrators assert against.
    """
    with quiet() as loud:

        def forward_loop(_: nn.Module) -> None:
            with loud():
                forward()

        try:
            mtq.calibrate(module, algorithm, forward_loop=forward_loop)
        except AssertionError as error:
            if "in amax" not in str(error):
                raise
            raise UserError(
                f"calibration: an activation is NaN or infinite ({error}). The weights are finite, so look at the "
                "calibration text and at the model's precision"
            ) from None


def enabled_quantizers(module: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    """Every enabled quantizer with its full name, in the model's order."""
    for name, child in module.named_modules():
        if isinstance(child, TensorQuantizer) and child.is_enabled:
            yield name, child


def is_nvfp4(quantizer: TensorQuantizer) -> bool:
    return bool(quantizer.is_nvfp4_static or quantizer.is_nvfp4_dynamic)


def scale_max(quantizer: TensorQuantizer) -> float:
    """Largest block scale aimed at: 256 for four-over-six, otherwise 448."""
    four_over_six = (quantizer.block_sizes or {}).get("four_over_six", False)
    return nvfp4.FOUR_OVER_SIX_SCALE_MAX if four_over_six else nvfp4.E4M3_MAX


def set_static_scales(quantizer: TensorQuantizer, amax: Tensor, global_amax: Tensor) -> None:
    """Gives a static NVFP4 quantizer the block amax (N elements, any shape) and global amax it is to keep, as FP32."""
    set_amax(quantizer, amax.float().reshape(-1, 1))
    StaticBlockScaleQuantizer.from_tensor_quantizer(quantizer, global_amax=global_amax)


def set_amax(quantizer: TensorQuantizer, amax: Tensor) -> None:
    """Replaces a quantizer's amax, whatever shape and dtype ModelOpt had given it."""
    if hasattr(quantizer, "_amax"):
        del quantizer._amax
    quantizer.amax = amax


def save_state(module: nn.Module, folder: Path) -> None:
    """Writes FOLDER/modelopt_state, from which ModelOpt's restore learns what is quantised; a collective call."""
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_sharded_modelopt_state([module], str(folder))
