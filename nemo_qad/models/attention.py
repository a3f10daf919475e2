"""Core attention in torch: causal, grouped queries, packed documents, context parallel, linear memory."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.models import context_attention
from nemo_qad.models.context import Documents


class CoreAttention(MegatronModule):
    """softmax(query key^T / sqrt(head_dim)) value over the tokens of each query's document up to itself.

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
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise UserError(f"{attention_type} attention with mask {attn_mask_type} is not supported: only causal")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.context_group = getattr(pg_collection, "cp", None)
        if self.context_group is None:
            several = config.context_parallel_size > 1
            self.context_group = parallel_state.get_context_parallel_group(check_initialized=several)

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
        """query [L, B, heads, head_dim]; key, value [L, B, KV groups, head_dim] -> [L, B, heads x head_dim].

        L local tokens, as `nemo_qad.models.context` lays them out. `attention_mask` is not read.

        Raises:
            UserError: biases, packed sequences other than `Documents`, dropout or a GPU where they cannot be.
        """
        if attention_bias is not None:
            raise UserError("attention biases are not supported by the torch attention")
        if packed_seq_params is not None and not isinstance(packed_seq_params, Documents):
            raise UserError(
                f"{type(packed_seq_params).__name__} is not supported by the torch attention: "
                "pass packed documents as nemo_qad.models.context.Documents"
            )
        positions_BL = None if packed_seq_params is None else packed_seq_params.positions_BL
        plain = positions_BL is None and (self.context_group is None or self.context_group.size() == 1)
        if not plain:
            self._check_parts(query)
        # In one block there is nothing to cut; beyond it, the parts take as long, and less memory for grouped queries.
        if plain and (query.is_cuda or self.dropout > 0 or len(query) <= context_attention.BLOCK):
            return self._attend_at_once(query, key, value)
        return context_attention.attention(
            query, key, value, positions_BL=positions_BL, group=self.context_group, scale=self.softmax_scale
        ).flatten(2)

    def _check_parts(self, query: Tensor) -> None:
        """What attention in parts lacks."""
        reason = "with parallel.context above 1 or packed documents"
        if self.dropout > 0:
            raise UserError(f"attention_dropout={self.dropout} is not supported {reason}: use 0")
        if query.is_cuda:
            raise UserError(
                f"the torch attention does not run on GPUs {reason}: install Transformer Engine, whose attention is "
                "then chosen, or use parallel.context=1 and no packing"
            )

    def _attend_at_once(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The whole sequence in one call of torch."""
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:  # without this, grouped queries leave the fused CPU kernel
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)
