"""One checkpoint through Megatron's dist checkpointing (torch_dist): each rank writes its parts, any layout reads them.

Planning is collective and needs the tensors; writing is each rank's own affair and finishing the first one's, in this
process or in another. Megatron's own finish would leave ranks waiting for the first if that cannot write, so
it is done here. Beside Megatron's files stands checkpoint.json (`manifest.py`).
"""

from __future__ import annotations

import logging
import queue
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from nemo_qad import agreement
from nemo_qad.checkpoint import manifest
from nemo_qad.errors import UserError, show
from nemo_qad.files import flush

State = dict[str, Any]  # key -> ShardedTensor or ShardedObject
Written = tuple[dict[int, Any], dict[str, dict[str, Any]]]  # Megatron's results, the files' sizes and digests
_COMMON = "common_state"  # Megatron's own entry for what is not sharded; empty here


class _Planned(TorchDistSaveShardedStrategy):
    """Megatron's planning, without its way of finishing."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: str) -> Any:
        return Plan(writer, save_state_dict_ret[1])


class Plan:
    """What this rank has to write. `plan_save` makes it.

    Attributes:
        metadata: Megatron's index so far, on the first rank.
    """

    def __init__(self, writer: Any, metadata: Any) -> None:
        self._writer, self.metadata = writer, metadata
        if metadata is not None:
            metadata.all_local_plans = None  # for a cache that is not used; as large as the index itself
        self.finalize_fns: list[Any] = []  # Megatron appends its own, which `finish` stands for
        self.folder = Path(writer.checkpoint_dir)

    def job(self) -> Job:
        """What `write` takes, the tensors where training has them."""
        save, _, arguments = self._writer.get_save_function_and_args()
        return Job(self.folder, save, tuple(arguments[:-1]))

    def on_cpu(self) -> Job:
        """The same, with the tensors in this machine's memory."""
        _, preload, _ = self._writer.get_save_function_and_args()
        if preload is not None and torch.cuda.is_available():
            self._writer.write_buckets = preload()
        return self.job()


@dataclass(frozen=True)
class Job:
    """One rank's part: Megatron's function with its arguments, rank and buckets of (path, name, contents)."""

    folder: Path
    save: Callable[..., None] | None
    arguments: tuple[Any, ...]


def write(job: Job) -> Written:
    """Writes a rank's files to disk, durably. What `finish` wants: Megatron's results and the files' digests.

    Raises:
        RuntimeError, OSError: of whatever kind the disk gave, in words.
    """
    if job.save is None:
        return {}, {}
    results: queue.Queue[Any] = queue.Queue()
    with _Quiet():
        job.save(*job.arguments, results)
    found = results.get_nowait()
    if isinstance(found, Exception):
        raise found
    names = [name for _, name, _ in job.arguments[1]]
    return found, {name: manifest.describe_file(job.folder / name) for name in names}


def finish(folder: Path, metadata: Any, every: list[Written], meta: dict[str, Any]) -> None:
    """For the first rank, with what all ranks' `write` returned: Megatron's index, then the manifest."""
    results = [[item for items in found.values() for item in items] for found, _ in every]
    FileSystemWriter(folder).finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    files: dict[str, dict[str, Any]] = {}
    for _, described in every:
        files |= described
    for name in manifest.file_names(folder):
        if name not in files:
            flush(folder / name)
            files[name] = manifest.describe_file(folder / name)
    manifest.write_manifest(folder, files, meta)


def plan_save(state: State, folder: Path) -> Plan:
    """Agrees with all ranks on who writes what into `folder`, an empty one; a collective call.

    Every piece of a tensor must be some rank's to write, and one's alone: Megatron checks it.
    """
    # Megatron would start a manager process for results that here never leave the process that wrote them.
    filesystem_async._results_queue = queue.Queue()
    with _Quiet():
        plan = dist_checkpointing.save(
            dict(state), str(folder), _Planned(), async_sharded_save=True, async_strategy="mcore"
        )
    assert isinstance(plan, Plan)
    return plan


def local_bytes(state: State) -> int:
    """Bytes of tensors that this rank will write."""
    tensors = [t for t in state.values() if isinstance(t, ShardedTensor) and _is_main(t.replica_id)]
    return sum(t.data.numel() * t.data.element_size() for t in tensors if t.data is not None)


def _is_main(replica: Any) -> bool:
    return replica == 0 if isinstance(replica, int) else all(part == 0 for part in replica)


def keys(folder: Path) -> set[str]:
    """Of everything that a checkpoint holds. Only for folders that `manifest` has found sound."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key for key in found if not key.startswith(_COMMON)}


def require_keys(folder: Path, wanted: Iterable[str]) -> None:
    """Raises UserError naming what a checkpoint lacks; every rank asks for its own part, a collective call."""
    held = agreement.first_alone(lambda: keys(folder))
    missing = sorted({name for names in agreement.of_all([k for k in wanted if k not in held]) for name in names})
    if missing:
        raise UserError(
            f"{folder} lacks {show(missing)}: it belongs to another model, recipe or setting, or to an older version. "
            "Continue with what wrote it, or choose another run_dir"
        )


def load(folder: Path, state: State) -> None:
    """Fills the tensors of `state`, whatever layout wrote them; a collective call.

    Raises:
        UserError: a tensor is missing or of another shape.
    """
    require_keys(folder, [item.key for item in state.values()])
    with _Quiet():
        loaded = dist_checkpointing.load(dict(state), str(folder), validate_access_integrity=False)
    for name, item in state.items():
        found: Tensor = loaded[name]
        if found.data_ptr() != item.data.data_ptr():
            item.data.copy_(found)


class _Quiet:
    """Holds back Megatron's and torch's remarks about their own deprecations."""

    def __enter__(self) -> None:
        self._catch = warnings.catch_warnings()
        self._catch.__enter__()
        warnings.simplefilter("ignore")
        self._levels = {name: logging.getLogger(name).level for name in ("megatron", "torch.distributed")}
        for name in self._levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def __exit__(self, *error: Any) -> None:
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._catch.__exit__(*error)


