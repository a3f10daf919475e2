"""Exports a quantised student in the "unified Hugging Face" layout that vLLM, TensorRT-LLM and SGLang read.

A quantised linear ships its packed weight and scales (`quantization/student.py` lists them), everything
else BF16, the router's bias FP32, and each attention layer `k_proj.k_scale` and `v_proj.v_scale`. An FP8
cache stores value = e4m3 * scale. For an NVFP4 cache the scale is the calibrated global amax / (6 * 448);
the engine makes the block scales of 16 along head_dim when it writes the cache. No scale is raised to 1.

A single format is named by `quant_algo`; two are MIXED_PRECISION with a table of layers. Tensors are made
one at a time, as the writer asks for them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad import agreement
from nemo_qad.errors import UserError, show
from nemo_qad.huggingface.architectures import exported_config
from nemo_qad.huggingface.gathered import Part, gathered, gathered_mappings
from nemo_qad.huggingface.golden import Golden
from nemo_qad.huggingface.golden import write as write_golden
from nemo_qad.huggingface.names import Kind, Mapping, carried, linear_names, mappings, to_hf
from nemo_qad.huggingface.save import carried_tensors, write_folder
from nemo_qad.models.placement import Placement
from nemo_qad.models.shipped import shipped_dtype
from nemo_qad.quantization.coverage import check_scales
from nemo_qad.quantization.nvfp4 import BLOCK_SIZE
from nemo_qad.quantization.recipes import formats
from nemo_qad.quantization.student import EffectiveRows, effective_weight, is_quantised, kv_scales, stored_linear
from nemo_qad.schema import Format, KvFormat, ModelConfig, RecipeConfig

_LAYER_CONFIGS: dict[Format, dict[str, Any]] = {
    Format.nvfp4: {"quant_algo": "W4A16_NVFP4", "group_size": BLOCK_SIZE},
    Format.nvfp4_w4a4: {"quant_algo": "NVFP4", "group_size": BLOCK_SIZE},
    Format.fp8: {"quant_algo": "FP8"},
}
_FP8_GROUP = {"dynamic": False, "num_bits": 8, "type": "float"}
_NVFP4_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
_GROUPS: dict[Format, dict[str, Any]] = {
    Format.nvfp4: {"weights": _NVFP4_GROUP},
    Format.nvfp4_w4a4: {"input_activations": _NVFP4_GROUP, "weights": _NVFP4_GROUP},
    Format.fp8: {"input_activations": _FP8_GROUP, "weights": _FP8_GROUP},
}
_KV_ALGORITHMS = {KvFormat.none: None, KvFormat.fp8: "FP8", KvFormat.nvfp4: "NVFP4"}
_KV_SCHEMES: dict[KvFormat, Any] = {KvFormat.fp8: _FP8_GROUP, KvFormat.nvfp4: "NVFP4"}


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a student was made from, as far as the export keeps what it has.

    folder: where to take the blocks that predict further tokens; only a model with such blocks needs it.
    config: its config.json, whose fields are kept. dtype: of most of its tensors, as config.json will say.
    """

    folder: Path | None = None
    config: dict[str, Any] | None = None
    dtype: str = "bfloat16"


