"""Names and shapes of a model's tensors: one table an architecture, read by loading, saving and export alike.

Megatron-Core names are those of the torch spec at tensor, pipeline and expert parallel size 1. Hugging Face names are
those on disk, which transformers, vLLM, TensorRT-LLM and SGLang read. The multi-token-prediction blocks (`mtp.*`) have
a table of their own: they are carried from the BF16 checkpoint to the export and never computed with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_qad.choices import Architecture
from nemo_qad.huggingface import nemotron_h, transformer
from nemo_qad.huggingface.mapping import Content, Kind, Mapping, Shape, norm, single, to_hf, to_mcore
from nemo_qad.models.placement import Pieces, Placement, is_expert, pieces
from nemo_qad.schema import ModelConfig

__all__ = [
    "Content", "Kind", "Mapping", "carried", "held_names", "held_tensors", "linear_names", "mappings", "num_parameters",
    "shapes", "tensor_cut", "to_hf", "to_mcore",
]  # fmt: skip


def mappings(model: ModelConfig) -> list[Mapping]:
    """Every tensor of the model, parameters and the router's bias, in the order of the layers."""
    family = nemotron_h if model.architecture is Architecture.nemotron_h else transformer
    vocabulary = (model.vocab_size, model.hidden_size)
    table = [single("embedding.word_embeddings.weight", family.EMBEDDING, vocabulary, kind=Kind.vocabulary)]
    table += family.layer_mappings(model)
    table.append(norm("decoder.final_norm.weight", family.FINAL_NORM, model.hidden_size))
    if not model.tied_output:
        table.append(single("output_layer.weight", family.OUTPUT, vocabulary, kind=Kind.vocabulary, is_linear=True))
    return table


def shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every Hugging Face tensor of the model and its shape, without allocating any of them."""
    return {name: shape for m in mappings(model) for name, shape in zip(m.hf, m.shapes, strict=True)}


def carried(model: ModelConfig) -> list[Mapping]:
    """Tensors of a checkpoint that no module here holds: the blocks that predict further tokens. `mcore` is empty."""
    return nemotron_h.prediction_mappings(model) if model.architecture is Architecture.nemotron_h else []


def num_parameters(model: ModelConfig) -> int:
    """Elements of all tensors in `shapes`; a tied output layer counts once."""
    return sum(math.prod(shape) for shape in shapes(model).values())


def linear_names(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Every linear layer a recipe may quantise: Megatron-Core module name -> Hugging Face module names."""
    return {
        m.mcore.removesuffix(".weight"): tuple(name.removesuffix(".weight") for name in m.hf)
        for m in mappings(model)
        if m.is_linear
    }


def held_tensors(
    module: torch.nn.Module, table: list[Mapping]
) -> Iterator[tuple[Mapping, Tensor, Pieces | None]]:
    """The mappings of which this rank holds a part: with the local tensor, and how it is cut over tensor ranks.

    Raises:
        KeyError: the module is whole, and a mapping's tensor is not in it.
    """
    groups, tensors = module.pg_collection, _tensors(module)
    held = held_names(module, table)
    is_whole = groups.pp.size() == 1 and groups.ep.size() == 1  # type: ignore[union-attr, operator]
    for mapping in table:
        if mapping.mcore in held:
            tensor = tensors[held[mapping.mcore]]
            yield mapping, tensor, tensor_cut(module, held[mapping.mcore], tensor)
        elif is_whole:
            raise KeyError(mapping.mcore)


def held_names(module: torch.nn.Module, table: list[Mapping]) -> dict[str, str]:
    """Megatron-Core name in the whole model -> in this rank's part, of the mappings that it has a part of."""
    placement = Placement(module)
    own = {placement.global_name(name): name for name in _tensors(module)}
    names = {m.mcore: m.mcore if m.mcore in own else _fused_name(m.mcore) for m in table}
    return {mcore: own[name] for mcore, name in names.items() if name in own}


def tensor_cut(module: torch.nn.Module, local: str, tensor: Tensor) -> Pieces | None:
    """How a rank's tensor is cut over the tensor-parallel ranks of its kind."""
    groups = module.pg_collection
    return pieces(tensor, groups.expt_tp if is_expert(local) else groups.tp)  # type: ignore[union-attr, arg-type]


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _fused_name(mcore: str) -> str:
    """The name under Transformer Engine's spec, which keeps norms in linears and groups the experts."""
    layer, _, rest = mcore.rpartition(".layers.")
    index, _, inner = rest.partition(".")
    if inner.startswith("mlp.experts.local_experts."):
        expert, linear, _ = inner.removeprefix("mlp.experts.local_experts.").split(".")
        inner = f"mlp.experts.{linear}.weight{expert}"
    norms = {
        "norm.weight": "mixer.in_proj.layer_norm_weight",
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    return f"{layer}.layers.{index}.{norms.get(inner, inner)}"
