"""Reads an exported folder back and compares it with the trained weights, bit for bit.

Shares no code with the exporter or the training numerics: it reads through `stored`. It follows what a serving engine
reads, so a folder that passes holds the model that was trained:

    NVFP4  weight U8 [O, I/2] (even column in the low nibble), weight_scale F8_E4M3 [O, I/16],
           weight_scale_2 F32 []:  value = e2m1 * (weight_scale * weight_scale_2); W4A4: input_scale F32 []
    FP8    weight F8_E4M3 [O, I], weight_scale F32 [], input_scale F32 []:  value = e4m3 * weight_scale
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from nemo_qad.errors import UserError
from nemo_qad.huggingface.stored import E4M3_NAN, Entry, decode, is_scale, read_entries

Tensor = Any  # torch's: this module itself reads without torch

PREDICTION = "mtp."
EMBEDDINGS = ("backbone.embeddings.weight", "model.embed_tokens.weight")
NUM_VALUES_AT_ONCE = 2**20  # 4 MiB of FP32
MOST_PENDING = 4  # tensors that are compared at a time
_SCALES = {
    "W4A16_NVFP4": {"weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
    "NVFP4": {"weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"},
    "FP8": {"weight_scale": "F32", "input_scale": "F32"},
}
_ALGORITHMS = {"U8": ("W4A16_NVFP4", "NVFP4"), "F8_E4M3": ("FP8",)}  # by the dtype of the weight


def verify_folder(folder: Path, expected: Iterable[tuple[str, Tensor]], threads: int = 1) -> dict[str, Any]:
    """Checks an exported checkpoint.

    Args:
        folder: what `export_student` wrote.
        expected: (Hugging Face weight name, value that the student computes with), FP32 or as it ships; every
            tensor of the model but the scales. A tensor has `shape`, `numel()` and slices of rows.
        threads: that compare at a time; each makes its rows of `expected` too.

    Returns:
        counts: tensors, bytes, quantised linears by format, values compared.

    Raises:
        UserError: naming the first tensors that differ, lack a scale, or hold a scale that is not finite
            and positive; or a linear that is both quantised and excluded, or neither.
    """
    entries, _, problems = layout(folder)
    _stop(folder, problems)
    compared, names, pending = 0, set(), deque[tuple[str, Callable[[], str | None]]]()
    with ThreadPoolExecutor(threads, "verify") as pool:
        for name, tensor in expected:
            names.add(name)
            pending.append((name, _difference(entries, name, tensor, pool)))
            problems += _finished(pending, MOST_PENDING)
            compared += tensor.numel()
        problems += _finished(pending, 0)
    problems += [
        f"{name}: not a tensor of the model" for name in entries if not is_scale(name) and name not in names
    ]
    _stop(folder, problems)
    formats = [entry.dtype for name, entry in entries.items() if name.endswith(".weight")]
    return {
        "num_tensors": len(entries),
        "num_bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "num_nvfp4_linears": formats.count("U8"),
        "num_fp8_linears": formats.count("F8_E4M3"),
        "num_values_compared": compared,
    }


def layout(folder: Path) -> tuple[dict[str, Entry], dict[str, Any], list[str]]:
    """The tensors, `quantization` of hf_quant_config.json, and what is wrong with both as they stand.

    Raises:
        UserError: a file that is missing, damaged, or contradicts another.
    """
    entries, plan = read_entries(folder), _quantisation(folder)
    return entries, plan, [
        *_layout_problems(entries, plan),
        *_scale_problems(entries),
        *_kv_problems(entries, plan),
    ]


def _quantisation(folder: Path) -> dict[str, Any]:
    """`quantization` of hf_quant_config.json, after checking that config.json says the same."""
    try:
        plan = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
        other = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder}: config.json or hf_quant_config.json is missing or damaged ({error!r})"
        ) from None
    for key, other_key in (("quant_algo",) * 2, ("quantized_layers",) * 2, ("exclude_modules", "ignore")):
        if plan.get(key) != other.get(other_key):
            raise UserError(f"{folder}: hf_quant_config.json {key} and config.json {other_key} differ")
    return dict(plan)


def _layout_problems(entries: dict[str, Entry], plan: dict[str, Any]) -> Iterator[str]:
    """Each linear is quantised as the configuration says, or excluded: never both, never neither."""
    for name, entry in entries.items():
        if not name.endswith(".weight") or len(entry.shape) < 2 or name in EMBEDDINGS:
            continue
        module = name.removesuffix(".weight")
        excluded = any(fnmatchcase(module, glob) for glob in plan["exclude_modules"])
        if "quantized_layers" in plan:
            said = plan["quantized_layers"].get(module, {}).get("quant_algo")
        else:
            said = None if excluded else plan["quant_algo"]
        fitting = _ALGORITHMS.get(entry.dtype, (None,))
        if said not in fitting:
            yield f"{name}: stored as {fitting[0] or entry.dtype}, the configuration says {said or 'unquantised'}"
        if excluded == (fitting[0] is not None):
            yield f"{name}: {'quantised and excluded' if excluded else 'neither quantised nor excluded'}"
        algorithm = said if said in fitting else fitting[0]
        yield from _companion_problems(entries, module, entry, _SCALES.get(str(algorithm), {}))


def _companion_problems(
    entries: dict[str, Entry], module: str, weight: Entry, scales: dict[str, str]
) -> Iterator[str]:
    """A weight has the scales of its format, of the right dtype and shape, and no others."""
    for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
        found, dtype = entries.get(f"{module}.{suffix}"), scales.get(suffix)
        if dtype is None:
            if found:
                yield f"{module}.{suffix}: a scale without use"
            continue
        shape = _scale_shape(weight, dtype)
        if found is None:
            yield f"{module}.{suffix}: missing"
        elif (found.dtype, found.shape) != (dtype, shape):
            yield f"{module}.{suffix}: {found.dtype} {found.shape}, not {dtype} {shape}"


def _scale_shape(weight: Entry, dtype: str) -> tuple[int, ...]:
    """Block scales: a byte of eight packed columns' width; anything else is a scalar."""
    return (*weight.shape[:-1], weight.shape[-1] // 8) if dtype == "F8_E4M3" else ()


def _scale_problems(entries: dict[str, Entry]) -> Iterator[str]:
    for name, entry in entries.items():
        if is_scale(name):
            values = entry.array()
            if entry.dtype == "F8_E4M3":
                good = bool(((values > 0) & (values < E4M3_NAN)).all())  # positive codes, NaN (0x7F) excluded
            else:
                good = bool((np.isfinite(values) & (values > 0)).all())
            if not good:
                yield f"{name}: a scale that is zero, negative, NaN or infinite"
        elif entry.dtype == "F8_E4M3" and bool(((entry.array() & 0x7F) == E4M3_NAN).any()):
            yield f"{name}: holds NaN bytes"


def _kv_problems(entries: dict[str, Entry], plan: dict[str, Any]) -> Iterator[str]:
    """Every attention layer has both scales where the cache is quantised, and none where it is not.

    Blocks that predict further tokens are carried as they were, and have none.
    """
    wanted = plan.get("kv_cache_quant_algo") is not None
    for name in entries:
        if name.startswith(PREDICTION):
            continue
        for which in "kv":
            if name.endswith(f".{which}_proj.weight"):
                scale = name.removesuffix("weight") + f"{which}_scale"
                if wanted != (scale in entries):
                    yield f"{scale}: {'missing' if wanted else 'there, though the KV cache is not quantised'}"


def _finished(pending: deque[tuple[str, Callable[[], str | None]]], most: int) -> Iterator[str]:
    """Waits until at most so many comparisons are pending, and says what the others found."""
    while len(pending) > most:
        name, found = pending.popleft()
        wrong = found()
        if wrong:
            yield f"{name}: {wrong}"


def _difference(entries: dict[str, Entry], name: str, tensor: Tensor, pool: Executor) -> Callable[[], str | None]:
    """Begins to compare a tensor; calling what it returns says how the stored one differs, or None."""
    entry = entries.get(name)
    if entry is None:
        return lambda: "missing"
    shape = (*entry.shape[:-1], entry.shape[-1] * 2) if entry.dtype == "U8" else entry.shape
    if shape != tuple(tensor.shape):
        return lambda: f"shape {shape}, not {tuple(tensor.shape)}"
    if not shape:
        same = float(entry.array()) == float(tensor)
        return lambda: None if same else "1 of 1 values differ from what was trained"
    at_once = max(NUM_VALUES_AT_ONCE * shape[0] // max(tensor.numel(), 1), 1)

    def count(first: int) -> int:
        wanted = tensor[first : min(first + at_once, shape[0])].detach().float().cpu().contiguous().numpy()
        got = decode(entries, name, first, first + len(wanted))
        return int(np.count_nonzero(got.view(np.uint32) != wanted.view(np.uint32)))

    counts, numel = pool.map(count, range(0, shape[0], at_once)), tensor.numel()

    def found() -> str | None:
        wrong = sum(counts)
        return f"{wrong} of {numel} values differ from what was trained" if wrong else None

    return found


def _stop(folder: Path, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{folder}: the exported checkpoint is wrong. {'; '.join(problems[:5])}{more}")
