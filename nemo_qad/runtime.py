"""Process groups, device, seeds and threads of one run."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_qad import cpu
from nemo_qad.errors import UserError
from nemo_qad.schema import ParallelConfig

_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for rank 0 to prepare data


def device() -> torch.device:
    """The device of this rank: its CUDA device when there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def process_groups(parallel: ParallelConfig, *, seed: int, threads: int = 0) -> Iterator[None]:
    """Everything that must exist before a model is built; undone on exit, so that a process can do this again.

    Args:
        parallel: sizes of the parallel groups; nodes x ranks_per_node is the world size.
        seed: seed of Python-independent randomness: parameters and dropout.
        threads: CPU threads of this rank; 0 divides the available cores among the ranks of the machine.

    Raises:
        UserError: the number of started ranks is not the configured one.
    """
    cpu.install()
    from megatron.core import parallel_state

    world_size, rank, local_rank = _ranks()
    _check_world_size(parallel, world_size)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // max(1, parallel.ranks_per_node)))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    else:
        _keep_freed_memory()
    _initialize_distributed(world_size, rank)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
        )
        set_seeds(seed)
        yield
    finally:
        _destroy()


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


def _ranks() -> tuple[int, int, int]:
    """World size, rank and local rank: from torchrun, else from Slurm, else one process."""
    environment = os.environ
    if "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"]), int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
    if "SLURM_PROCID" in environment and "MASTER_ADDR" in environment:
        return (
            int(environment["SLURM_NTASKS"]),
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_LOCALID"]),
        )
    return 1, 0, 0


def _check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    configured = parallel.nodes * parallel.ranks_per_node
    if configured != world_size:
        raise UserError(
            f"parallel.nodes={parallel.nodes} x parallel.ranks_per_node={parallel.ranks_per_node} is {configured} "
            f"ranks, but {world_size} were started. Start {configured} with torchrun or srun, or change parallel."
        )


def _initialize_distributed(world_size: int, rank: int) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if world_size == 1:  # a store in memory: no port that another run on the machine could hold
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=_TIMEOUT)


def _destroy() -> None:
    """Undo `process_groups`, with the globals of Megatron that refer to its groups or layer count."""
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    num_microbatches_calculator.unset_num_microbatches_calculator()
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of FP32 and of BF16 runs: their shapes differ
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
