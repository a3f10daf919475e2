"""A finished folder looked at without the model that made it: layout, scales, sizes, its source, its engines.

Like `nemo_qad.huggingface.verify`, it shares no code with the writer. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemo_qad.huggingface.engines import Weight, cut_problems, engine_problems
from nemo_qad.huggingface.stored import Entry, is_scale, read_entries
from nemo_qad.huggingface.verify import EMBEDDINGS, layout

MOST_BITS = {"U8": 4.6, "F8_E4M3": 8.1}  # a quantised weight may take, its scales counted
FORMATS = {"U8": "NVFP4", "F8_E4M3": "FP8"}


@dataclass
class Inspection:
    """`problems` make the folder unfit, `remarks` do not. Bytes count tensors; bits a weight count its scales."""

    folder: Path
    num_tensors: int
    num_bytes: int
    linears: dict[str, int]
    bits: dict[str, float]
    num_kv_scales: int
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def inspect_folder(
    folder: Path, *, source: Path | None = None, engine: str | None = None, tensor_parallel: int = 1
) -> Inspection:
    """Looks at an exported checkpoint.

    Args:
        source: the BF16 checkpoint that it was made from, whose names, shapes and dtypes it must keep.
        engine: one of `engines.ENGINES`; its rules are checked too.
        tensor_parallel: ranks over which the engine will cut the linears.

    Raises:
        UserError: the files cannot be read at all.
    """
    entries, plan, problems = layout(folder)
    weights = {name: _weight(entry) for name, entry in entries.items() if _is_quantised(name, entry)}
    found = Inspection(
        folder=folder,
        num_tensors=len(entries),
        num_bytes=sum(_bytes(entry) for entry in entries.values()),
        linears={FORMATS[d]: sum(entries[n].dtype == d for n in weights) for d in FORMATS},
        bits={},
        num_kv_scales=sum(name.endswith((".k_scale", ".v_scale")) for name in entries),
        problems=problems,
    )
    _count_bits(found, entries, weights)
    if source is not None:
        found.problems += _source_problems(entries, source)
    if engine is not None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found.problems += [f"{engine}: {problem}" for problem in engine_problems(engine, config, plan)]
    if tensor_parallel > 1:
        modules = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
        broken, odd = cut_problems(modules, tensor_parallel)
        found.problems += broken
        found.remarks += odd
    return found


def _is_quantised(name: str, entry: Entry) -> bool:
    return name.endswith(".weight") and entry.dtype in FORMATS


def _weight(entry: Entry) -> Weight:
    packed = entry.dtype == "U8"
    return Weight(entry.shape[0], entry.shape[1] * (2 if packed else 1), packed)


def _bytes(entry: Entry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64)) * entry.itemsize


def _count_bits(found: Inspection, entries: dict[str, Entry], weights: dict[str, Weight]) -> None:
    for dtype, name in FORMATS.items():
        chosen = [n.removesuffix("weight") for n in weights if entries[n].dtype == dtype]
        if not chosen:
            continue
        suffixes = ("weight", "weight_scale", "weight_scale_2")
        num_bytes = sum(_bytes(entries[n + s]) for n in chosen for s in suffixes if n + s in entries)
        values = sum(weights[n + "weight"].rows * weights[n + "weight"].columns for n in chosen)
        found.bits[name] = 8 * num_bytes / values
        if found.bits[name] > MOST_BITS[dtype] and values > 1 << 16:  # scales of a toy weigh more
            found.problems.append(f"{name} weights take {found.bits[name]:.2f} bits each, more than {MOST_BITS[dtype]}")


def _source_problems(entries: dict[str, Entry], folder: Path) -> list[str]:
    """Names, shapes and dtypes against the BF16 checkpoint.

    There an output layer may be the embedding; here it then has no copy, or became one of its own.
    """
    source = read_entries(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("tie_word_embeddings"):
        shared = next((source[name] for name in EMBEDDINGS if name in source), None)
        source.pop("lm_head.weight", None)
        if shared is not None and "lm_head.weight" in entries:
            source["lm_head.weight"] = shared
    problems = [f"{name}: in the source and not here" for name in source if name not in entries]
    for name, entry in entries.items():
        if is_scale(name):
            continue
        if name not in source:
            problems.append(f"{name}: not in the source")
            continue
        shape = (*entry.shape[:-1], entry.shape[-1] * 2) if entry.dtype == "U8" else entry.shape
        if shape != source[name].shape:
            problems.append(f"{name}: shape {list(shape)}, the source has {list(source[name].shape)}")
        elif entry.dtype not in FORMATS and entry.dtype != source[name].dtype:
            problems.append(f"{name}: {entry.dtype}, the source has {source[name].dtype}")
    return problems
