"""Build the hybrid model, and read its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.models import transformer_engine
from nemo_qad.models.context import Documents, split_sequence
from nemo_qad.models.rotary import scaled
from nemo_qad.models.vocabulary import padded_vocab_size
from nemo_qad.schema import ModelConfig, ParallelConfig, Precision, Recompute

LogitsFn = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, the activation of every MLP of Nemotron-H."""
    positive = F.relu(x)
    return positive * positive


def build_model(model: ModelConfig, parallel: ParallelConfig, *, sequence_length: int) -> HybridModel:
    """A HybridModel with fresh parameters on `runtime.device()`, without its multi-token-prediction blocks.

    Needs `runtime.process_groups`. Train or eval mode is left to the caller. Parameters have the dtype of
    `model.precision`; A_log, D and expert_bias stay FP32.

    Raises:
        ConfigError: a parallel layout that the model cannot have.
    """
    config = transformer_config(model, parallel)
    module = HybridModel(
        config,
        _stack_spec(model),
        vocab_size=padded_vocab_size(model, parallel.tensor),
        max_sequence_length=sequence_length,
        hybrid_layer_pattern=stage_pattern(model.hybrid_pattern, parallel.pipeline),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tied_output,
        position_embedding_type="rope" if model.rotary_base else "none",
        rotary_base=model.rotary_base,
    )
    if model.rotary_scaling.factor != 1:
        module.rotary_pos_emb.inv_freq = scaled(module.rotary_pos_emb.inv_freq, model.rotary_scaling)
    return module.to(runtime.device())


def transformer_config(model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron-Core's configuration of `model`. Losses are sums over tokens, divided once by their count."""
    dtype = torch.bfloat16 if model.precision == Precision.bf16 else torch.float32
    fused = transformer_engine.available()
    return TransformerConfig(
        num_layers=len(model.hybrid_pattern),
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.attention.num_heads,
        num_query_groups=model.attention.num_query_groups,
        kv_channels=model.attention.head_dim,
        mamba_num_heads=model.mamba.num_heads,
        mamba_head_dim=model.mamba.head_dim,
        mamba_num_groups=model.mamba.num_groups,
        mamba_state_dim=model.mamba.state_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        init_method_std=model.init_std,
        activation_func=squared_relu if model.architecture.is_hybrid else F.silu,
        gated_linear_unit=not model.architecture.is_hybrid,
        qk_layernorm=model.architecture.has_qk_norm,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.precision == Precision.bf16,
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.tensor > 1,
        **_recompute_settings(model, parallel.recompute),
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **_moe_settings(model, grouped=fused),
    )


def _recompute_settings(model: ModelConfig, recompute: Recompute) -> dict:
    """Megatron's. What is inside Mamba layers under `selective` is the mixer's own business."""
    if recompute is Recompute.none:
        return {}
    if recompute is Recompute.full:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    layers = {"E": "moe", "-": "mlp"}
    modules = [name for layer, name in layers.items() if layer in model.hybrid_pattern]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _moe_settings(model: ModelConfig, *, grouped: bool) -> dict:
    """Router and experts. The auxiliary loss and the expert bias act in training alone."""
    if "E" not in model.hybrid_pattern:
        return {}
    return {
        "num_moe_experts": model.moe.num_experts,
        "moe_router_topk": model.moe.top_k,
        "moe_ffn_hidden_size": model.moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe.shared_expert_ffn_hidden_size or None,
        **_router_settings(model),
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": model.moe.aux_loss_coeff,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": False,
    }


def _router_settings(model: ModelConfig) -> dict:
    """Nemotron-H: sigmoid scores, a bias that chooses, scaled weights. Others: softmax over the chosen experts."""
    if not model.architecture.is_hybrid:
        return {"moe_router_score_function": "softmax"}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": model.moe.bias_update_rate,
        "moe_router_topk_scaling_factor": model.moe.routed_scaling_factor,
    }


