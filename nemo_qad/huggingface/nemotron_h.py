"""Nemotron-H on disk: names of its layers, and the fields of config.json that decide what its weights compute."""

from __future__ import annotations

from dataclasses import replace

from nemo_qad.huggingface.mapping import Content, Kind, Mapping, norm, single
from nemo_qad.schema import ModelConfig

EMBEDDING, FINAL_NORM, OUTPUT = "backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"


def layer_mappings(model: ModelConfig) -> list[Mapping]:
    """Every tensor of the layers, in their order."""
    table: list[Mapping] = []
    for index, layer_type in enumerate(model.hybrid_pattern):
        table += _LAYERS[layer_type](model, f"decoder.layers.{index}", f"backbone.layers.{index}")
    return table


def prediction_mappings(model: ModelConfig) -> list[Mapping]:
    """Every tensor of the stored multi-token-prediction blocks. Megatron-Core builds none of them here: no `mcore`."""
    table: list[Mapping] = []
    length, hidden = len(model.mtp_pattern), model.hidden_size
    for block in range(model.mtp_num_layers):
        first = f"mtp.layers.{block * length}"
        table.append(single("", f"{first}.eh_proj.weight", (hidden, 2 * hidden), is_linear=True))
        table += [norm("", f"{first}.{name}.weight", hidden) for name in ("enorm", "hnorm")]
        for index, layer_type in enumerate(model.mtp_pattern, block * length):
            table += _LAYERS[layer_type](model, "", f"mtp.layers.{index}")
        table.append(norm("", f"mtp.layers.{(block + 1) * length - 1}.final_layernorm.weight", hidden))
    return [replace(mapping, mcore="") for mapping in table]


def _mlp(mcore: str, hf: str, hidden: int, width: int) -> list[Mapping]:
    return [
        single(f"{mcore}.linear_fc1.weight", f"{hf}.up_proj.weight", (width, hidden), is_linear=True),
        single(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, width), is_linear=True),
    ]


def _mamba(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    mamba, hidden = model.mamba, model.hidden_size
    inner = mamba.num_heads * mamba.head_dim
    convolved = inner + 2 * mamba.num_groups * mamba.state_dim
    m, h = f"{mcore}.mixer", f"{hf}.mixer"
    heads = (mamba.num_heads,)
    return [
        norm(f"{mcore}.norm.weight", f"{hf}.norm.weight", hidden),
        single(f"{m}.in_proj.weight", f"{h}.in_proj.weight", (inner + convolved + heads[0], hidden), is_linear=True),
        single(f"{m}.conv1d_weight", f"{h}.conv1d.weight", (convolved, 1, mamba.conv_kernel)),
        single(f"{m}.conv1d_bias", f"{h}.conv1d.bias", (convolved,), content=Content.free),
        single(f"{m}.dt_bias", f"{h}.dt_bias", heads, content=Content.free),
        single(f"{m}.A_log", f"{h}.A_log", heads, content=Content.free),
        single(f"{m}.D", f"{h}.D", heads, content=Content.free),
        norm(f"{m}.norm.weight", f"{h}.norm.weight", inner),
        single(f"{m}.out_proj.weight", f"{h}.out_proj.weight", (hidden, inner), is_linear=True),
    ]


def _attention(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    attention, hidden = model.attention, model.hidden_size
    query, key = (n * attention.head_dim for n in (attention.num_heads, attention.num_query_groups))
    return [
        norm(f"{mcore}.input_layernorm.weight", f"{hf}.norm.weight", hidden),
        Mapping(
            f"{mcore}.self_attention.linear_qkv.weight",
            tuple(f"{hf}.mixer.{part}_proj.weight" for part in "qkv"),
            ((query, hidden), (key, hidden), (key, hidden)),
            kind=Kind.qkv,
            is_linear=True,
        ),
        single(
            f"{mcore}.self_attention.linear_proj.weight",
            f"{hf}.mixer.o_proj.weight",
            (hidden, query),
            is_linear=True,
        ),
    ]


def _moe(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    moe, hidden = model.moe, model.hidden_size
    m, h = f"{mcore}.mlp", f"{hf}.mixer"
    experts = (moe.num_experts,)
    table = [
        norm(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.norm.weight", hidden),
        single(f"{m}.router.weight", f"{h}.gate.weight", (*experts, hidden)),
        single(f"{m}.router.expert_bias", f"{h}.gate.e_score_correction_bias", experts, content=Content.free),
    ]
    for expert in range(moe.num_experts):
        table += _mlp(f"{m}.experts.local_experts.{expert}", f"{h}.experts.{expert}", hidden, moe.ffn_hidden_size)
    shared = moe.shared_expert_ffn_hidden_size
    return table + _mlp(f"{m}.shared_experts", f"{h}.shared_experts", hidden, shared)


def _dense_mlp(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    first = norm(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.norm.weight", model.hidden_size)
    return [first, *_mlp(f"{mcore}.mlp", f"{hf}.mixer", model.hidden_size, model.ffn_hidden_size)]


_LAYERS = {"M": _mamba, "*": _attention, "E": _moe, "-": _dense_mlp}
