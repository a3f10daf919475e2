"""Which rank this process is, by its environment, and whether the ranks are those that the configuration wants.

No torch: also the parent that starts local ranks, and a command that only prints, ask here.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from nemo_qad.errors import ConfigError, UserError
from nemo_qad.schema import ParallelConfig

STORE = "NEMO_QAD_STORE"  # environment: the file through which ranks that this program started find one another


@dataclass(frozen=True)
class Place:
    """Where a process stands among all ranks."""

    world_size: int
    rank: int
    local_rank: int


def found() -> Place | None:
    """This process's place, from torchrun's environment, Slurm's, or ours; None where nobody started it as a rank."""
    environment = os.environ
    if "WORLD_SIZE" in environment:
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    elif "SLURM_PROCID" in environment and "MASTER_ADDR" in environment:
        names = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    else:
        return None
    try:
        return Place(*(int(environment.get(name, "0")) for name in names))
    except ValueError as error:
        shown = " ".join(f"{name}={environment.get(name)}" for name in names)
        raise UserError(f"{shown}: not whole numbers. Start the ranks with torchrun or srun, or unset these") from error


def is_first_rank() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    place = found()
    return place is None or place.rank == 0


def local_ranks(parallel: ParallelConfig) -> int:
    """How many ranks to start here; 0 where this process is one already, or the only one.

    Raises:
        ConfigError: `parallel` wants other ranks than were started, ranks on other machines, or what the CPU cannot.
    """
    check_started(parallel, place := found())
    if parallel.expert > 1 and parallel.expert_tensor > 1 and not _has_cuda_driver():
        raise no_expert_tensor(parallel)
    return 0 if place or parallel.ranks_per_node == 1 else parallel.ranks_per_node


def check_started(parallel: ParallelConfig, place: Place | None) -> None:
    """Raises ConfigError when the ranks of `parallel` are not those that were started or can be started here."""
    configured, nodes = parallel.nodes * parallel.ranks_per_node, parallel.nodes
    if place is not None and place.world_size != configured:
        nodes = nodes if place.world_size % nodes == 0 else 1
        raise ConfigError(
            "parallel.ranks_per_node",
            parallel.ranks_per_node,
            f"with parallel.nodes={parallel.nodes} that is {configured} ranks, but {place.world_size} were started",
            f"Start {configured} with torchrun or srun, or give parallel.nodes={nodes} "
            f"parallel.ranks_per_node={place.world_size // nodes}.",
        )
    if place is None and nodes > 1:
        raise ConfigError(
            "parallel.nodes",
            nodes,
            "this command starts ranks on its own machine alone",
            f"Start it on each machine with torchrun --nnodes={nodes} --nproc-per-node={parallel.ranks_per_node}, "
            "or with srun, or give parallel.nodes=1.",
        )


def no_expert_tensor(parallel: ParallelConfig) -> ConfigError:
    """Experts cut both ways need an all-gather of unequal parts, which gloo does not have."""
    return ConfigError(
        "parallel.expert_tensor",
        parallel.expert_tensor,
        f"with parallel.expert={parallel.expert} ranks exchange unequal numbers of tokens, which works on GPUs alone",
        "Give parallel.expert_tensor=1.",
    )


def _has_cuda_driver() -> bool:
    """False where there can be no GPU; whether torch can use one is known once torch is there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
