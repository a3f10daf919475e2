"""Saving beside training: the tensors of the moment, a copy that fits in memory, a writing process that is ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from test_frozen_teacher import ONE

from nemo_qad import machine, runtime
from nemo_qad.checkpoint import saver as saver_module
from nemo_qad.checkpoint import sharded
from nemo_qad.checkpoint.newest import newest_good
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.checkpoint.writer import Writer


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ONE, seed=1, threads=1):
        yield


VALUES = {
    "matrix": torch.arange(12.0).view(3, 4).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "bf16": torch.arange(7, dtype=torch.bfloat16)[2:],
    "fp8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "steps": torch.tensor([1, 2, 3]),
    "flag": torch.tensor([True, False]),
}


def described(values: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[float], tuple[int, ...]]]:
    return {n: (str(t.dtype), t.double().flatten().tolist(), tuple(t.shape)) for n, t in values.items()}


def slowly(values: dict[str, torch.Tensor]) -> object:
    time.sleep(0.5)
    return described(values)


def test_the_writer_sees_tensors_as_they_were() -> None:
    values = {name: value.clone() for name, value in VALUES.items()}
    writer = Writer()
    try:
        for _ in range(2):  # the second time in the same memory
            expected = described(values)
            writer.start(slowly, values)
            for value in values.values():
                value.copy_(torch.zeros_like(value))
            assert not writer.is_done() and writer.result() == expected
        held = writer.num_bytes
        writer.reserve(100_000)
        assert writer.num_bytes >= 100_000 > held
        writer.start(described, {"large": torch.ones(20_000)})
        assert writer.result()["large"][1] == [1.0] * 20_000
    finally:
        writer.close()


def test_errors_of_the_writer_are_words() -> None:
    writer = Writer()
    try:
        writer.start(int, "x")
        assert "ValueError" in writer.result() and writer.is_alive
        os.kill(writer.process, signal.SIGKILL)
        writer.start(int, "1")
        assert "was ended" in writer.result() and not writer.is_alive
    finally:
        writer.close()


def saved(folders: StepFolders, value: torch.Tensor) -> torch.Tensor:
    found = newest_good(folders, print, "")
    assert found is not None
    item = ShardedTensor.from_rank_offsets("w", torch.full_like(value, -1.0))
    sharded.load(found.folder, {"w": item})
    return item.data


def test_a_writer_that_is_ended_loses_one_save_and_no_more(tmp_path: Path) -> None:
    said: list[str] = []
    folders = StepFolders(tmp_path)
    saving = CheckpointSaver(folders, said.append, asynchronous=True)
    value = torch.arange(1000.0)
    for step in (1, 2, 3):
        if step == 2:
            assert saving._writer is not None
            os.kill(saving._writer.process, signal.SIGKILL)
        saving.save(step, {"w": ShardedTensor.from_rank_offsets("w", value)}, {})
        value += 1
        saving.wait()
        assert torch.equal(saved(folders, value), value - (1 if step != 2 else 2))
    assert folders.steps() == [1, 3] and len(said) == 2, said
    assert "step 2 was not saved" in said[0] and "that of step 1 is kept" in said[0]
    assert "saved while training waits" in said[1]
    saving.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_are_as_large_as_what_they_hold(tmp_path: Path, asynchronous: bool) -> None:
    """Not larger: torch writes the whole storage of a tensor, and a save needs the room that was checked for it."""
    saving = CheckpointSaver(StepFolders(tmp_path), print, asynchronous=asynchronous)
    whole = torch.arange(40 * 4096.0).view(40, 4096)
    state = {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", whole[i]) for i in range(40)}
    for step in (1, 2):
        saving.save(step, state, {})
        saving.require_saved()
        written = sum(path.stat().st_size for path in saving.folders.path(step).rglob("*") if path.is_file())
        assert whole.nbytes < written < 1.15 * whole.nbytes + 2**14, (whole.nbytes, written)
    saving.close()


def test_without_memory_for_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(saver_module, "free_memory", lambda: 1000)
    saving = CheckpointSaver(StepFolders(tmp_path), said.append, asynchronous=True)
    item = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0))}
    saving.reserve(lambda: item)
    saving.save(1, item, {})
    assert saving._pending is None and saving.folders.steps() == [1]
    assert all("GiB are free, so this checkpoint is saved while training waits" in text for text in said) and said
    saving.close()


def test_free_memory_is_what_the_tightest_group_allows(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    8000 kB\n")
    assert machine.free_memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    for name, limit, used, cache in (("job", "5000000", 4000000, 500000), ("job/step", "max", 3000000, 0)):
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True)
        texts = {"memory.max": limit, "memory.current": used, "memory.stat": f"inactive_file {cache}\n"}
        for file, text in texts.items():
            (folder / file).write_text(str(text))
    assert machine.free_memory(tmp_path) == 1_500_000
    assert machine.free_memory() > 2**20
