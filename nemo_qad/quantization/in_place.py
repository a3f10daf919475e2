"""Weights quantised once a step, in place, instead of in every forward: the same bits for a fraction of the work.

Straight-through means that the gradient of the quantised weight is the weight's gradient, and the optimizer keeps
the truth in FP32 elsewhere. So between two optimizer steps the parameter itself may hold its quantised value, while
the weight quantizer stays enabled but does not quantise (`disable_quant`). Quantizers of activations, K and V are left
alone. What the forward then reads is what it would have computed: `fake_quantize` of the parameter, rounded to its
dtype.

Work goes through a weight in pieces of `chunk_blocks` blocks, so that scratch memory is a few MiB at any model size.

Beyond the largest code (6 steps for NVFP4, 448 for FP8) a weight of frozen scale can wander without effect on the
forward. `clip` moves it back to that limit. Dynamic NVFP4 scales follow the largest weights, so nothing lies beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_qad.choices import QuantizeWeights, WeightScales
from nemo_qad.models.whole import Cut
from nemo_qad.quantization import fp8, modelopt, nvfp4
from nemo_qad.quantization.nvfp4_fast import chunk_blocks
from nemo_qad.quantization.scales import choose_weight_scales, largest_magnitude
from nemo_qad.quantization.sharded_scales import ShardedScales, empty_like, scale_cut
from nemo_qad.quantization.student import is_quantised, quantizer_state, set_scales
from nemo_qad.schema import QadConfig, RecipeConfig

AMAX, GLOBAL_AMAX = "weight_quantizer._amax", "weight_quantizer._global_amax"


@dataclass(frozen=True)
class _Linear:
    name: str
    module: nn.Module

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    @property
    def quantizer(self) -> Any:
        return self.module.weight_quantizer


class QuantizedWeights:
    """The weights of all quantised linears of a student; what `training.student_weights.StudentWeights` asks for.

    Args:
        module: the quantised student, bare. Its parameters must be trained straight-through.
        in_place: between steps the parameters hold quantised values.
        clips: weights are clipped after each step.
        refresh: chooses frozen scales anew from the weights now in the module, or None.
        refresh_every: after how many steps; 0 never.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        in_place: bool,
        clips: bool = False,
        refresh: Callable[[], None] | None = None,
        refresh_every: int = 0,
    ) -> None:
        self.in_place, self.clips = in_place, clips
        self._module = module
        self._refresh, self._refresh_every = refresh, refresh_every
        self._linears = {
            f"{name}.weight": _Linear(name, child) for name, child in module.named_modules() if is_quantised(child)
        }
        for linear in self._linears.values():
            # False would zero the gradient of what is out of range, which a weight quantised in place cannot know.
            assert linear.quantizer._pass_through_bwd, f"{linear.name}: the gradient is not straight-through"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, as `named_parameters` of the module has them."""
        return tuple(self._linears)

    @torch.no_grad()
    def quantize(self) -> None:
        """Overwrites each parameter by its quantised value and stops quantising it in forward.

        Quantised values that are quantised again may change (dynamic scales follow from the weights): the parameters
        must hold the truth. With dynamic scales under tensor parallelism a collective call.
        """
        for linear in self._linears.values():
            quantize_in_place(linear.parameter, linear.quantizer)
            linear.quantizer.disable_quant()

    def quantize_in_forward(self) -> None:
        """The ordinary student again; its parameters are the caller's business."""
        for linear in self._linears.values():
            linear.quantizer.enable_quant()

    @torch.no_grad()
    def clip(self, name: str, values: Tensor, start: int = 0) -> None:
        """Clips, in place, part of a weight of frozen scale to what its codes reach; of another one, does nothing.

        Args:
            name: of the parameter.
            values: contiguous elements of the flattened weight, in FP32 or the parameter's dtype; any shape.
            start: number of the first of them in the flattened weight.
        """
        quantizer = self._linears[name].quantizer
        flat = values.detach().view(-1)
        if quantizer.is_nvfp4_static:
            for part, limit in _limits(flat, start, quantizer):
                part.clamp_(-limit, limit)
        elif not modelopt.is_nvfp4(quantizer):
            limit = (fp8.scale_of(quantizer.amax) * fp8.E4M3_MAX).to(flat.dtype)
            flat.clamp_(-limit, limit)

    def refresh(self, step: int) -> None:
        """Chooses the frozen NVFP4 scales anew if `step` is due; the parameters must hold the truth."""
        if self._refresh and self._refresh_every and step % self._refresh_every == 0:
            self._refresh()

    def scales(self) -> dict[str, Tensor]:
        """Frozen NVFP4 scales where they are refreshed, and thus part of a run's state; otherwise nothing.

        Block amax [O, I/16] and global amax [], by buffer name.
        """
        found = {}
        for linear in self._refreshed():
            found[f"{linear.name}.{AMAX}"] = linear.quantizer._amax.view(linear.parameter.shape[0], -1)
            found[f"{linear.name}.{GLOBAL_AMAX}"] = linear.quantizer._global_amax.view(())
        return found

    def scale_cut(self) -> Cut:
        """How `scales` are cut over tensor-parallel ranks."""
        return scale_cut(self._module)

    def sharded_scales(self) -> dict[str, Any]:
        """Megatron's sharded tensors of the scales of every quantizer, by key: of weights, activations, K and V."""
        return dict(ShardedScales(self._module).sharded_state(quantizer_state(self._module)))

    def load_scales(self, load: Callable[[dict[str, Any]], None]) -> None:
        """The inverse of `sharded_scales`: sets every scale to the checkpoint's; a collective call.

        Raises:
            UserError: naming scales that are missing, zero, NaN or infinite.
        """
        own, sharded = empty_like(self._module), ShardedScales(self._module)
        wanted = sharded.sharded_state(own)
        load(wanted)
        set_scales(self._module, sharded.state_of({key: item.data for key, item in wanted.items()}, own))

    @contextmanager
    def as_modelopt_has_them(self) -> Iterator[None]:
        """Inside, the weight quantizers say that they quantise, as a student outside training has them."""
        off = [each for each in self._linears.values() if not each.quantizer._if_quant]
        for linear in off:
            linear.quantizer.enable_quant()
        try:
            yield
        finally:
            for linear in off:
                linear.quantizer.disable_quant()

    def _refreshed(self) -> list[_Linear]:
        if not self._refresh_every:
            return []
        return [linear for linear in self._linears.values() if linear.quantizer.is_nvfp4_static]


