"""Names and shapes of Nemotron-H's tensors: one table, read by loading, saving and export alike.

Megatron-Core names are those of the torch spec at tensor, pipeline and expert parallel size 1. Hugging Face
names are those on disk (`backbone.*`), which transformers, vLLM, TensorRT-LLM and SGLang read.
The multi-token-prediction blocks (`mtp.*`) are not part of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from nemo_qad.models.placement import Pieces, Placement, is_expert, pieces
from nemo_qad.models.vocabulary import padded_vocab_size
from nemo_qad.schema import ModelConfig

Shape = tuple[int, ...]


class Kind(StrEnum):
    """How a tensor's rows differ between the two formats: the same, interleaved q/k/v, or padded vocabulary."""

    plain = "plain"
    qkv = "qkv"
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
    hf: names on disk; three for the fused query, key and value projection, otherwise one.
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


def mappings(model: ModelConfig) -> list[Mapping]:
    """Every tensor of the model, parameters and the router's bias, in the order of the layers."""
    vocabulary = (model.vocab_size, model.hidden_size)
    table = [
        _single("embedding.word_embeddings.weight", "backbone.embeddings.weight", vocabulary, kind=Kind.vocabulary)
    ]
    for index, layer_type in enumerate(model.hybrid_pattern):
        table += _LAYERS[layer_type](model, f"decoder.layers.{index}", f"backbone.layers.{index}")
    table.append(_norm("decoder.final_norm.weight", "backbone.norm_f.weight", model.hidden_size))
    if not model.tied_output:
        table.append(_single("output_layer.weight", "lm_head.weight", vocabulary, kind=Kind.vocabulary, is_linear=True))
    return table


def _single(mcore: str, hf: str, shape: Shape, **fields: object) -> Mapping:
    return Mapping(mcore, (hf,), (shape,), **fields)  # type: ignore[arg-type]


def _norm(mcore: str, hf: str, size: int) -> Mapping:
    return _single(mcore, hf, (size,), content=Content.scale)


def _mlp(mcore: str, hf: str, hidden: int, width: int) -> list[Mapping]:
    return [
        _single(f"{mcore}.linear_fc1.weight", f"{hf}.up_proj.weight", (width, hidden), is_linear=True),
        _single(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, width), is_linear=True),
    ]


def _mamba(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    mamba, hidden = model.mamba, model.hidden_size
    inner = mamba.num_heads * mamba.head_dim
    convolved = inner + 2 * mamba.num_groups * mamba.state_dim
    m, h = f"{mcore}.mixer", f"{hf}.mixer"
    heads = (mamba.num_heads,)
    return [
        _norm(f"{mcore}.norm.weight", f"{hf}.norm.weight", hidden),
        _single(f"{m}.in_proj.weight", f"{h}.in_proj.weight", (inner + convolved + heads[0], hidden), is_linear=True),
        _single(f"{m}.conv1d_weight", f"{h}.conv1d.weight", (convolved, 1, mamba.conv_kernel)),
        _single(f"{m}.conv1d_bias", f"{h}.conv1d.bias", (convolved,), content=Content.free),
        _single(f"{m}.dt_bias", f"{h}.dt_bias", heads, content=Content.free),
        _single(f"{m}.A_log", f"{h}.A_log", heads, content=Content.free),
        _single(f"{m}.D", f"{h}.D", heads, content=Content.free),
        _norm(f"{m}.norm.weight", f"{h}.norm.weight", inner),
        _single(f"{m}.out_proj.weight", f"{h}.out_proj.weight", (hidden, inner), is_linear=True),
    ]


def _attention(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    attention, hidden = model.attention, model.hidden_size
    query, key = (n * attention.head_dim for n in (attention.num_heads, attention.num_query_groups))
    return [
        _norm(f"{mcore}.input_layernorm.weight", f"{hf}.norm.weight", hidden),
        Mapping(
            f"{mcore}.self_attention.linear_qkv.weight",
            tuple(f"{hf}.mixer.{part}_proj.weight" for part in "qkv"),
            ((query, hidden), (key, hidden), (key, hidden)),
            kind=Kind.qkv,
            is_linear=True,
        ),
        _single(
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
        _norm(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.norm.weight", hidden),
        _single(f"{m}.router.weight", f"{h}.gate.weight", (*experts, hidden)),
        _single(f"{m}.router.expert_bias", f"{h}.gate.e_score_correction_bias", experts, content=Content.free),
    ]
    for expert in range(moe.num_experts):
        table += _mlp(f"{m}.experts.local_experts.{expert}", f"{h}.experts.{expert}", hidden, moe.ffn_hidden_size)
    shared = moe.shared_expert_ffn_hidden_size
    return table + _mlp(f"{m}.shared_experts", f"{h}.shared_experts", hidden, shared)


def _dense_mlp(model: ModelConfig, mcore: str, hf: str) -> list[Mapping]:
    norm = _norm(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.norm.weight", model.hidden_size)
    return [norm, *_mlp(f"{mcore}.mlp", f"{hf}.mixer", model.hidden_size, model.ffn_hidden_size)]


_LAYERS = {"M": _mamba, "*": _attention, "E": _moe, "-": _dense_mlp}


def shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every Hugging Face tensor of the model and its shape, without allocating any of them."""
    return {name: shape for m in mappings(model) for name, shape in zip(m.hf, m.shapes, strict=True)}


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


def to_hf(mapping: Mapping, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """The Hugging Face tensors that hold `tensor`, in its dtype.

    Rows alone are moved, so packed weights [rows, in / 2] and block scales [rows, in / 16] work too.
    """
    if mapping.kind == Kind.vocabulary:
        return {mapping.hf[0]: tensor[: model.vocab_size]}
    if mapping.kind == Kind.plain:
        return {mapping.hf[0]: tensor}
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
