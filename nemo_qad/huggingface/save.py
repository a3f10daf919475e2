"""Write a Hugging Face checkpoint folder: complete or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_qad import agreement
from nemo_qad.data import tokenizer
from nemo_qad.errors import UserError
from nemo_qad.files import flush, new_folder, readable, write_json
from nemo_qad.huggingface.architectures import hf_config
from nemo_qad.huggingface.gathered import Part, gathered_mappings
from nemo_qad.huggingface.names import Mapping, carried, to_hf
from nemo_qad.huggingface.source import tensors_of
from nemo_qad.schema import ModelConfig


def save_bf16(
    module: torch.nn.Module,
    folder: Path,
    model: ModelConfig,
    tokenizer_folder: Path | None,
    max_shard_gb: float,
    carried_from: Path | None = None,
) -> None:
    """Write the model's weights in BF16 (the router's expert bias in FP32), replacing `folder`; a collective call.

    Args:
        carried_from: a checkpoint with the blocks that predict further tokens, which are copied as they are.
    """

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        write_folder(
            itertools.chain(tensors, carried_tensors(model, carried_from)),
            folder,
            config=hf_config(model),
            extra_json={},
            tokenizer_folder=tokenizer_folder,
            max_shard_gb=max_shard_gb,
        )

    agreement.first_reads(hf_tensors(module, model), write)


def hf_tensors(module: torch.nn.Module, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors as they ship in BF16: Hugging Face name, tensor; on the first rank, see `gathered`."""

    def own(mapping: Mapping, local: str, part: Part) -> dict[str, Part]:
        return {"": part._replace(tensor=part.tensor.to(torch.float32 if mapping.is_fp32 else torch.bfloat16))}

    for mapping, whole in gathered_mappings(module, model, own):
        yield from to_hf(mapping, whole[""], model).items()


def carried_tensors(model: ModelConfig, folder: Path | None) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has beside the model's tensors, byte for byte.

    Raises:
        UserError: the model has blocks that predict further tokens, and there is no checkpoint to take them from.
    """
    names = [name for mapping in carried(model) for name in mapping.hf]
    if names and folder is None:
        raise UserError(
            f"model.mtp_num_layers={model.mtp_num_layers}: these blocks are copied from the BF16 checkpoint, and there "
            "is none. Give teacher.path=FOLDER, or model.mtp_num_layers=0 model.mtp_pattern=''"
        )
    if folder is not None and names:
        yield from tensors_of(folder, names)


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    config: dict[str, Any],
    extra_json: dict[str, dict[str, Any]],
    tokenizer_folder: Path | None,
    max_shard_gb: float,
    also: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Stream `tensors` into safetensors shards beside config.json and the tokenizer, then put the folder in place.

    Everything is written in a temporary folder beside `folder`, flushed to the disk, and renamed: a reader
    sees the old folder or the new one. Memory: one shard.

    Args:
        extra_json: file name -> content of further JSON files.
        max_shard_gb: largest shard in 10^9 bytes; a larger tensor gets a shard of its own.
        also: writes more into the folder that is in the making.

    Raises:
        UserError: the tokenizer folder lacks tokenizer.json, or the disk refuses.
    """
    with new_folder(folder) as partial:
        _write_shards(tensors, partial, int(max_shard_gb * 1e9))
        for name, content in {"config.json": config, **extra_json}.items():
            write_json(partial / name, content)
        if tokenizer_folder is not None:
            tokenizer.copy_files(tokenizer_folder, partial)
        also(partial)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, max_bytes: int) -> None:
    shards: list[list[str]] = []
    seen: set[str] = set()
    total = 0
    flushed: list[Future[None]] = []
    with ThreadPoolExecutor(1, "flush") as flusher:  # a shard goes to the disk while the next is made
        for shard in _shards(tensors, max_bytes):
            if seen & shard.keys():
                raise ValueError(f"tensors given twice: {sorted(seen & shard.keys())}")
            seen |= shard.keys()
            total += sum(tensor.nbytes for tensor in shard.values())
            shards.append(list(shard))
            path = folder / _partial_name(len(shards))
            save_file(shard, path, metadata={"format": "pt"})
            shard.clear()  # else it would live on until the next is whole
            readable(path)
            flushed.append(flusher.submit(flush, path))
    for written in flushed:
        written.result()
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for number, name in enumerate(names, start=1):
        (folder / _partial_name(number)).rename(folder / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, held in zip(names, shards, strict=True) for tensor in held}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        if name in shard:
            raise ValueError(f"tensor given twice: {name}")
        shard[name] = _alone(tensor.detach().cpu().contiguous())
        size += tensor.nbytes
    if shard:
        yield shard


def _alone(tensor: Tensor) -> Tensor:
    """A tensor whose storage nothing else is in: safetensors refuses those that share one, as parts of a fused
    projection do, and the one scalar that its parts have in common."""
    return tensor if tensor.dim() and tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _partial_name(number: int) -> str:
    return f"shard-{number}"


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