def stage_pattern(pattern: str, stages: int) -> str:
    """The layer pattern with `|` between pipeline stages, as even as can be: 52 layers in 8 stages are 7, 7, 7, 7, 6...

    Raises:
        ConfigError: more stages than layers.
    """
    if stages > len(pattern):
        raise ConfigError("parallel.pipeline", stages, f"the model has {len(pattern)} layers", "Use fewer stages.")
    short, longer = divmod(len(pattern), stages)
    sizes = [short + (stage < longer) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return "|".join(pattern[start : start + size] for start, size in zip(starts, sizes, strict=True))


def _stack_spec(model: ModelConfig):  # type: ignore[no-untyped-def]
    if transformer_engine.available():
        return transformer_engine.transformer_engine_spec(model)
    from nemo_qad.models.hybrid import torch_spec

    return torch_spec(model)


def forward_hidden(module: torch.nn.Module, tokens_BS: Tensor, packed: Documents | None = None) -> Tensor:
    """tokens int64 [B, S] -> normed hidden states [B, S, D] that the output layer reads.

    Under context parallelism tokens and hidden states are the rank's part of the sequence; under sequence parallelism
    hidden states are [B, S / ranks, D], the r-th part of that on rank r. `module` may be wrapped (DDP). A pipeline
    stage after the first starts from what `set_input_tensor` was given; one before the last returns what the next
    stage starts from. `packed`: the documents of the tokens; None: each row is one.
    """
    model = bare(module)
    if packed is not None and transformer_engine.available():  # whose attention and scan would not look at positions
        raise UserError("packed documents are not supported with Transformer Engine yet: give one document a row")
    embedded_SBD = model.embedding(input_ids=tokens_BS, position_ids=None) if model.pre_process else None
    hidden_SBD = model.decoder(
        hidden_states=embedded_SBD,
        attention_mask=None,
        rotary_pos_emb=_rotary(model, tokens_BS.shape[1]),
        packed_seq_params=packed,
    )
    return hidden_SBD.transpose(0, 1)


def _rotary(model: HybridModel, length: int) -> Tensor | None:
    """Angles of the rank's positions, of its two chunks under context parallelism; None without rotary embedding.

    Documents that are packed in a row need no others: attention sees differences of positions alone.
    """
    if model.position_embedding_type != "rope":
        return None
    group = model.pg_collection.cp
    return split_sequence(model.rotary_pos_emb.get_emb(length * group.size(), 0), group, dim=0)


def forward_logits(module: torch.nn.Module, tokens_BS: Tensor) -> Tensor:
    """tokens int64 [B, S] -> logits [B, S, padded vocabulary] in the model's dtype, with gradients if they are on."""
    model = bare(module)
    config = model.config
    if config.tensor_model_parallel_size > 1 or config.pipeline_model_parallel_size > 1:
        return module(tokens_BS, None, None, runtime_gather_output=True)
    # HybridModel.forward would compute [S, B, V] and copy it to [B, S, V]: hidden states are cheaper to turn.
    logits, _ = model.output_layer(forward_hidden(model, tokens_BS).contiguous(), weight=_shared_weight(model))
    return logits


def forward_logit_shards(module: torch.nn.Module, tokens_BS: Tensor, packed: Documents | None = None) -> Tensor:
    """tokens int64 [B, S] -> this rank's columns of the logits, [S, B, padded vocabulary / ranks]."""
    model = bare(module)
    hidden_SBD = forward_hidden(model, tokens_BS, packed).transpose(0, 1)
    logits, _ = model.output_layer(hidden_SBD.contiguous(), weight=_shared_weight(model), runtime_gather_output=False)
    return logits


def output_weight(module: torch.nn.Module) -> Tensor:
    """This rank's rows of the padded output weight, [padded vocabulary / ranks, D]: the embedding's if it is shared."""
    model = bare(module)
    shared = _shared_weight(model)
    return model.output_layer.weight if shared is None else shared


def _shared_weight(model: HybridModel) -> Tensor | None:
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None


def bare(module: torch.nn.Module) -> HybridModel:
    """The model inside its wrappers."""
    inner: Any = module
    while hasattr(inner, "module"):  # DDP and BF16 wrappers hold the model under this name
        inner = inner.module
    return inner


def logits_fn(module: torch.nn.Module, vocab_size: int) -> LogitsFn:
    """A function tokens int64 [B, S] -> logits FP32 [B, S, vocab_size], without gradients, in eval mode."""

    def logits(tokens_BS: Tensor) -> Tensor:
        with evaluating(module):
            return forward_logits(module, tokens_BS.to(runtime.device()))[..., :vocab_size].float()

    return logits


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Inside, `module` is in eval mode and nothing is recorded for gradients; on exit its own mode comes back."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
