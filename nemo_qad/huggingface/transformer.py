"""Llama, Qwen3 and Qwen3-MoE on disk: names of their layers.

A layer of theirs is two here, attention and then a gated MLP or experts, each with its norm and its residual.
"""

from __future__ import annotations

from nemo_qad.huggingface.mapping import Kind, Mapping, norm, single
from nemo_qad.schema import ModelConfig

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_mappings(model: ModelConfig) -> list[Mapping]:
    """Every tensor of the layers, in their order."""
    table: list[Mapping] = []
    for index, kind in enumerate(model.hybrid_pattern):
        mcore, hf = f"decoder.layers.{index}", f"model.layers.{index // 2}"
        table += {"*": _attention, "-": _mlp, "E": _experts}[kind](model, mcore, hf)
    return table


def _attention(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    attention, hidden = model.attention, model.hidden_size
    query, key = (n * attention.head_dim for n in (attention.num_heads, attention.num_query_groups))
    a, h = f"{mcore}.self_attention", f"{hf}.self_attn"
    table = [
        norm(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight", hidden),
        Mapping(
            f"{a}.linear_qkv.weight",
            tuple(f"{h}.{part}_proj.weight" for part in "qkv"),
            ((query, hidden), (key, hidden), (key, hidden)),
            kind=Kind.qkv,
            is_linear=True,
        ),
    ]
    if model.architecture.has_qk_norm:
        table += [norm(f"{a}.{x}_layernorm.weight", f"{h}.{x}_norm.weight", attention.head_dim) for x in "qk"]
    return [*table, single(f"{a}.linear_proj.weight", f"{h}.o_proj.weight", (hidden, query), is_linear=True)]


def _gated(mcore: str, hf: str, hidden: int, width: int) -> list[Mapping]:
    names = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    shapes = ((width, hidden), (width, hidden))
    return [
        Mapping(f"{mcore}.linear_fc1.weight", names, shapes, kind=Kind.gated, is_linear=True),
        single(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, width), is_linear=True),
    ]


def _mlp(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    linears = _gated(f"{mcore}.mlp", f"{hf}.mlp", model.hidden_size, model.ffn_hidden_size)
    return [_second_norm(model, mcore, hf), *linears]


def _experts(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    moe, hidden = model.moe, model.hidden_size
    table = [
        _second_norm(model, mcore, hf),
        single(f"{mcore}.mlp.router.weight", f"{hf}.mlp.gate.weight", (moe.num_experts, hidden)),
    ]
    for expert in range(moe.num_experts):
        names = f"{mcore}.mlp.experts.local_experts.{expert}", f"{hf}.mlp.experts.{expert}"
        table += _gated(*names, hidden, moe.ffn_hidden_size)
    return table


def _second_norm(model: ModelConfig, mcore: str, hf: str) -> Mapping:
    return norm(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", model.hidden_size)
