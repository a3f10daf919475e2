"""Core attention in torch: causal, grouped queries, linear memory."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_qad.errors import UserError


class CoreAttention(MegatronModule):
    """softmax(query key^T / sqrt(head_dim)) value with a causal mask.

    A module class of its own, so that KV-cache quantizers can be attached to what it is given as key and
    value: a subclass quantises both and calls `forward`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise UserError(
                f"parallel.context={config.context_parallel_size} is not supported yet by the torch attention: "
                "use parallel.context=1"
            )
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise UserError(f"{attention_type} attention with mask {attn_mask_type} is not supported: only causal")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [S, B, heads, head_dim]; key, value [S, B, KV groups, head_dim] -> [S, B, heads x head_dim].

        `attention_mask` is not read: the mask is causal.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise UserError("attention biases and packed sequences are not supported by the torch attention")
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:  # without this, grouped queries leave the fused CPU kernel
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)
