"""Local ranks in real processes: their result, errors, deaths, Ctrl-C, and what the command makes of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_qad import launcher, ranks, train
from nemo_qad.errors import ConfigError, RunFolderError, UserError
from nemo_qad.schema import ParallelConfig, RunConfig
from nemo_qad.training.interrupt import Interrupted, deferred_stop

HERE = __name__
BOUND = 30.0  # seconds within which a dead rank ends the others


@pytest.fixture(autouse=True)
def _no_ranks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_PROCID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def own_rank() -> int:
    place = ranks.found()
    assert place is not None
    return place.rank


@contextlib.contextmanager
def gloo() -> Iterator[Any]:
    """torch.distributed as runtime.process_groups joins it, without Megatron-Core's import."""
    import torch
    import torch.distributed as dist

    place = ranks.found()
    assert place is not None
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ[ranks.STORE], place.world_size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    yield dist
    dist.destroy_process_group()


def summed(numbers: list[int]) -> dict[str, Any]:
    import torch

    with gloo() as dist:
        total = torch.tensor(numbers[own_rank()])
        dist.all_reduce(total)
        return {"total": int(total), "rank": own_rank(), "first": ranks.is_first_rank()}


def fails(rank: int, kind: str) -> None:
    """`rank` fails while the others wait for it in a collective."""
    import torch

    with gloo() as dist:
        if own_rank() == rank and kind == "user":
            raise RunFolderError("run folder: damaged. Delete it")
        if own_rank() == rank:
            dist.destroy_process_group()
            time.sleep(0.5)  # rank 0 knows that it lost its peer before the cause is told
            raise ValueError("a defect")
        dist.all_reduce(torch.zeros(1))


def everyone_fails() -> None:
    raise UserError("disk: full. Free 3 GB")


def dies(number: int, stubborn: bool) -> None:
    """Rank 1 dies. A stubborn rank 0 takes a signal as a wish to save and never comes to the end of its step."""
    if own_rank() == 1:
        os.kill(os.getpid(), number)
    with deferred_stop() if stubborn else contextlib.nullcontext():
        while True:
            time.sleep(0.1)


def leaves(status: int) -> None:
    if own_rank() == 1:
        os._exit(status)


def trains(folder: str) -> None:
    """Steps until asked to stop, then saves, as the trainer does; a second request would come in its middle."""
    mark = Path(folder) / f"rank-{own_rank()}"
    with deferred_stop() as stop:
        mark.with_suffix(".began").write_text(str(os.getpid()))
        while not stop.requested:
            time.sleep(0.02)
        time.sleep(0.5)
        mark.with_suffix(".saved").touch()
        raise Interrupted(7)


def one_is_interrupted(folder: str) -> None:
    if own_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def pipeline(run: RunConfig, overrides: list[str]) -> dict[str, Any]:
    """In the place of stages.run: a summary, or what the seed asks for."""
    if run.seed == 2:
        raise UserError("disk: full. Free 3 GB")
    if run.seed == 3 and own_rank() == 1:
        raise ValueError("a defect")
    print(f"rank {own_rank()} of {os.environ['WORLD_SIZE']}", flush=True)
    return {"seed": run.seed, "overrides": overrides, "tensor": run.parallel.tensor}


def joins(seeds: list[int]) -> None:
    """Process groups of ranks whose configurations may differ."""
    from nemo_qad import config, runtime

    run = config.compose(["+recipe=max", "parallel=local_tp2", f"qad.steps={seeds[own_rank()]}"])
    with runtime.process_groups(run.parallel, seed=1, threads=1, identity=runtime.identity(run)):
        pass


def test_ranks_compute_together_and_rank_0_answers() -> None:
    assert launcher.run(f"{HERE}:summed", ([3, 4],), 2) == {"total": 7, "rank": 0, "first": True}


def test_a_users_error_in_one_rank_comes_out_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^run folder: damaged\. Delete it$") as caught:
        launcher.run(f"{HERE}:fails", (1, "user"), 2)
    assert caught.value.exit_status == RunFolderError.exit_status == 2
    with pytest.raises(UserError, match=r"^disk: full") as caught:
        launcher.run(f"{HERE}:everyone_fails", (), 2)
    assert caught.value.exit_status == 1
    assert "Traceback" not in capfd.readouterr().err


def test_of_several_errors_the_cause_is_named() -> None:
    """Rank 0 fails too, as gloo tells it that rank 1 is gone."""
    with pytest.raises(launcher.RankError, match="rank 1 of 2: ValueError: a defect") as caught:
        launcher.run(f"{HERE}:fails", (1, "defect"), 2)
    assert caught.value.report.count("Traceback") == 1
    assert "in fails" in caught.value.report


@pytest.mark.parametrize(
    ("number", "words", "stubborn"), [(signal.SIGKILL, "memory", True), (signal.SIGSEGV, "native code", False)]
)
def test_a_dead_rank_ends_the_others_and_is_named(number: signal.Signals, words: str, stubborn: bool) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        launcher.run(f"{HERE}:dies", (int(number), stubborn), 2)
    assert time.monotonic() - began < BOUND
    message = str(caught.value)
    for word in ("rank 1 of 2", number.name, words, "the same command continues"):
        assert word in message, message


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_leaves_without_a_word_is_named(status: int) -> None:
    with pytest.raises(UserError, match=f"rank 1 of 2.*ended with status {status} and without a word"):
        launcher.run(f"{HERE}:leaves", (status,), 2)


def test_results_and_targets_that_cannot_be_passed() -> None:
    with pytest.raises(launcher.RankError, match=r"rank 0 of 1: .*pickle"):
        launcher.run("threading:Lock", (), 1)
    with pytest.raises(launcher.RankError, match="ModuleNotFoundError"):
        launcher.run("no_such_module:run", (), 1)


