"""Reads an exported folder back and compares it with the trained weights, bit for bit.

Shares no code with the exporter or the training numerics: its own safetensors reader, its own tables of
E2M1 and E4M3 built from the definitions of the formats, numpy for arithmetic. It follows what a serving
engine reads, so a folder that passes holds the model that was trained:

    NVFP4  weight U8 [O, I/2] (even column in the low nibble), weight_scale F8_E4M3 [O, I/16],
           weight_scale_2 F32 []:  value = e2m1 * (weight_scale * weight_scale_2)
    FP8    weight F8_E4M3 [O, I], weight_scale F32 [], input_scale F32 []:  value = e4m3 * weight_scale
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from nemo_qad.errors import UserError

Tensor = Any  # torch's: this module itself reads without torch

E4M3_NAN = 0x7F
PREDICTION = "mtp."
EMBEDDINGS = ("backbone.embeddings.weight", "model.embed_tokens.weight")
NUM_ROWS_AT_ONCE = 4096
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SCALES = {
    "U8": {"weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
    "F8_E4M3": {"weight_scale": "F32", "input_scale": "F32"},
}
_ALGORITHMS = {"U8": "W4A16_NVFP4", "F8_E4M3": "FP8"}
_DTYPES = {"U8": np.uint8, "F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: file, dtype as safetensors spells it, shape, first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def itemsize(self) -> int:
        return int(np.dtype(_DTYPES[self.dtype]).itemsize)

    def array(self) -> np.ndarray:
        """Memory-mapped raw values; FP8 as uint8, BF16 as uint16."""
        if not self.shape:
            return np.fromfile(self.file, _DTYPES[self.dtype], 1, offset=self.start).reshape(())
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.start, self.shape)


def verify_folder(folder: Path, expected: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Checks an exported checkpoint.

    Args:
        folder: what `export_student` wrote.
        expected: (Hugging Face weight name, value that the student computes with), FP32 or BF16; every
            tensor of the model but the scales.

    Returns:
        counts: tensors, bytes, quantised linears by format, values compared.

    Raises:
        UserError: naming the first tensors that differ, lack a scale, or hold a scale that is not finite
            and positive; or a linear that is both quantised and excluded, or neither.
    """
    entries, _, problems = layout(folder)
    _stop(folder, problems)
    compared, names = 0, set()
    for name, tensor in expected:
        names.add(name)
        wrong = _difference(entries, name, tensor)
        if wrong:
            problems.append(f"{name}: {wrong}")
        compared += tensor.numel()
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


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the safetensors files in a folder; the index, if any, must agree with them.

    Raises:
        UserError: no file, a header that cannot be read, a tensor beyond the end of its file, twice, or of
            a dtype that the format does not have.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: holds no .safetensors file. Run the export stage again")
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _read_header(file):
            if name in entries:
                raise UserError(f"{name} is in {entries[name].file.name} and in {file.name}")
            entries[name] = entry
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        actual = {name: entry.file.name for name, entry in entries.items()}
        if listed != actual:
            wrong = sorted(n for n in listed.keys() | actual.keys() if listed.get(n) != actual.get(n))
            raise UserError(f"{index}: disagrees with the files about {', '.join(wrong[:5])}")
    return entries


def _read_header(file: Path) -> Iterator[tuple[str, Entry]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise UserError(f"{file}: truncated, its header does not fit in {size} bytes")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise UserError(f"{file}: its header is not JSON ({error})") from None
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        first, last = fields["data_offsets"]
        if dtype not in _DTYPES:
            raise UserError(f"{file}: {name} has dtype {dtype}, which this checkpoint format does not use")
        if last - first != int(np.prod(shape, dtype=np.int64)) * np.dtype(_DTYPES[dtype]).itemsize:
            raise UserError(
                f"{file}: {name} has {last - first} bytes, which its shape {shape} does not explain"
            )
        if 8 + length + last > size:
            raise UserError(f"{file}: truncated, {name} ends beyond its {size} bytes")
        yield name, Entry(file, dtype, shape, 8 + length + first)


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
        stored = _ALGORITHMS.get(entry.dtype)
        if said != stored:
            yield f"{name}: stored as {stored or entry.dtype}, the configuration says {said or 'unquantised'}"
        if excluded == (stored is not None):
            yield f"{name}: {'quantised and excluded' if excluded else 'neither quantised nor excluded'}"
        yield from _companion_problems(entries, module, entry)


def _companion_problems(entries: dict[str, Entry], module: str, weight: Entry) -> Iterator[str]:
    """A weight has the scales of its format, of the right dtype and shape, and no others."""
    for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
        found, dtype = entries.get(f"{module}.{suffix}"), _SCALES.get(weight.dtype, {}).get(suffix)
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


def is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in {"weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"}


def _difference(entries: dict[str, Entry], name: str, tensor: Tensor) -> str | None:
    """How a stored tensor differs from the expected one, or None."""
    entry = entries.get(name)
    if entry is None:
        return "missing"
    wanted = tensor.detach().float().cpu().numpy()
    shape = (*entry.shape[:-1], entry.shape[-1] * 2) if entry.dtype == "U8" else entry.shape
    if shape != wanted.shape:
        return f"shape {shape}, not {wanted.shape}"
    wrong = 0
    for first in range(0, wanted.shape[0] if wanted.ndim else 1, NUM_ROWS_AT_ONCE):
        rows = slice(first, first + NUM_ROWS_AT_ONCE) if wanted.ndim else ...
        got = _decode(entries, name, rows)
        wrong += int((got.view(np.uint32) != np.ascontiguousarray(wanted[rows]).view(np.uint32)).sum())
    return f"{wrong} of {wanted.size} values differ from what was trained" if wrong else None


def _decode(entries: dict[str, Entry], name: str, rows: Any) -> np.ndarray:
    """FP32 values of some rows of a stored weight."""
    entry, module = entries[name], name.removesuffix(".weight")
    raw = np.ascontiguousarray(entry.array()[rows])
    if entry.dtype == "F32":
        return raw.astype(np.float32)
    if entry.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if entry.dtype == "F8_E4M3":
        return _e4m3_table()[raw] * entries[f"{module}.weight_scale"].array()
    codes = np.empty((*raw.shape[:-1], raw.shape[-1] * 2), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = raw & 0xF, raw >> 4
    scales = _e4m3_table()[entries[f"{module}.weight_scale"].array()[rows]]
    step = scales * entries[f"{module}.weight_scale_2"].array()
    return _E2M1[codes] * np.repeat(step, 16, axis=-1)


def _e4m3_table() -> np.ndarray:
    """FP32 value of each of the 256 E4M3 codes: sign, 4 exponent bits (bias 7), 3 fraction bits."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 0xF, (code & 7) / 8.0
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    magnitude[(code & 0x7F) == E4M3_NAN] = np.nan
    return np.where(code >= 128, -magnitude, magnitude).astype(np.float32)


def _stop(folder: Path, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{folder}: the exported checkpoint is wrong. {'; '.join(problems[:5])}{more}")
