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
        """zxBCdt [S, B, z + x + B + C + dt of this rank] -> [L, B, d_inner of this rank], gated and normed.

        Under context parallelism the whole sequence is here, in its order, for 1 / CP of the tensor-parallel rank's
        heads; what goes on is the rank's part of the sequence, L = S / CP, with all of these heads.
        """
        if packed_seq_params is not None:
            raise UserError("packed sequences are not supported by the torch Mamba-2 scan")
        length, batch = zxBCdt.shape[:2]
        share = self.cp
        groups, channels = share.ngroups_local_tpcp, share.d_inner_local_tpcp
        maps = groups * self.d_state
        gate, xBC, dt = zxBCdt.split([channels, channels + 2 * maps, share.nheads_local_tpcp], dim=-1)
        xBC = causal_conv(xBC, share.get_conv1d_weight().squeeze(1), share.get_conv1d_bias())
        x, b, c = xBC.split([channels, maps, maps], dim=-1)
        y = chunked_scan(
            x.view(length, batch, -1, self.headdim),
            F.softplus(dt.float() + share.get_dt_bias().float()),
            -torch.exp(share.get_A_log().float()),
            b.view(length, batch, groups, self.d_state),
            c.view(length, batch, groups, self.d_state),
            share.get_D().float(),
            min(self.chunk_size, _CPU_CHUNK) if zxBCdt.device.type == "cpu" else self.chunk_size,
        )
        y = share.post_conv_ssm(y.reshape(length, batch, channels))
        return self.norm(y, share.post_conv_ssm(gate))  # whose groups may span the heads of several ranks