def test_one_interrupted_rank_interrupts_the_run(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launcher.run(f"{HERE}:one_is_interrupted", (str(tmp_path),), 2)
    assert time.monotonic() - began < BOUND


def parent(folder: Path) -> subprocess.Popen[str]:
    """A program that trains on two ranks in a session of its own, as a terminal would hold it."""
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from nemo_qad import launcher
try:
    launcher.run("{HERE.rpartition(".")[2]}:trains", ({str(folder)!r},), 2)
except KeyboardInterrupt:
    print("interrupted", "torch" in sys.modules, "numpy" in sys.modules)
    sys.exit(130)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def began(folder: Path) -> list[int]:
    files = [folder / f"rank-{number}.began" for number in range(2)]
    assert eventually(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"  # nobody waits for it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_request_reaches_each_rank_once(number: signal.Signals, tmp_path: Path) -> None:
    """The terminal sends Ctrl-C to all processes it can; a rank that got two would stop without saving."""
    program = parent(tmp_path)
    began(tmp_path)
    os.killpg(program.pid, number)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (130, "interrupted False False\n")
    assert [(tmp_path / f"rank-{rank}.saved").exists() for rank in range(2)] == [True, True]
    assert err == "stopping: the ranks finish their step and save; once more stops at once\n"


def test_a_second_request_does_not_wait(tmp_path: Path) -> None:
    program = parent(tmp_path)
    began(tmp_path)
    os.kill(program.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(program.pid, signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == 130
    assert not any((tmp_path / f"rank-{rank}.saved").exists() for rank in range(2))


def test_a_rank_that_dies_while_it_saves_is_named(tmp_path: Path) -> None:
    program = parent(tmp_path)
    processes = began(tmp_path)
    os.kill(program.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(processes[1], signal.SIGKILL)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "UserError: rank 1 of 2" in err and "SIGKILL" in err


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = parent(tmp_path)
    processes = began(tmp_path)
    program.kill()
    program.communicate(timeout=60)
    assert eventually(lambda: all(gone(process) for process in processes))
    assert (tmp_path / "rank-0.saved").exists()


def test_ranks_of_other_configurations_stop_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"rank 1 has qad\.steps=40, rank 0 has qad\.steps=30\. Start every rank"):
        launcher.run(f"{HERE}:joins", ([30, 40],), 2)
    assert launcher.run(f"{HERE}:joins", ([30, 30],), 2) is None
    assert "Traceback" not in capfd.readouterr().err


def test_the_command_starts_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "PIPELINE", f"{HERE}:pipeline")
    monkeypatch.chdir(tmp_path)
    given = ["+recipe=max", "parallel=local_tp2"]
    assert train.main(given) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert train.main([*given, "seed=2"]) == 1
    assert capfd.readouterr().err == "error: disk: full. Free 3 GB\n"
    assert train.main([*given, "seed=3"]) == 1
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1 and "rank 1 of 2: ValueError: a defect" in err


def test_each_job_of_a_sweep_has_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "PIPELINE", f"{HERE}:pipeline")
    monkeypatch.chdir(tmp_path)
    assert train.main(["-m", "+recipe=max", "parallel=local_tp2", "seed=1,2,3", "hydra.sweep.dir=sweep"]) == 1
    records = [json.loads((tmp_path / f"sweep/jobs/{n:03d}.json").read_text()) for n in range(3)]
    assert [record["status"] for record in records] == ["done", "failed", "failed"]
    assert records[0]["summary"]["tensor"] == 2
    assert records[0]["summary"]["overrides"] == records[0]["overrides"]
    assert [record["error"] for record in records[1:]] == ["disk: full. Free 3 GB", "rank 1 of 2: ValueError: a defect"]
    assert "2 of 3 jobs failed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("environment", "overrides", "words"),
    [
        ({}, ["parallel=local_tp2", "parallel.nodes=2", "qad.micro_batch_size=8"],
         ["parallel.nodes=2", "--nnodes=2", "--nproc-per-node=2"]),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}, ["parallel=local_tp2"],
         ["ranks_per_node=2", "4 were started", "parallel.ranks_per_node=4"]),
        ({"WORLD_SIZE": "two", "RANK": "0"}, [], ["WORLD_SIZE=two"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "host"}, [], ["1 ranks, but 2 were started"]),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["-m", "parallel=local_tp2", "seed=1,2"], ["option=-m", "whole sweep"]),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_are_refused(
    environment: dict[str, str], overrides: list[str], words: list[str], tmp_path: Path
) -> None:
    """Before torch is imported, with exit status 2 or 1."""
    program = "import sys; from nemo_qad.train import main; s = main(); print(s, 'torch' in sys.modules)"
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", program, "+recipe=max", *overrides], env=os.environ | environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert time.monotonic() - began < 20  # a second or two on an idle machine
    assert result.stdout.strip() in ("2 False", "1 False")
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    assert [word for word in words if word not in result.stderr] == [], result.stderr


def test_experts_cut_both_ways_need_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ParallelConfig(name="both", ranks_per_node=4, expert=2, expert_tensor=2)
    monkeypatch.setattr(ranks, "_has_cuda_driver", lambda: False)
    with pytest.raises(ConfigError, match=r"parallel\.expert_tensor=2.*GPUs alone.*Give parallel\.expert_tensor=1"):
        ranks.local_ranks(both)
    monkeypatch.setattr(ranks, "_has_cuda_driver", lambda: True)
    assert ranks.local_ranks(both) == 4
