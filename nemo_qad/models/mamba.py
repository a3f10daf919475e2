"""Mamba-2 mixer: Megatron-Core's, with the scan in plain torch, over context-parallel ranks and packed documents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from nemo_qad import cpu
from nemo_qad.errors import UserError
from nemo_qad.models.context import Documents, join_sequence
from nemo_qad.models.convolution import causal_conv
from nemo_qad.models.norms import GatedRMSNorm
from nemo_qad.models.scan import chunked_scan

_CPU_CHUNK = 32  # largest chunk on a CPU: its quadratic part then fits the cache; measured fastest of 16, 32, 64, 128


class TorchMambaMixer(MambaMixer):
    """Parameters, initialisation, sharding and projections are Megatron-Core's; only the training scan differs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with cpu.without_mamba_ssm(GatedRMSNorm):
            super().__init__(*args, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [L / ranks of sequence parallelism, B, D] -> the same, and no bias.

        Raises:
            UserError: packed sequences other than `Documents`, or inference with a cache.
        """
        if inference_context is not None or inference_params is not None:
            raise UserError("the torch Mamba-2 mixer has no inference cache: run whole sequences")
        if packed_seq_params is not None and not isinstance(packed_seq_params, Documents):
            raise UserError(
                f"{type(packed_seq_params).__name__} is not supported by the torch Mamba-2 mixer: "
                "pass packed documents as nemo_qad.models.context.Documents"
            )
        zxBCdt, _ = self.in_proj(hidden_states)
        positions_SB = None
        if packed_seq_params is not None and packed_seq_params.positions_BL is not None:
            positions_SB = join_sequence(packed_seq_params.positions_BL, self.cp.cp_group).transpose(0, 1)
        zxBCdt = self.cp.pre_conv_ssm(zxBCdt)
        if self.training and self.config.recompute_granularity == "selective":
            return self.out_proj(tensor_parallel.checkpoint(self._scan, False, zxBCdt, positions_SB))
        return self.out_proj(self._scan(zxBCdt, positions_SB))

    def _scan(self, zxBCdt: Tensor, positions_SB: Tensor | None) -> Tensor:
        """zxBCdt [S, B, z + x + B + C + dt of this rank] -> [L, B, d_inner of this rank], gated and normed.

        Under context parallelism the whole sequence is here, in its order, for 1 / CP of the tensor-parallel rank's
        heads; what goes on is the rank's part of the sequence, L = S / CP, with all of these heads.
        """
        length, batch = zxBCdt.shape[:2]
        share = self.cp
        groups, channels = share.ngroups_local_tpcp, share.d_inner_local_tpcp
        maps = groups * self.d_state
        gate, xBC, dt = zxBCdt.split([channels, channels + 2 * maps, share.nheads_local_tpcp], dim=-1)
        xBC = causal_conv(xBC, share.get_conv1d_weight().squeeze(1), share.get_conv1d_bias(), positions_SB)
        x, b, c = xBC.split([channels, maps, maps], dim=-1)
        y = chunked_scan(
            x.view(length, batch, -1, self.headdim),
            F.softplus(dt.float() + share.get_dt_bias().float()),
            -torch.exp(share.get_A_log().float()),
            b.view(length, batch, groups, self.d_state),
            c.view(length, batch, groups, self.d_state),
            share.get_D().float(),
            min(self.chunk_size, _CPU_CHUNK) if zxBCdt.device.type == "cpu" else self.chunk_size,
            positions_SB,
        )
        y = share.post_conv_ssm(y.reshape(length, batch, channels))
        return self.norm(y, share.post_conv_ssm(gate))  # whose groups may span the heads of several ranks
