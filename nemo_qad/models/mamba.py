"""Mamba-2 mixer: Megatron-Core's, with the scan in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from nemo_qad import cpu
from nemo_qad.errors import UserError
from nemo_qad.models.norms import GatedRMSNorm
from nemo_qad.models.scan import causal_conv, chunked_scan

_CPU_CHUNK = 32  # largest chunk on a CPU: its quadratic part then fits the cache; measured fastest of 16, 32, 64, 128


class TorchMambaMixer(MambaMixer):
    """Parameters, initialisation, sharding and projections are Megatron-Core's; only the training scan differs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with cpu.without_mamba_ssm(GatedRMSNorm):
            super().__init__(*args, **kwargs)

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """zxBCdt [L, B, z + x + B + C + dt of this rank] -> [L, B, d_inner of this rank], gated and normed."""
        if packed_seq_params is not None:
            raise UserError("packed sequences are not supported by the torch Mamba-2 scan")
        length, batch = zxBCdt.shape[:2]
        groups, channels = self.ngroups_local_tp, self.d_inner_local_tp
        maps = groups * self.d_state
        gate, xBC, dt = zxBCdt.split([channels, channels + 2 * maps, self.nheads_local_tp], dim=-1)
        xBC = causal_conv(xBC, self.conv1d_weight.squeeze(1), self.conv1d_bias)
        x, b, c = xBC.split([channels, maps, maps], dim=-1)
        y = chunked_scan(
            x.view(length, batch, -1, self.headdim),
            F.softplus(dt.float() + self.dt_bias.float()),
            -torch.exp(self.A_log.float()),
            b.view(length, batch, groups, self.d_state),
            c.view(length, batch, groups, self.d_state),
            self.D.float(),
            min(self.chunk_size, _CPU_CHUNK) if zxBCdt.device.type == "cpu" else self.chunk_size,
        )
        return self.norm(y.reshape(length, batch, channels), gate)
