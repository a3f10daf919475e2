"""Read a BF16 Hugging Face checkpoint into a model, refusing anything doubtful by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.huggingface.architectures import check_config
from nemo_qad.huggingface.names import Content, Kind, Mapping, held_tensors, mappings, shapes, to_mcore
from nemo_qad.models.whole import fitted
from nemo_qad.schema import ModelConfig

_SHOWN = 8  # names listed in a message
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsFolder:
    """The tensors of all model*.safetensors files of a folder, read one at a time.

    Raises:
        UserError: no such files, a damaged file or index, a tensor that is in two files.
    """

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.folder = folder
        self._readers: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                reader = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file ({error}). Copy it again.") from None
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                if name in self._readers:
                    raise UserError(f"{path}: tensor {name} is in another file of the folder too. Remove one of them.")
                self._readers[name] = reader

    def names(self) -> set[str]:
        return set(self._readers)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._readers[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        try:
            return self._readers[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder}: tensor {name} cannot be read ({error}). Copy the file again.") from None


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint in order; those of its index where it has one.

    Raises:
        UserError: the folder, the files or the index are missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index} is not a safetensors index ({error!r}). Copy it again.") from None
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder}: files named by the index are missing: {_listing(missing)}")
        return [folder / name for name in listed]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    return [single]


def weights_digest(folder: Path) -> str:
    """sha256 (hex) over the weight files' names and bytes, in order."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@torch.no_grad()
def load_weights(module: torch.nn.Module, folder: Path, model: ModelConfig) -> None:
    """Fill `module`, the bare model or a rank's part of it, with the checkpoint in `folder`, in the module's dtypes.

    The multi-token-prediction blocks (`mtp.*`) are skipped. Memory beyond the module: one tensor. Each rank reads and
    checks the tensors of which it holds a part.

    Raises:
        UserError: names every missing, extra, misshapen, constant, all-zero or non-finite tensor it finds,
            the file that is damaged, or the field of config.json that contradicts the model.
    """
    check_config(folder, model)
    with ExitStack() as files:
        source = SafetensorsFolder(folder, files)
        _check_names_and_shapes(source, model)
        for mapping, target, cut in held_tensors(module, mappings(model)):
            parts = {name: source.read(name) for name in mapping.hf}
            _check_values(folder, mapping, parts)
            whole = to_mcore(mapping, parts, model)
            if cut and mapping.kind == Kind.vocabulary:
                whole = fitted(whole, len(target) * cut.group.size())
            target.copy_(cut.own(whole) if cut else whole)


def _check_names_and_shapes(source: SafetensorsFolder, model: ModelConfig) -> None:
    expected = shapes(model)
    found = {name for name in source.names() if not name.startswith("mtp.")}
    if model.tied_output:
        found.discard("lm_head.weight")
    problems = [f"missing: {_listing(expected.keys() - found)}"] if expected.keys() - found else []
    if found - expected.keys():
        problems.append(f"not part of model {model.name}: {_listing(found - expected.keys())}")
    wrong = {n: source.shape(n) for n in expected.keys() & found if source.shape(n) != expected[n]}
    if wrong:
        problems.append("wrong shape: " + _listing(f"{n} {list(s)}, not {list(expected[n])}" for n, s in wrong.items()))
    if problems:
        raise UserError(f"{source.folder}: tensors {'; '.join(problems)}")


def _check_values(folder: Path, mapping: Mapping, parts: dict[str, Tensor]) -> None:
    for name, tensor in parts.items():
        problem = next(_problems(tensor, mapping.content), None)
        if problem:
            raise UserError(f"{folder}: tensor {name} {problem}. The checkpoint is damaged or not a trained model.")


def _problems(tensor: Tensor, content: Content) -> Iterator[str]:
    if tensor.dtype not in _FLOATS:
        yield f"has dtype {tensor.dtype}: a quantised checkpoint cannot be the BF16 model"
    low, high = (value.item() for value in tensor.float().aminmax())
    if not (abs(low) < float("inf") and abs(high) < float("inf")):  # false for NaN, which aminmax propagates
        yield "holds NaN or Inf"
    if content != Content.free and low == high == 0:
        yield "is all zero"
    if content == Content.weight and low == high:
        yield f"is constant ({low})"


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
