"""Root-mean-square norms in torch, with the sharding marks that Megatron-Core expects."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


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
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


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
        grouped = gated.view(*gated.shape[:-1], -1, self.group_size)
        normed = F.rms_norm(grouped, (self.group_size,), None, self.eps)
        return (normed.view(gated.shape) * self.weight.float()).to(gate.dtype)

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
