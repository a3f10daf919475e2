"""Mixture-of-experts pieces of Megatron-Core, adjusted where the CPU or evaluation needs it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class Router(TopKRouter):
    """Counts tokens per expert in training alone.

    Megatron-Core counts whenever gradients are on, so an evaluation or a frozen teacher that runs with
    gradients on would move the expert bias at the next update.
    """

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if self.training:
            super()._apply_expert_bias(routing_map, padding_mask=padding_mask)


class AlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Hands split sizes to the all-to-all as integers.

    Megatron-Core turns them into numpy arrays while it copies them from the GPU; CPU tensors skip that
    copy and reach torch.distributed as tensors, which it refuses.
    """

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        tokens_per_expert = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name, None)
            if torch.is_tensor(splits):
                setattr(self, name, splits.numpy())
        return tokens_per_expert


class TorchMoELayer(MoELayer):
    """MoELayer with the dispatcher above where the tensors are on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher and not torch.cuda.is_available():
            self.token_dispatcher.__class__ = AlltoAllDispatcher
