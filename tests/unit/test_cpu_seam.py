"""The CPU seam relies on names and lines of the pinned Megatron-Core: they must still be there."""

from __future__ import annotations

import importlib
import inspect
from functools import reduce
from typing import Any

import pytest
import torch

from nemo_qad import cpu, runtime
from nemo_qad.errors import UserError
from nemo_qad.schema import ParallelConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the seam is for machines without CUDA")


@pytest.fixture(autouse=True)
def seam() -> None:
    cpu.install()


@pytest.mark.parametrize(("module", "path", "text"), cpu.RELIED_ON, ids=lambda value: str(value).split(".")[-1])
def test_what_the_seam_replaces_exists(module: str, path: str, text: str | None) -> None:
    owner = importlib.import_module(module)
    found: Any = reduce(getattr, path.split("."), owner)
    if text is None:
        return
    # The module's own source where the seam replaced a name or method; else that function's source.
    replaced = path == "torch" or not str(getattr(found, "__module__", "")).startswith("megatron")
    assert text in inspect.getsource(owner if replaced else found)


def test_literal_cuda_devices_become_cpu_in_the_listed_modules_alone() -> None:
    from megatron.core.optimizer import clip_grads

    assert clip_grads.torch.zeros(1, device="cuda").device.type == "cpu"
    assert clip_grads.torch.nn is torch.nn
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_type_names_differ_for_the_optimizer_alone() -> None:
    from megatron.core.optimizer import clip_grads

    namespace = vars(clip_grads)
    assert eval("x.type()", namespace, {"x": torch.zeros(1)}) == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_install_twice_changes_nothing() -> None:
    before = torch.Tensor.type, torch.cuda.current_device
    cpu.install()
    assert (torch.Tensor.type, torch.cuda.current_device) == before


def test_random_states_fork_and_resume() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with runtime.process_groups(ParallelConfig(name="one"), seed=7, threads=1):
        outside = torch.get_rng_state()
        with get_cuda_rng_tracker().fork():
            first = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), outside)
        with get_cuda_rng_tracker().fork():
            second = torch.rand(3)
        runtime.set_seeds(7)
        with get_cuda_rng_tracker().fork():
            again = torch.rand(3)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_process_groups_can_follow_one_another() -> None:
    for _ in range(2):
        with runtime.process_groups(ParallelConfig(name="one"), seed=1, threads=1):
            assert torch.distributed.get_world_size() == 1
        assert not torch.distributed.is_initialized()


def test_wrong_number_of_ranks_is_named() -> None:
    with (
        pytest.raises(UserError, match="ranks_per_node=4"),
        runtime.process_groups(ParallelConfig(name="four", ranks_per_node=4), seed=1, threads=1),
    ):
        pass
    assert not torch.distributed.is_initialized()
