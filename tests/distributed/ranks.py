"""Starts gloo ranks in processes of their own and brings back the tensors that each returns."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

TIMEOUT = timedelta(seconds=120)  # a rank that waits in vain fails instead of hanging

Results = dict[str, Tensor]


def run_ranks(
    function: Callable[..., Results], world_size: int, *arguments: Any, environment: bool = False
) -> list[Results]:
    """[function(rank, *arguments) of each rank]. `function` is found by name in its module, so it must be global.

    With `environment` the ranks get what torchrun would set, and start their process group themselves;
    otherwise the default group exists already.
    """
    with tempfile.TemporaryDirectory(prefix="nemo_qad_ranks_") as folder:
        port = _free_port() if environment else 0
        mp.spawn(_rank, (world_size, folder, port, function, arguments), nprocs=world_size)
        return [load_file(Path(folder) / f"{rank}.safetensors") for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int, world_size: int, folder: str, port: int, function: Callable[..., Results], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    if port:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    else:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    results = function(rank, *arguments)
    save_file(
        {name: torch.as_tensor(value).contiguous() for name, value in results.items()}, f"{folder}/{rank}.safetensors"
    )
    if dist.is_initialized():
        dist.destroy_process_group()