def export_student(
    module: nn.Module,
    folder: Path,
    model: ModelConfig,
    recipe: RecipeConfig,
    tokenizer_folder: Path | None,
    max_shard_gb: float,
    origin: Origin | None = None,
    golden: Golden | None = None,
) -> dict[str, Any]:
    """Writes the checkpoint of a quantised model; `folder` is whole or absent. A collective call of all ranks.

    Args:
        module: the bare, quantised HybridModel, or this rank's part of it.
        max_shard_gb: decimal GB of one safetensors file at most.
        origin: the checkpoint that the student was made from.
        golden: the student's answers to some prompts, written beside it.

    Returns:
        num_tensors, bytes_tensors, bytes_export (all files), the two algorithms, linears in each format.

    Raises:
        UserError: a tensor is missing, a scale is unusable, or recipe and model disagree.
    """
    origin = origin or Origin()
    check_scales(module)
    _check_formats(module, model, recipe)
    quantization = quantization_config(model, recipe)
    counts = Counter(linear.format.value for linear in formats(recipe, model).values())

    def write(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        facts: dict[str, Any] = {"num_tensors": 0, "bytes_tensors": 0}
        write_folder(
            _counted(itertools.chain(tensors, carried_tensors(model, origin.folder)), facts),
            folder,
            config={
                **exported_config(model, origin.config, origin.dtype),
                "quantization_config": _engine_config(quantization, model, recipe),
            },
            extra_json={"hf_quant_config.json": quantization},
            tokenizer_folder=tokenizer_folder,
            max_shard_gb=max_shard_gb,
            also=lambda partial: write_golden(golden, partial, tokenizer_folder) if golden else None,
        )
        return facts

    return {
        **agreement.first_reads(stored_tensors(module, model), write),
        "bytes_export": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "quant_algo": quantization["quantization"]["quant_algo"],
        "kv_cache_quant_algo": quantization["quantization"]["kv_cache_quant_algo"],
        "num_linears": dict(counts),
    }


def stored_tensors(module: nn.Module, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of everything that ships, in the order of the model; on the first rank, whole."""

    def own(mapping: Mapping, local: str, part: Part) -> dict[str, Part]:
        linear = _quantised_linear(module, local)
        if linear is None:
            return {"": _deployed(part)}
        stored = stored_linear(mapping.mcore.removesuffix(".weight"), linear)
        return {key: part.like(value) for key, value in stored.items()}

    for mapping, whole in gathered_mappings(module, model, own):
        for key, value in whole.items():
            parts = to_hf(mapping, value, model) if value.dim() else dict.fromkeys(mapping.hf, value)
            for name, part in parts.items():
                yield name.removesuffix("weight") + key if key else name, part
    yield from _kv_scale_tensors(module, model)


def expected_rows(module: nn.Module, model: ModelConfig) -> Iterator[tuple[str, Tensor | EffectiveRows]]:
    """As `expected_weights`; on one rank most weights are made some rows at a time, as they are looked at."""
    if dist.get_world_size() > 1:
        yield from expected_weights(module, model)
        return
    alike = [m for m in mappings(model) if m.is_linear and m.kind in (Kind.plain, Kind.vocabulary)]
    made = set()
    for mapping in alike:
        linear = _quantised_linear(module, mapping.mcore)
        if linear is not None:
            made.add(mapping.mcore)
            yield mapping.hf[0], EffectiveRows(linear, mapping.shapes[0][0])
    yield from expected_weights(module, model, without=made)


def expected_weights(
    module: nn.Module, model: ModelConfig, without: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, value the student computes with, FP32 or as it ships) of every tensor but the scales.

    On the first rank, whole. What is only carried along is not among them.

    Args:
        without: Megatron-Core names that are left out.
    """

    def own(mapping: Mapping, local: str, part: Part) -> dict[str, Part]:
        if mapping.mcore in without:
            return {}
        linear = _quantised_linear(module, local)
        return {"": _deployed(part) if linear is None else part.like(effective_weight(linear))}

    for mapping, whole in gathered_mappings(module, model, own):
        if whole:
            yield from to_hf(mapping, whole[""], model).items()


def _quantised_linear(module: nn.Module, local: str) -> nn.Module | None:
    """The linear whose quantised weight a tensor is."""
    owner, _, leaf = local.rpartition(".")
    linear = module.get_submodule(owner)
    return linear if leaf == "weight" and is_quantised(linear) else None


def quantization_config(model: ModelConfig, recipe: RecipeConfig) -> dict[str, Any]:
    """hf_quant_config.json: one format by name, several as MIXED_PRECISION with a table of layers."""
    table = formats(recipe, model)
    layers = {
        hf: dict(_LAYER_CONFIGS[table[name].format])
        for name, hf_names in linear_names(model).items()
        for hf in hf_names
        if table[name].format != Format.bf16
    }
    used = {linear.format for linear in table.values()} - {Format.bf16}
    kv_cache = KvFormat(recipe.kv_cache) if "*" in model.hybrid_pattern else KvFormat.none
    if len(used) > 1:
        quantization: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    else:
        quantization = dict(_LAYER_CONFIGS[used.pop()]) if used else {"quant_algo": None}
    quantization["kv_cache_quant_algo"] = _KV_ALGORITHMS[kv_cache]
    quantization["exclude_modules"] = _excluded(model, layers)
    return {
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
        "quantization": quantization,
    }


def _engine_config(quantization: dict[str, Any], model: ModelConfig, recipe: RecipeConfig) -> dict[str, Any]:
    """`quantization_config` of config.json: the same facts as `config_groups`."""
    details = quantization["quantization"]
    table = formats(recipe, model)
    used = sorted({linear.format for linear in table.values()} - {Format.bf16}, key=list(Format).index)
    groups = {}
    for index, chosen in enumerate(used):
        names = [
            hf for name, hfs in linear_names(model).items() if table[name].format == chosen for hf in hfs
        ]
        groups[f"group_{index}"] = {
            **_GROUPS[chosen],
            "targets": sorted(names) if len(used) > 1 else ["Linear"],
        }
    config: dict[str, Any] = {
        "config_groups": groups,
        "ignore": details["exclude_modules"],
        "quant_algo": details["quant_algo"],
        "producer": quantization["producer"],
        "quant_method": "modelopt",
    }
    if "quantized_layers" in details:
        config["quantized_layers"] = details["quantized_layers"]
    if details["kv_cache_quant_algo"]:
        config["kv_cache_scheme"] = _KV_SCHEMES[KvFormat(recipe.kv_cache)]
    return config


def _excluded(model: ModelConfig, layers: dict[str, Any]) -> list[str]:
    """Modules with a matrix that stay as they were: embedding, unquantised linears, routers, convolutions, MTP."""
    kinds = ("embeddings.weight", "embed_tokens.weight", "mixer.gate.weight", "mlp.gate.weight", "mixer.conv1d.weight")
    others = [
        name.removesuffix(".weight")
        for mapping in [*mappings(model), *carried(model)]
        for name in mapping.hf
        if name.endswith(kinds) or (not mapping.mcore and mapping.is_linear)
    ]
    linears = [hf for names in linear_names(model).values() for hf in names if hf not in layers]
    return sorted({*linears, *others}) + (["mtp*"] if model.mtp_num_layers else [])


def _deployed(part: Part) -> Part:
    """What is not quantised, as it ships: in the dtype of the checkpoint it came from."""
    return part._replace(tensor=part.tensor.to(shipped_dtype(part.tensor)))


def _kv_scale_tensors(module: nn.Module, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    attentions = {
        name.removesuffix("linear_qkv") + "core_attention": hf_names
        for name, hf_names in linear_names(model).items()
        if name.endswith("self_attention.linear_qkv")
    }

    def own(name: str, local: str) -> dict[str, Part]:
        scales = kv_scales(module.get_submodule(local))
        return {which: Part(scale, None) for which, scale in zip("kv", scales or (), strict=False)}

    held = {whole: local for whole, local in _local_modules(module).items() if whole in attentions}
    for name, found in gathered(module, list(attentions), held, own):
        for which, scale in found.items():
            owner = next(hf for hf in attentions[name] if hf.endswith(f"{which}_proj"))
            yield f"{owner}.{which}_scale", scale


def _local_modules(module: nn.Module) -> dict[str, str]:
    """Name in the whole model -> name in this rank's part."""
    placement = Placement(module)
    return {placement.global_name(name): name for name, _ in module.named_modules()}


def _check_formats(module: nn.Module, model: ModelConfig, recipe: RecipeConfig) -> None:
    """The configuration is written from the recipe, the tensors from the model: they must agree."""
    local = _local_modules(module)
    wrong = [
        name
        for name, linear in formats(recipe, model).items()
        if name in local and is_quantised(module.get_submodule(local[name])) != (linear.format != Format.bf16)
    ]
    if wrong:
        raise UserError(f"recipe.name={recipe.name} and the model disagree about {show(wrong)}")


def _counted(tensors: Iterator[tuple[str, Tensor]], facts: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        facts["num_tensors"] += 1
        facts["bytes_tensors"] += tensor.numel() * tensor.element_size()
        yield name, tensor
