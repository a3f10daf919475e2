"""One Megatron-Core tensor and the Hugging Face tensors that hold it: how rows differ, and what values are sound."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from nemo_qad.models.vocabulary import padded_vocab_size
from nemo_qad.schema import ModelConfig

Shape = tuple[int, ...]


class Kind(StrEnum):
    """How a tensor's rows differ between the two formats: the same, interleaved q/k/v, gate above up, or padded."""

    plain = "plain"
    qkv = "qkv"
    gated = "gated"
    vocabulary = "vocabulary"


class Content(StrEnum):
    """What values a sound tensor may have.

    weight: not constant. scale: a norm weight, may be constant, not zero. free: any finite value.
    """

    weight = "weight"
    scale = "scale"
    free = "free"


@dataclass(frozen=True)
class Mapping:
    """One Megatron-Core tensor and the Hugging Face tensors that hold it.

    mcore: name in the module's parameters or buffers.
    hf: names on disk; three for the fused query, key and value projection, two for gate and up, otherwise one.
    shapes: shape of each Hugging Face tensor.
    is_linear: a linear layer's weight, which a recipe may quantise.
    """

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    kind: Kind = Kind.plain
    content: Content = Content.weight
    is_linear: bool = False

    @property
    def is_fp32(self) -> bool:
        """The router's expert bias stays FP32 in every checkpoint: its updates are below BF16's resolution."""
        return self.mcore.endswith("expert_bias")


def single(mcore: str, hf: str, shape: Shape, **fields: object) -> Mapping:
    return Mapping(mcore, (hf,), (shape,), **fields)  # type: ignore[arg-type]


def norm(mcore: str, hf: str, size: int) -> Mapping:
    return single(mcore, hf, (size,), content=Content.scale)


def to_hf(mapping: Mapping, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """The Hugging Face tensors that hold `tensor`, in its dtype.

    Rows alone are moved, so packed weights [rows, in / 2] and block scales [rows, in / 16] work too.
    """
    if mapping.kind == Kind.vocabulary:
        return {mapping.hf[0]: tensor[: model.vocab_size]}
    if mapping.kind == Kind.plain:
        return {mapping.hf[0]: tensor}
    if mapping.kind == Kind.gated:
        return dict(zip(mapping.hf, tensor.chunk(2), strict=True))
    sizes = _group_rows(model)
    grouped = tensor.reshape(model.attention.num_query_groups, sum(sizes), *tensor.shape[1:])
    parts = grouped.split(sizes, dim=1)
    return {name: part.flatten(0, 1) for name, part in zip(mapping.hf, parts, strict=True)}


def to_mcore(mapping: Mapping, tensors: MappingOf[str, Tensor], model: ModelConfig) -> Tensor:
    """The inverse of `to_hf`; rows that pad the vocabulary are zero."""
    first = tensors[mapping.hf[0]]
    if mapping.kind == Kind.vocabulary:
        padding = padded_vocab_size(model) - model.vocab_size
        return torch.cat([first, first.new_zeros(padding, *first.shape[1:])]) if padding else first
    if mapping.kind == Kind.plain:
        return first
    if mapping.kind == Kind.gated:
        return torch.cat([tensors[name] for name in mapping.hf])
    groups = model.attention.num_query_groups
    parts = [
        tensors[name].reshape(groups, rows, *first.shape[1:])
        for name, rows in zip(mapping.hf, _group_rows(model), strict=True)
    ]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _group_rows(model: ModelConfig) -> list[int]:
    """Rows of query, key and value in each group of Megatron-Core's fused projection."""
    attention = model.attention
    queries = attention.num_heads // attention.num_query_groups
    return [queries * attention.head_dim, attention.head_dim, attention.head_dim]
