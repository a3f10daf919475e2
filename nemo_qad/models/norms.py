"""Root-mean-square norms in torch, with the sharding marks that Megatron-Core expects."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over groups of the last dimension, with its gradient written out.

    torch's own is a chain of elementwise operations on the CPU; this halves the passes over memory.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
        grouped = x.unflatten(-1, (-1, group_size))
        mean_square = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True).square_() / group_size
        scale = (mean_square + eps).rsqrt_()
        normed = (grouped * scale).flatten(-2)
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        normed, scale, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        product = grads[0] * normed
        d_weight = product.flatten(0, -2).sum(0)
        group_size = normed.shape[-1] // scale.shape[-2]
        along = product.mul_(weight).unflatten(-1, (-1, group_size)).mean(-1, keepdim=True)
        d_normed = (grads[0] * weight).unflatten(-1, (-1, group_size))
        dx = d_normed.addcmul_(normed.view_as(d_normed), along, value=-1).mul_(scale)
        return dx.flatten(-2), d_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    """RMS norm over groups of `group_size` channels: x [..., channels], weight [channels], both of one dtype."""
    return _RmsNorm.apply(x, weight, group_size, eps)


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, reduced in FP32, returned in the dtype of x.

    Megatron-Core's own torch norm refuses sequence parallelism; all it needs is the mark on the weight
    that its gradient must be summed over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape[0]
        return rms_norm(x.float(), self.weight.float(), group_size=size, eps=self.eps).to(x.dtype)


class GatedRMSNorm(torch.nn.Module):
    """rms_norm(x * silu(gate)) * weight, the rms taken over each group of channels on its own.

    Takes the constructor arguments of mamba-ssm's norm of the same purpose, whose place it takes.
    """

    tp_group: torch.distributed.ProcessGroup  # set by MambaMixer

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm_before_gate:
            raise ValueError("a norm before the gate is not supported: Nemotron-H gates first")
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., hidden_size]; returns the same shape in the dtype of gate."""
        gated = x.float() * F.silu(gate.float())
        normed = rms_norm(gated, self.weight.float(), group_size=self.group_size, eps=self.eps)
        return normed.to(gate.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight belongs to channels, which tensor parallelism splits along dimension 0."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
