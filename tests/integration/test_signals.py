"""Stop signals as a scheduler sends them, to the main command and to one of its ranks (I4)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import command
import pytest
from test_pipeline import SHORT

from nemo_qad.checkpoint import manifest

STAGES = "stages=[ptq,qad]"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and teacher are in its cache."""
    root = tmp_path_factory.mktemp("signals")
    status, output = command.run(root, SHORT, f"run_dir={root / 'first'}", "stages=[ptq]")
    assert status == 0, output
    return root


def steps(run: Path) -> list[int]:
    """Those that training has recorded so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return [entry["step"] for entry in entries if "kl" in entry]


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while not (found := steps(run)) or found[-1] < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(text) for text in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_signal_to_one_rank_of_four_stops_all_after_the_same_step(root: Path) -> None:
    run = root / "four"
    extra = [f"run_dir={run}", "parallel=local_tp2_cp2", "qad.save_every=1000", "qad.validate_every=1000", STAGES]
    process = command.start(root, SHORT, *extra, "qad.steps=1000")
    wait_for_step(process, run, 7)
    ranks = ranks_of(process)
    assert len(ranks) == 4
    os.kill(ranks[2], signal.SIGTERM)
    sent = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert time.monotonic() - sent < 60
    (folder,) = (run / "qad/checkpoints").glob("step-*")
    found = manifest.read_manifest(folder)
    assert not list(manifest.problems(folder, found["files"], found["files"]))
    assert found["meta"]["ranks"] == 4 and 7 <= found["meta"]["step"] <= 9
    assert steps(run)[-1] == found["meta"]["step"], "a step after the saved one was lost"
    assert f"after step {found['meta']['step']}" in output.splitlines()[-1], output


def test_a_second_signal_leaves_at_once(root: Path) -> None:
    """A step takes many seconds here: what ends sooner has not finished it."""
    run = root / "second"
    extra = [f"run_dir={run}", "qad.global_batch_size=2048", "qad.micro_batch_size=8", "qad.save_every=1", STAGES]
    process = command.start(root, SHORT, *extra, "evaluation.held_out_samples=16")
    deadline = time.monotonic() + 180
    while not (run / "qad/best/meta.json").exists():  # of step 0, after which the first step begins
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None, "the first signal lets the step be finished"
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - sent < 10 and process.returncode == 75, output
    assert not steps(run) and not list((run / "qad").glob("checkpoints/step-*")), output
