"""Module specs of the hybrid stack, in torch alone: Nemotron-H's layers, and those of Llama and Qwen3."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from nemo_qad.models.attention import CoreAttention
from nemo_qad.models.experts import Router, TorchMoELayer
from nemo_qad.models.mamba import TorchMambaMixer
from nemo_qad.models.norms import RMSNorm
from nemo_qad.schema import ModelConfig


class TorchHybridStack(HybridStack):
    """HybridStack whose final norm is a torch norm: upstream writes Transformer Engine's class in its constructor."""

    def __init__(self, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)


def torch_spec(model: ModelConfig) -> ModuleSpec:
    """The spec for machines without Transformer Engine; parameter names do not depend on the layer pattern."""
    return ModuleSpec(
        module=TorchHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=_mamba_layer(model),
            attention_layer=_attention_layer(model),
            mlp_layer=_mlp_layer(),
            moe_layer=_moe_layer(),
        ),
    )


def _mamba_layer(model: ModelConfig) -> ModuleSpec:
    mixer = ModuleSpec(
        module=TorchMambaMixer,
        params={"d_conv": model.mamba.conv_kernel, "chunk_size": model.mamba.chunk_size},
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(norm=RMSNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
    )


def _attention_layer(model: ModelConfig) -> ModuleSpec:
    head_norm = RMSNorm if model.architecture.has_qk_norm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
        ),
    )


def _mlp_layer() -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=linears),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe_layer() -> ModuleSpec:
    upstream: MoESubmodules = get_moe_module_spec(use_te=False, num_experts=1).keywords["submodules"]
    parts = MoESubmodules(experts=upstream.experts, shared_experts=upstream.shared_experts, router=Router)
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(TorchMoELayer, submodules=parts),
            mlp_bda=get_bias_dropout_add,
        ),
    )
