"""transformers' own NemotronHForCausalLM reads our folder and computes what our model computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from nemo_qad import runtime
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.names import num_parameters
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, ParallelConfig, Precision

TOLERANCE = 2e-5  # absolute, FP32 logits of size about 1


def model_config(pattern: str, vocab_size: int = 250) -> ModelConfig:
    """Every kind of layer; a vocabulary that needs padding; groups that heads share."""
    return ModelConfig(
        name="peer",
        hybrid_pattern=pattern,
        hidden_size=64,
        vocab_size=vocab_size,
        max_position_embeddings=128,
        ffn_hidden_size=96,
        precision=Precision.fp32,
        init_std=0.1,
        attention=AttentionConfig(num_heads=4, num_query_groups=2, head_dim=24),
        mamba=MambaConfig(num_heads=8, head_dim=16, num_groups=2, state_dim=16, chunk_size=16),
        moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=32, shared_expert_ffn_hidden_size=48),
    )


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="one"), seed=3, threads=1):
        yield


@pytest.mark.parametrize(("pattern", "length"), [("ME*-ME", 33), ("M-", 16), ("E*E", 20)])
def test_logits_equal_those_of_transformers(pattern: str, length: int, tmp_path: Path) -> None:
    from nemo_qad.models.build import build_model, logits_fn

    model = model_config(pattern)
    ours = build_model(model, ParallelConfig(name="one"), sequence_length=length)
    disturb(ours)
    save_bf16(ours, tmp_path / "hf", model, None, max_shard_gb=1e-4)
    load_weights(ours, tmp_path / "hf", model)  # what BF16 kept of the weights
    peer, report = NemotronHForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert sum(t.numel() for t in peer.state_dict().values()) == num_parameters(model)
    tokens = torch.randint(0, model.vocab_size, (2, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = peer.eval()(tokens, use_cache=False).logits
    found = logits_fn(ours, model.vocab_size)(tokens)
    assert found.shape == (2, length, model.vocab_size)
    assert found.std() > 0.1  # otherwise the tolerance would say nothing
    assert (found - theirs).abs().max() < TOLERANCE


def disturb(module: torch.nn.Module) -> None:
    """Move norms, biases and the expert bias off their constant initial values, so that a swapped one shows.

    dt_bias stays above transformers' clamp: it raises time steps to at least 0.001, Megatron-Core does not.
    """
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("dt_bias"):
                tensor.copy_(torch.rand(tensor.shape, generator=random) * 2 - 1)
            elif tensor.dim() == 1 and "tokens_per_expert" not in name:
                tensor.add_(torch.randn(tensor.shape, generator=random) * 0.2)
