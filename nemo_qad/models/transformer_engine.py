"""The spec for GPUs with Transformer Engine: Megatron-Core's own hybrid stack, its kernels and its scan."""

from __future__ import annotations

import copy
import importlib.util

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_qad.schema import ModelConfig


def available() -> bool:
    """Whether CUDA, Transformer Engine and mamba-ssm are all there."""
    packages = ("transformer_engine", "mamba_ssm")
    return torch.cuda.is_available() and all(importlib.util.find_spec(name) for name in packages)


def transformer_engine_spec(model: ModelConfig) -> ModuleSpec:
    """Megatron-Core's hybrid spec with the convolution width and chunk size of `model`."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    spec = copy.deepcopy(hybrid_stack_spec)
    spec.submodules.mamba_layer.submodules.mixer.params = {
        "d_conv": model.mamba.conv_kernel,
        "chunk_size": model.mamba.chunk_size,
    }
    return spec
