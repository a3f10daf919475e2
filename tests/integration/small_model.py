"""A small Nemotron-H hybrid, the shipped recipes and calibration batches for the tests of this folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.models.build import build_model
from nemo_qad.schema import (
    AttentionConfig,
    MambaConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    Precision,
    RecipeConfig,
)

SEQUENCE_LENGTH = 32


def small_model(**changes: Any) -> ModelConfig:
    """ME*M-: every kind of layer; a vocabulary that needs padding."""
    fields: dict[str, Any] = {
        "name": "small",
        "hybrid_pattern": "ME*M-",
        "hidden_size": 64,
        "vocab_size": 250,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 96,
        "precision": Precision.fp32,
        "attention": AttentionConfig(num_heads=4, num_query_groups=2, head_dim=16),
        "mamba": MambaConfig(num_heads=4, head_dim=16, num_groups=2, state_dim=16, chunk_size=16),
        "moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=48, shared_expert_ffn_hidden_size=64),
    }
    return ModelConfig(**{**fields, **changes})


def load_recipe(name: str, **changes: Any) -> RecipeConfig:
    """A shipped recipe as the configuration makes it, with changes."""
    return dataclasses.replace(compose([f"+recipe={name}"]).recipe, **changes)


def build(model: ModelConfig, seed: int = 0) -> nn.Module:
    """A model with the same random weights at each call. Needs `runtime.process_groups`."""
    runtime.set_seeds(seed)
    module = build_model(model, ParallelConfig(name="single"), sequence_length=SEQUENCE_LENGTH).eval()
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.add_(noise.to(parameter.dtype))
    return module


def batches(model: ModelConfig, count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    shape = (2, SEQUENCE_LENGTH)
    return [{"tokens": torch.randint(0, model.vocab_size, shape, generator=generator)} for _ in range(count)]
