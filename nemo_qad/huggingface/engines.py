"""What serving engines ask of a quantised folder, and how their tensor parallelism would cut it. No torch.

Rules are those of vLLM's ModelOpt loader and of TensorRT-LLM's, as read in their sources in 2026; SGLang reads the same
files, and only what all engines share is checked for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

BLOCK = 16  # values that share an NVFP4 block scale
TILE = 64  # input columns that kernels take at a time
ENGINES = ("vllm", "tensorrt_llm", "sglang")
ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
LAYER_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")  # in a mixed table; another name silently stays unquantised
KV_ALGORITHMS = (None, "FP8", "NVFP4")
CUT_INPUTS = ("o_proj", "down_proj", "out_proj")  # linears whose inputs tensor parallelism divides


class Weight(NamedTuple):
    """A quantised weight as it was before packing: rows, columns, and whether its columns share block scales."""

    rows: int
    columns: int
    has_blocks: bool


def engine_problems(engine: str, config: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[str]:
    """What would make an engine refuse the folder, or read it wrongly.

    Args:
        config: config.json. plan: `quantization` of hf_quant_config.json.
    """
    own = config.get("quantization_config") or {}
    if own.get("quant_method") != "modelopt":
        yield f"config.json quantization_config.quant_method is {own.get('quant_method')!r}, not 'modelopt'"
    algorithm = plan.get("quant_algo")
    if algorithm is not None and algorithm not in ALGORITHMS:
        yield f"quant_algo {algorithm!r} is none of {', '.join(ALGORITHMS)}"
    if plan.get("kv_cache_quant_algo") not in KV_ALGORITHMS:
        yield f"kv_cache_quant_algo {plan['kv_cache_quant_algo']!r} is none of FP8, NVFP4"
    for name, layer in (plan.get("quantized_layers") or {}).items():
        if layer.get("quant_algo") not in LAYER_ALGORITHMS:
            yield f"quantized_layers {name}: {layer.get('quant_algo')!r} would silently stay unquantised"
    if algorithm == "MIXED_PRECISION" and not plan.get("quantized_layers"):
        yield "MIXED_PRECISION without quantized_layers"
    if engine == "vllm" and algorithm in ("NVFP4", "W4A16_NVFP4"):
        for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
            if key not in plan:
                yield f"hf_quant_config.json lacks {key}, which vLLM asks of a single format"
    if not config.get("architectures"):
        yield "config.json names no architectures: the engine would not know the model"


def cut_problems(weights: Mapping[str, Weight], ranks: int) -> tuple[list[str], list[str]]:
    """(what cannot be cut over `ranks` tensor-parallel ranks, what can and leaves odd tiles).

    Linears that take what other ranks' heads or channels made are cut by columns, all others by rows. Experts, too,
    unless the engine gives each rank whole ones. Linears of all layers and experts that are alike are one line.
    """
    broken: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for name, weight in weights.items():
        by_columns = name.rpartition(".")[2] in CUT_INPUTS
        size = weight.columns if by_columns else weight.rows
        alike = re.sub(r"\b\d+\b", "*", name)
        what = f"{alike}: {size} {'columns' if by_columns else 'rows'} over {ranks} ranks"
        if size % ranks:
            broken[f"{what} do not divide"] += 1
        elif by_columns and weight.has_blocks and size // ranks % BLOCK:
            broken[f"{what} are {size // ranks} each, which cuts a block of {BLOCK}"] += 1
        elif by_columns and weight.has_blocks and size // ranks % TILE:
            odd[f"{what} are {size // ranks} each, no multiple of {TILE}, which some kernels refuse"] += 1
    lines = [[f"{line} ({count} linears)" for line, count in found.items()] for found in (broken, odd)]
    return lines[0], lines[1]
