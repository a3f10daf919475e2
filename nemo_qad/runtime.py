"""Process groups, device, seeds and threads of one run."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_qad import cpu
from nemo_qad.errors import EXIT_FAILURE, UserError
from nemo_qad.ranks import STORE, Place, check_started, found, is_first_rank, no_expert_tensor
from nemo_qad.schema import ParallelConfig, RunConfig

__all__ = ["device", "identity", "is_first_rank", "process_groups", "set_seeds"]

_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for rank 0 to prepare data
_ARRIVAL = timedelta(minutes=5)  # and this long for the other ranks to start
_LEAVE_SECONDS = 5.0  # for process groups to go away after a failure
_PACKAGES = ("nemo-qad", "torch", "megatron-core", "nvidia-modelopt", "transformers", "tokenizers", "numpy")


@contextlib.contextmanager
def one_thread_an_operation() -> Iterator[int]:
    """Inside, torch's operations take one thread each, as the caller has threads of its own: yields how many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def device() -> torch.device:
    """The device of this rank: its CUDA device when there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def process_groups(
    parallel: ParallelConfig, *, seed: int, threads: int = 0, identity: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Everything that must exist before a model is built; undone on exit, so that a process can do this again.

    Args:
        parallel: sizes of the parallel groups; nodes x ranks_per_node is the world size.
        seed: seed of Python-independent randomness: parameters and dropout.
        threads: CPU threads of this rank; 0 divides the available cores among the ranks of the machine.
        identity: names and values that must be the same on every rank; see `identity`.

    Raises:
        ConfigError: the started ranks are not the configured ones, or what the CPU cannot.
        UserError: ranks did not come, or differ in `identity`; on every rank that is there.
    """
    cpu.install()
    from megatron.core import parallel_state

    place = found() or Place(1, 0, 0)
    check_started(parallel, place)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // max(1, parallel.ranks_per_node)))
    _use_device(parallel, place)
    _initialize_distributed(place)
    failed = True
    try:
        _require_same(identity or {}, place)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
        )
        set_seeds(seed)
        yield
        failed = False
    finally:
        _destroy(bounded=failed and place.world_size > 1)


def identity(run: RunConfig) -> dict[str, str]:
    """What every rank of a run must have alike: each setting, Python's version and the packages'."""
    return {**_settings(run, ""), "Python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _settings(node: Any, prefix: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for field in fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        settings |= _settings(value, name + ".") if is_dataclass(value) else {name: str(value)}
    return settings


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def set_seeds(seed: int) -> None:
    """Seed torch and Megatron's per-group random states (pipeline stages get different parameters)."""
    from megatron.core import parallel_state, tensor_parallel

    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks instead of returning them to the kernel; other C libraries: no effect.

    Each large tensor of a step would otherwise be mapped and page-faulted anew, a third of a CPU step's time.
    The numbers are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 * 2**20)):
            mallopt(parameter, value)


def _use_device(parallel: ParallelConfig, place: Place) -> None:
    if not torch.cuda.is_available():
        if parallel.expert > 1 and parallel.expert_tensor > 1:
            raise no_expert_tensor(parallel)
        _keep_freed_memory()
        return
    gpus = torch.cuda.device_count()
    if place.local_rank >= gpus:
        raise UserError(
            f"local rank {place.local_rank} has no GPU: this machine shows {gpus}. "
            f"Start at most {gpus} ranks on it, or look at CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(place.local_rank)


def _initialize_distributed(place: Place) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    rank, world_size = place.rank, place.world_size
    if world_size == 1:  # a store in memory: no port that another run on the machine could hold
        store: dist.Store = dist.HashStore()
    elif STORE in os.environ:  # nor this one
        store = dist.FileStore(os.environ[STORE], world_size)
    else:
        store = _store_of_all(place)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)


def _store_of_all(place: Place) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, once every rank has come to it."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    address = ":".join(os.environ.get(name, "") for name in names)
    if not all(os.environ.get(name) for name in names):
        problem = "ranks find one another there. Set both to the first machine's name and a free port"
        raise UserError(f"MASTER_ADDR:MASTER_PORT is {address!r}, but {problem}")
    try:
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=_ARRIVAL))
    except dist.DistError as error:
        raise UserError(
            f"not all of {place.world_size} ranks met at {address} within {_ARRIVAL} "
            f"({str(error).splitlines()[0]}). The output of the one that is missing says why"
        ) from error
    store.set_timeout(_TIMEOUT)
    return dist.PrefixStore("nemo_qad", store)


def _require_same(mine: Mapping[str, str], place: Place) -> None:
    """Raises the same UserError on every rank where one of them differs from the first."""
    if place.world_size == 1:
        return
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, dict(mine))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise UserError(
                    f"rank {rank} has {name}={other.get(name)}, rank 0 has {name}={first.get(name)}. "
                    "Start every rank with the same command and the same packages"
                )


def _destroy(*, bounded: bool) -> None:
    """Undo `process_groups`, with the globals of Megatron that refer to its groups or layer count.

    `bounded`: after a failure other ranks may be dead, and collectives that wait for them would hold this one.
    """
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    num_microbatches_calculator.unset_num_microbatches_calculator()
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of FP32 and of BF16 runs: their shapes differ
    parallel_state.destroy_model_parallel()
    if not bounded:
        dist.destroy_process_group()
        return
    thread = threading.Thread(target=_destroy_quietly, daemon=True)
    thread.start()
    thread.join(_LEAVE_SECONDS)
    if thread.is_alive():
        atexit.register(_leave)  # the groups' destructors would wait as well


def _destroy_quietly() -> None:
    with contextlib.suppress(RuntimeError):  # why the run ends is known already
        dist.destroy_process_group()


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)
