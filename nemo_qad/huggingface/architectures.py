"""config.json: what it says of an architecture, written for a model and read into one. No torch.

Only fields that decide what the weights compute are compared; what cannot be computed here is refused by its name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nemo_qad.choices import Architecture
from nemo_qad.errors import UserError
from nemo_qad.huggingface.rotary import read_rotary, rotary_fields
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig

_CLASSES = {
    Architecture.nemotron_h: "NemotronHForCausalLM",
    Architecture.llama: "LlamaForCausalLM",
    Architecture.qwen3: "Qwen3ForCausalLM",
    Architecture.qwen3_moe: "Qwen3MoeForCausalLM",
}
_BLOCKS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-",
}  # fmt: skip
# Fields that ask for what is not built here: name -> the only value that may stand there, of those that have it.
_ONLY = {
    "hidden_act": "silu", "mlp_hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "use_bias": False,
    "mamba_proj_bias": False, "use_conv_bias": True, "use_sliding_window": False, "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "decoder_sparse_step": 1,
}  # fmt: skip


def architecture_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that decide what the weights compute."""
    attention = model.attention
    fields: dict[str, Any] = {
        "model_type": model.architecture.value,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_output,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_query_groups,
        "head_dim": attention.head_dim,
    }
    return fields | (_hybrid_fields(model) if model.architecture.is_hybrid else _transformer_fields(model))


def _hybrid_fields(model: ModelConfig) -> dict[str, Any]:
    mamba, moe = model.mamba, model.moe
    fields: dict[str, Any] = {
        "hybrid_override_pattern": model.hybrid_pattern,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.num_groups,
        "ssm_state_size": mamba.state_dim,
        "conv_kernel": mamba.conv_kernel,
        "mlp_hidden_act": "relu2",
    }
    if "E" in model.hybrid_pattern:
        fields |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size,
            "routed_scaling_factor": moe.routed_scaling_factor,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        }
    return fields