def student_weights(module: nn.Module, qad: QadConfig, recipe: RecipeConfig) -> QuantizedWeights:
    """The weights of a student as a run's configuration wants them treated."""
    frozen = WeightScales(recipe.weight_scales) is WeightScales.static
    return QuantizedWeights(
        module,
        in_place=QuantizeWeights(qad.quantize_weights) is QuantizeWeights.per_step,
        clips=qad.clip_weights,
        refresh=lambda: choose_weight_scales(module, recipe.scale_search),
        refresh_every=qad.refresh_scales_every if frozen else 0,
    )


def quantize_in_place(weight: Tensor, quantizer: Any) -> None:
    """weight = the value that `quantizer` makes of it in forward, bit for bit; contiguous, any floating dtype."""
    if not modelopt.is_nvfp4(quantizer):
        for part in weight.detach().view(-1).split(chunk_blocks(weight) * nvfp4.BLOCK_SIZE):
            part.copy_(fp8.fake_quantize(part, quantizer.amax))
        return
    largest, frozen_N = modelopt.scale_max(quantizer), None
    if quantizer.is_nvfp4_static:
        outer, frozen_N = quantizer.global_amax, quantizer.amax.view(-1)
    else:
        outer, group = largest_magnitude(weight.detach()), getattr(quantizer, "amax_group", None)
        outer = outer if group is None else modelopt.largest_of_ranks(outer, group)
    blocks_NK, size = weight.detach().view(-1, nvfp4.BLOCK_SIZE), chunk_blocks(weight)
    for start in range(0, len(blocks_NK), size):
        chunk = blocks_NK[start : start + size]
        amax = nvfp4.block_amax(chunk) if frozen_N is None else frozen_N[start : start + size]
        chunk.copy_(nvfp4.fake_quantize(chunk, amax, outer, largest))


def _limits(flat: Tensor, start: int, quantizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(a part of `flat`, the largest magnitude of each of its elements), a few MiB at a time."""
    amax_N, outer, largest = quantizer.amax.view(-1), quantizer.global_amax, modelopt.scale_max(quantizer)
    size, block = chunk_blocks(flat) * nvfp4.BLOCK_SIZE, nvfp4.BLOCK_SIZE
    for offset in range(0, len(flat), size):
        part = flat[offset : offset + size]
        first, end = start + offset, start + offset + len(part)
        amax = amax_N[first // block : -(-end // block)]  # the first and the last block may be in part another rank's
        step = nvfp4.block_scale(amax, outer, largest).float().mul_(nvfp4.global_scale(outer, largest))
        limit = step.mul_(nvfp4.E2M1_MAX).repeat_interleave(block)[first % block :][: len(part)]
        yield part, limit.to(flat.dtype)
