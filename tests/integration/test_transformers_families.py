"""Random small models of transformers' own families: read from their folder, they give the same logits here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    NemotronHConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_qad import runtime
from nemo_qad.errors import UserError
from nemo_qad.huggingface.architectures import hf_config, model_of_folder
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.models.build import build_model, logits_fn
from nemo_qad.schema import ModelConfig, ParallelConfig, Precision

TOLERANCE = 2e-5  # absolute, FP32 logits of size about 1
COMMON: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
FAMILIES = {
    "llama": LlamaConfig(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "llama3": LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_tied": LlamaConfig(**COMMON, head_dim=24, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=24, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, mlp_only_layers=[1]),
    "nemotron_h": NemotronHConfig(
        **{k: v for k, v in COMMON.items() if k not in ("num_hidden_layers", "rms_norm_eps")},
        layers_block_type=["mamba", "attention", "moe", "mlp", "mamba"],
        head_dim=24, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=48,
        n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="one"), seed=3, threads=1):
        yield


def peer_folder(family: str, folder: Path) -> Any:
    """A model of transformers with moved norms, in BF16 in its folder; the model that reads it again, in FP32."""
    torch.manual_seed(7)
    peer = AutoModelForCausalLM.from_config(FAMILIES[family])
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in peer.named_parameters():
            if tensor.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
                tensor.add_(torch.randn(tensor.shape, generator=random) * 0.2)
            elif name.endswith("dt_bias"):
                tensor.copy_(torch.rand(tensor.shape, generator=random) * 2 - 1)
    peer.to(torch.bfloat16).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def built(folder: Path) -> tuple[ModelConfig, Any]:
    model = model_of_folder(folder)
    model.precision = Precision.fp32
    module = build_model(model, ParallelConfig(name="one"), sequence_length=64)
    load_weights(module, folder, model)
    return model, module


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_and_the_folder_goes_back_byte_for_byte(family: str, tmp_path: Path) -> None:
    peer = peer_folder(family, tmp_path / "theirs")
    model, module = built(tmp_path / "theirs")
    tokens = torch.randint(0, model.vocab_size, (2, 33), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = peer(tokens, use_cache=False).logits
    found = logits_fn(module, model.vocab_size)(tokens)
    assert found.std() > 0.1  # otherwise the tolerance would say nothing
    assert (found - expected).abs().max() < TOLERANCE
    save_bf16(module, tmp_path / "ours", model, None, max_shard_gb=1.0)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor.float()), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens, use_cache=False).logits, expected)
    model.name, model.precision = "ours", Precision.bf16
    assert model_of_folder(tmp_path / "ours") == model


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"model_type": "gpt2"}, ["model_type='gpt2'", "llama, qwen3"]),
        ("llama", {"attention_bias": True}, ["attention_bias=True"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, ["'yarn'", "'llama3'"]),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, ["'factor' is missing"]),
        ("llama", {"hidden_size": None}, ["'hidden_size' is missing"]),
        ("qwen3_moe", {"norm_topk_prob": False}, ["norm_topk_prob=False"]),
    ],
)
def test_what_cannot_be_built_is_named(family: str, changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    peer_folder(family, tmp_path)
    path = tmp_path / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    with pytest.raises(UserError) as error:
        model_of_folder(tmp_path)
    assert all(word in str(error.value) for word in (str(path), *words)), error.value


def test_another_rotary_base_is_refused(tmp_path: Path) -> None:
    """It changes no shape."""
    peer_folder("llama", tmp_path)
    model, module = built(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**hf_config(model), "rope_theta": 1.0, "rope_parameters": {}}))
    with pytest.raises(UserError, match=r"rope_theta=1\.0, but model .* has 5000\.0"):
        load_weights(module, tmp_path, model)


def test_another_rotary_scaling_is_refused_and_each_band_matters(tmp_path: Path) -> None:
    """Of the eight frequencies some stay, some are divided, some lie between; old files have rope_scaling."""
    peer_folder("llama3", tmp_path)
    model, module = built(tmp_path)
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    ratio = module.rotary_pos_emb.inv_freq / plain
    assert ratio[0] == 1 and (ratio == 1 / 8).sum() >= 2 and ((ratio > 1 / 8) & (ratio < 1)).sum() >= 2
    config = hf_config(model)
    old = {name: value for name, value in config.items() if name != "rope_parameters"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert model_of_folder(tmp_path).rotary_scaling == model.rotary_scaling
    old["rope_scaling"]["factor"] = 4.0
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"rope_scaling=.*factor=4\.0.*, but model .*factor=8\.0"):
        load_weights(module, tmp_path, model)