def _transformer_fields(model: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_hidden_layers": len(model.hybrid_pattern) // 2,
        "rms_norm_eps": model.layernorm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if "-" in model.hybrid_pattern:
        fields["intermediate_size"] = model.ffn_hidden_size
    if model.architecture is Architecture.qwen3_moe:
        fields |= {
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "moe_intermediate_size": model.moe.ffn_hidden_size,
            "norm_topk_prob": True,
        }
    return fields


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the model. The token identifiers are null: the tokenizer's files name them."""
    common = {
        "architectures": [_CLASSES[model.architecture]],
        "num_hidden_layers": len(model.hybrid_pattern),
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        "use_cache": "*" in model.hybrid_pattern,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
    }
    if model.architecture.is_hybrid:
        return common | architecture_fields(model) | _hybrid_rest(model)
    rest: dict[str, Any] = {**rotary_fields(model), "mlp_bias": False}
    if model.architecture is Architecture.qwen3_moe:
        dense = [index // 2 for index, kind in enumerate(model.hybrid_pattern) if kind == "-"]
        rest |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return common | architecture_fields(model) | rest


def exported_config(model: ModelConfig, source: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """config.json of a checkpoint that was made from another: what that one says stays, such as its token identifiers.

    Args:
        source: config.json of the other, or None. dtype: of the tensors that are not quantised.
    """
    gone = {"auto_map", "dtype", "torch_dtype", "quantization_config", "_name_or_path"}  # no code of others runs
    kept = {name: value for name, value in (source or {}).items() if name not in gone}
    own = {"tie_word_embeddings": model.tied_output, "torch_dtype": dtype}
    return {**hf_config(model), **kept, **own}


def read_config(folder: Path) -> dict[str, Any] | None:
    """config.json of a folder, or None where there is none.

    Raises:
        UserError: it is not JSON.
    """
    path = folder / "config.json"
    return _read(path) if path.exists() else None


def _hybrid_rest(model: ModelConfig) -> dict[str, Any]:
    """Layers are given as `hybrid_override_pattern`, which transformers, vLLM and TensorRT-LLM all read."""
    return {
        "norm_eps": model.layernorm_epsilon,
        "chunk_size": model.mamba.chunk_size,
        "expand": 2,  # not used: mamba_num_heads x mamba_head_dim is the inner width
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "use_bias": False,
        "attention_bias": False,
        "hidden_dropout": 0.0,
        "mlp_bias": False,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": False,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "mamba_ssm_cache_dtype": "float32",
        "num_logits_to_keep": 1,
        **_prediction_fields(model),
    }


def _prediction_fields(model: ModelConfig) -> dict[str, Any]:
    """Of the blocks that predict further tokens, under the names of Nemotron 3.5's config.json."""
    if not model.mtp_num_layers:
        return {}
    return {"num_nextn_predict_layers": model.mtp_num_layers, "mtp_hybrid_override_pattern": model.mtp_pattern}


def is_tied(folder: Path) -> bool:
    """Whether config.json says that the embedding is the output layer too."""
    return bool((read_config(folder) or {}).get("tie_word_embeddings"))


def check_config(folder: Path, model: ModelConfig) -> None:
    """Compares config.json, where there is one, with the model in what shapes cannot show (heads, top-k, eps).

    Raises:
        UserError: a field that contradicts the model, or a file that is not JSON.
    """
    path, found = folder / "config.json", read_config(folder)
    if found is None:
        return
    expected = architecture_fields(model)
    if not model.architecture.is_hybrid:
        found["rope_theta"], found["rope_scaling"] = read_rotary(path, found)
        expected |= {"rope_theta": model.rotary_base, "rope_scaling": model.rotary_scaling}
    if found.get("tie_word_embeddings") and not model.tied_output:
        del found["tie_word_embeddings"]  # the output layer starts as a copy of the embedding
    for field, value in expected.items():
        if field in found and found[field] != value:
            raise UserError(
                f"{path}: {field}={found[field]!r}, but model {model.name} has {value!r}. "
                "Choose the model that this checkpoint belongs to."
            )


def model_of_folder(folder: Path) -> ModelConfig:
    """The model that a checkpoint's config.json describes, in BF16.

    Raises:
        UserError: no config.json, an architecture or an option that is not supported, a field that is missing.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json there. Give the folder of a Hugging Face checkpoint")
    found = _read(path)
    kind = found.get("model_type")
    if kind not in list(Architecture):
        known = ", ".join(Architecture)
        raise UserError(f"{path}: model_type={kind!r} is not supported. Supported: {known}")
    for field, only in _ONLY.items():
        if found.get(field) not in (None, only):
            raise UserError(f"{path}: {field}={found[field]!r} is not supported, only {only!r} is")
    try:
        fields = _hybrid_model(path, found) if kind == Architecture.nemotron_h else _transformer_model(path, found)
        return ModelConfig(
            name=re.sub(r"[^A-Za-z0-9._-]", "_", folder.resolve().name).lstrip(".-") or "model",
            architecture=Architecture(kind),
            hidden_size=found["hidden_size"],
            vocab_size=found["vocab_size"],
            max_position_embeddings=found["max_position_embeddings"],
            init_std=found.get("initializer_range", 0.02),
            tied_output=bool(found.get("tie_word_embeddings", False)),
            attention=_attention(found),
            **fields,
        )
    except KeyError as error:
        raise UserError(f"{path}: field {error} is missing") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}). Copy it again.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no fields. Copy it again.")
    return found


def _attention(found: dict[str, Any]) -> AttentionConfig:
    heads = found["num_attention_heads"]
    head_dim = found.get("head_dim") or found["hidden_size"] // heads
    return AttentionConfig(heads, found.get("num_key_value_heads") or heads, head_dim)


def _hybrid_model(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    pattern = found.get("hybrid_override_pattern") or _pattern(path, found["layers_block_type"])
    num_mtp = found.get("num_nextn_predict_layers") or 0
    mtp = found.get("mtp_hybrid_override_pattern") or _pattern(path, found.get("mtp_layers_block_type") or [])
    moe = MoeConfig(0, 0, 0, 0)
    if "E" in pattern:
        moe = MoeConfig(
            found["n_routed_experts"], found["num_experts_per_tok"], found["moe_intermediate_size"],
            found["moe_shared_expert_intermediate_size"], found.get("routed_scaling_factor", 1.0),
        )  # fmt: skip
    return {
        "hybrid_pattern": pattern,
        "ffn_hidden_size": found.get("intermediate_size") or found["hidden_size"],
        "layernorm_epsilon": found.get("layer_norm_epsilon", 1e-5),
        "mamba": MambaConfig(
            found["mamba_num_heads"], found["mamba_head_dim"], found["n_groups"], found["ssm_state_size"],
            found.get("conv_kernel", 4), found.get("chunk_size", 128),
        ),
        "moe": moe,
        "mtp_num_layers": num_mtp,
        "mtp_pattern": mtp if num_mtp else "",
    }  # fmt: skip


def _pattern(path: Path, blocks: list[str]) -> str:
    unknown = sorted(set(blocks) - _BLOCKS.keys())
    if unknown:
        raise UserError(f"{path}: layers of kind {unknown[0]!r} are not supported")
    return "".join(_BLOCKS[block] for block in blocks)


def _transformer_model(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    layers, moe = found["num_hidden_layers"], MoeConfig(0, 0, 0, 0, 1.0)
    base, scaling = read_rotary(path, found)
    pattern = "*-" * layers
    if found["model_type"] == Architecture.qwen3_moe:
        dense = set(found.get("mlp_only_layers") or [])
        pattern = "".join("*-" if layer in dense else "*E" for layer in range(layers))
        experts = found["num_experts"] if "num_experts" in found else found["num_local_experts"]
        moe = MoeConfig(experts, found["num_experts_per_tok"], found["moe_intermediate_size"], 0, 1.0)
        if not found.get("norm_topk_prob", False):
            raise UserError(f"{path}: norm_topk_prob=false is not supported")
    return {
        "hybrid_pattern": pattern,
        "ffn_hidden_size": found["intermediate_size"],
        "layernorm_epsilon": found["rms_norm_eps"],
        "rotary_base": base,
        "rotary_scaling": scaling,
        "mamba": MambaConfig(0, 0, 0, 0),
        "moe": moe,
    }
