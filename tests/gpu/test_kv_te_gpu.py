"""KV-cache quantizers in Transformer Engine's attention: observed, then at work (needs CUDA, TE and mamba-ssm)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.models import transformer_engine
from nemo_qad.models.build import build_model, forward_logits
from nemo_qad.quantization import fp8, nvfp4
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.schema import AttentionConfig, Format, MambaConfig, ModelConfig, ParallelConfig, Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not transformer_engine.available(), reason="needs a CUDA device, Transformer Engine and mamba-ssm"
    ),
]
ONE = ParallelConfig(name="single")
# Without experts: Transformer Engine holds them as one grouped linear, which our rules do not name.
MODEL = ModelConfig(
    name="small",
    hybrid_pattern="M*-*",
    hidden_size=256,
    vocab_size=500,
    max_position_embeddings=64,
    ffn_hidden_size=256,
    precision=Precision.bf16,
    attention=AttentionConfig(num_heads=4, num_query_groups=2, head_dim=64),
    mamba=MambaConfig(num_heads=8, head_dim=64, num_groups=2, state_dim=64, chunk_size=32),
)
ATTENTION = [f"decoder.layers.{layer}.self_attention.core_attention" for layer in (1, 3)]
KINDS = ("k_bmm_quantizer", "v_bmm_quantizer")


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ONE, seed=1, threads=1):
        yield


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [{"tokens": torch.randint(0, MODEL.vocab_size, (2, 64), generator=generator)} for _ in range(3)]


@pytest.mark.parametrize("name", ["four_over_six", "four_over_six_nvfp4_kv"])
def test_keys_and_values_are_observed_and_then_quantised(name: str) -> None:
    recipe = dataclasses.replace(compose([f"+recipe={name}"]).recipe, dense_mlp=Format.nvfp4)
    module = build_model(MODEL, ONE, sequence_length=64).eval()
    attentions: list[Any] = [module.get_submodule(path) for path in ATTENTION]
    assert all(type(attention).__name__ == "TEDotProductAttention" for attention in attentions)
    largest: dict[tuple[str, int], list[Tensor]] = {}
    for path, attention in zip(ATTENTION, attentions, strict=True):
        attention.register_forward_pre_hook(
            lambda _, args, path=path: [
                largest.setdefault((path, which), []).append(args[1 + which].detach().float().abs().amax())
                for which in (0, 1)
            ]
        )
    quantize(module, recipe, MODEL, batches())
    seen: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for path, attention in zip(ATTENTION, attentions, strict=True):
        assert not attention.q_bmm_quantizer.is_enabled
        for which, kind in enumerate(KINDS):
            quantizer = getattr(attention, kind)
            assert quantizer.is_enabled and len(largest[path, which]) == 3
            assert torch.equal(quantizer.amax.float().view(()), torch.stack(largest[path, which]).max())
            quantizer.register_forward_hook(
                lambda _, args, out, key=(path, which): seen.update({key: (args[0].detach(), out.detach())})
            )
    with torch.no_grad():
        forward_logits(module, batches()[0]["tokens"].cuda())
    assert len(seen) == 4
    for (path, which), (before, after) in seen.items():
        amax = getattr(module.get_submodule(path), KINDS[which]).amax
        if name == "four_over_six":
            expected = fp8.fake_quantize(before, amax)
        else:
            expected = nvfp4.fake_quantize(before, nvfp4.block_amax(before), amax)
        assert not torch.equal(before, after)
        assert torch.equal(after, expected.to(after.dtype))
