"""Read a BF16 Hugging Face checkpoint into a model, refusing anything doubtful by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nemo_qad import agreement
from nemo_qad.errors import UserError
from nemo_qad.huggingface.architectures import check_config, is_tied
from nemo_qad.huggingface.names import Content, carried, held_tensors, mappings
from nemo_qad.huggingface.slices import read_own
from nemo_qad.huggingface.source import Dtypes, SafetensorsFolder, widest
from nemo_qad.huggingface.weight_files import listing
from nemo_qad.models.shipped import set_shipped_dtype
from nemo_qad.schema import ModelConfig

OUTPUT = "lm_head.weight"
_INF = float("inf")


@dataclass
class Loaded:
    """What a load found. `rounded`: tensors that are FP32 on disk and were rounded to the model's BF16."""

    rounded: list[str] = field(default_factory=list)


@torch.no_grad()
def load_weights(module: torch.nn.Module, folder: Path, model: ModelConfig) -> Loaded:
    """Fill `module`, the bare model or a rank's part of it, with the checkpoint in `folder`, in the module's dtypes.

    A collective call: each rank reads the parts that it holds, and all of them judge the tensors together. Memory
    beyond the module: one tensor's part, twice. Blocks that predict further tokens are checked and not kept.

    Raises:
        UserError: names every missing, extra, misshapen, constant, all-zero or non-finite tensor it finds,
            the file that is damaged, or the field of config.json that contradicts the model.
    """
    check_config(folder, model)
    loaded = Loaded()
    with ExitStack() as files:
        source = SafetensorsFolder(folder, files)
        if not model.tied_output and is_tied(folder):
            source.alias(OUTPUT, mappings(model)[0].hf[0])
        _check_headers(source, model)
        seen: dict[str, tuple[float, float]] = {}
        for mapping, target, cut in held_tensors(module, mappings(model)):
            dtype = widest(dtype for name in mapping.hf if (dtype := source.dtype(name)))
            value, read = read_own(source, mapping, cut, len(target), model)
            seen |= {name: _range(parts) for name, parts in read.items() if parts}
            target.copy_(value)
            set_shipped_dtype(target, dtype)
            if dtype is torch.float32 and target.dtype is torch.bfloat16:
                loaded.rounded += mapping.hf
        if agreement.is_first():
            seen |= {name: _range([source.read(name)]) for mapping in carried(model) for name in mapping.hf}
            _check_tied_output(source, model)
        _check_ranges(folder, model, seen)
    return loaded


def mark_dtypes(module: torch.nn.Module, dtypes: Dtypes, model: ModelConfig) -> None:
    """Lets each of the module's tensors ship in the dtype of the checkpoint, as `load_weights` does.

    For students whose weights come from elsewhere.
    """
    for mapping, target, _ in held_tensors(module, mappings(model)):
        set_shipped_dtype(target, widest(dtypes.of(name) for name in mapping.hf))


def _check_headers(source: SafetensorsFolder, model: ModelConfig) -> None:
    """Names, shapes and dtypes, of which no value is read."""
    table = [*mappings(model), *carried(model)]
    expected = {name: shape for m in table for name, shape in zip(m.hf, m.shapes, strict=True)}
    found = source.names()
    if model.tied_output:
        found.discard(OUTPUT)
    missing, extra = expected.keys() - found, found - expected.keys()
    problems = [f"missing: {listing(missing)}"] if missing else []
    if missing and all(name.startswith("mtp.") for name in missing):
        problems[0] += (
            f" (model.mtp_num_layers={model.mtp_num_layers}; transformers drops these tensors when it saves. Take the "
            "original files, or go without with model.mtp_num_layers=0 model.mtp_pattern='')"
        )
    if extra:
        problems.append(f"not part of model {model.name}: {listing(extra)}")
    wrong = {n: source.shape(n) for n in expected.keys() & found if source.shape(n) != expected[n]}
    if wrong:
        problems.append("wrong shape: " + listing(f"{n} {list(s)}, not {list(expected[n])}" for n, s in wrong.items()))
    quantised = [name for name in expected.keys() & found if source.dtype(name) is None]
    if quantised:
        problems.append(f"of a dtype that a quantised checkpoint has, not a BF16 model: {listing(quantised)}")
    if problems:
        raise UserError(f"{source.folder}: tensors {'; '.join(problems)}")


def _range(parts: list[Tensor]) -> tuple[float, float]:
    """Smallest and largest value; NaN where there is one."""
    bounds = [part.float().aminmax() for part in parts]
    return _union([(float(low), float(high)) for low, high in bounds])


def _union(ranges: list[tuple[float, float]]) -> tuple[float, float]:
    if any(low != low for low, _ in ranges):  # min would lose a NaN
        return float("nan"), float("nan")
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _check_ranges(folder: Path, model: ModelConfig, seen: dict[str, tuple[float, float]]) -> None:
    """A part may be constant where the whole is not: what one rank suspects, all ranks that hold a part judge."""
    suspects = [name for name, (low, high) in seen.items() if not (-_INF < low < high < _INF)]
    union = sorted({name for names in agreement.of_all(suspects) for name in names})
    if not union:
        return
    everyone = agreement.of_all({name: seen[name] for name in union if name in seen})
    merged = {name: _union([ranges[name] for ranges in everyone if name in ranges]) for name in union}
    contents = {name: m.content for m in [*mappings(model), *carried(model)] for name in m.hf}
    wrong = [f"{name} {problem}" for name in union for problem in _problems(*merged[name], contents[name])]
    if wrong:
        raise UserError(f"{folder}: tensor {listing(wrong)}. The checkpoint is damaged or not a trained model.")


def _problems(low: float, high: float, content: Content) -> Iterator[str]:
    if not (abs(low) < _INF and abs(high) < _INF):  # false for NaN
        yield "holds NaN or Inf"
    elif content != Content.free and low == high == 0:
        yield "is all zero"
    elif content == Content.weight and low == high:
        yield f"is constant ({low})"


def _check_tied_output(source: SafetensorsFolder, model: ModelConfig) -> None:
    """An output layer beside a tied embedding must be the embedding: it would be ignored."""
    if not model.tied_output or OUTPUT not in source.names():
        return
    embedding = mappings(model)[0].hf[0]
    same = source.shape(OUTPUT) == source.shape(embedding) and torch.equal(source.read(OUTPUT), source.read(embedding))
    if not same:
        raise UserError(
            f"{source.folder}: tensor {OUTPUT} differs from {embedding}, though config.json has "
            "tie_word_embeddings=true. Set it to false there if the output layer is one of its own"
        )
