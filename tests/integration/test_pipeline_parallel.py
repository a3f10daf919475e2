"""The main command on several ranks: the run of one rank again, whatever the layout and whoever starts the ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from safetensors.torch import load_file
from test_pipeline import SHORT

from nemo_qad.files import sha256

LAYOUTS = {name: [f"parallel=local_{name}"] for name in ("tp2", "cp2", "ep2", "pp2")} | {
    "cp2_ep2": ["parallel=local_cp2_ep2", "qad.micro_batch_size=4"],
}


def _run(root: Path, *overrides: str, **program: Any) -> tuple[int, str]:
    return command.run(root, SHORT, *overrides, **program)


def _result(run: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"stages/{stage}.json").read_text())
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank, in ROOT/one."""
    root = tmp_path_factory.mktemp("parallel")
    status, output = _run(root, f"run_dir={root / 'one'}")
    assert status == 0, output
    return root


@cache
def _whole_run(root: Path, layout: str) -> str:
    """Of a layout, in ROOT/LAYOUT: what it printed."""
    program = command.TORCHRUN if layout == "cp2" else command.MODULE
    status, output = _run(root, f"run_dir={root / layout}", *LAYOUTS[layout], program=program)
    assert status == 0, output
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_run_of_one_rank_again(one: Path, layout: str) -> None:
    root, run = one, one / layout
    output = _whole_run(root, layout)
    lines = output.splitlines()
    assert "teacher: reused from" in output and output.count("weights decoded again") == 1
    assert sum(line.startswith("Done: checkpoint in") for line in lines) == 1, output
    for stage in ("ptq", "qad"):
        ours, theirs = (_result(root / name, stage)["held_out_kl"] for name in (layout, "one"))
        assert ours == pytest.approx(theirs, rel=1e-5 if stage == "ptq" else 2e-2)
    ours, theirs = (_result(root / name, "evaluate") for name in (layout, "one"))
    assert ours["num_held_out_tokens"] == theirs["num_held_out_tokens"]
    for model, tolerance in (("bf16", 1e-6), ("ptq", 1e-5), ("qad", 1e-4)):
        assert ours["models"][model]["perplexity"] == pytest.approx(
            theirs["models"][model]["perplexity"], rel=tolerance
        )
        questions = ours["num_questions"]
        for task, score in theirs["models"][model]["tasks"].items():
            assert abs(ours["models"][model]["tasks"][task] - score) <= 2 / questions, task
    _compare_exports(run / "export", root / "one/export")
    ours, theirs = (len((folder / "metrics.jsonl").read_text().splitlines()) for folder in (run, root / "one"))
    assert ours == theirs


def _compare_exports(ours: Path, theirs: Path) -> None:
    """Same names, shapes and types. A weight at the border of two codes may fall to either side, few do."""
    found, expected = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        if value.dtype == torch.uint8:
            assert (found[name] == value).float().mean() > 0.97, name
    for name in ("config.json", "hf_quant_config.json", "tokenizer.json"):
        assert sha256(ours / name) == sha256(theirs / name)


def test_stopped_on_two_ranks_continues_to_the_same_bytes(one: Path) -> None:
    run = one / "stopped"
    extra = [f"run_dir={run}", "parallel=local_ep2", "stages=[ptq,qad]"]
    status, output = command.interrupt(one, SHORT, "qad 3/6", *extra)
    assert status == 130 and "interrupted" in output and not (run / "stages/qad.json").exists(), output
    status, output = _run(one, *extra)
    _whole_run(one, "ep2")
    assert status == 0 and "continues after step" in output, output
    ours, theirs = (load_file(one / name / "qad/student/tensors.safetensors") for name in ("stopped", "ep2"))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


def test_a_rank_killed_in_the_middle_loses_no_finished_stage(one: Path) -> None:
    run = one / "killed"
    process = command.start(one, SHORT, f"run_dir={run}", "parallel=local_cp2", "qad.steps=2000", "stages=[ptq,qad]")
    deadline = time.monotonic() + 120
    while not (run / "qad/checkpoints/step-000004").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    killed = time.monotonic()
    rest, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1 and "SIGKILL" in rest and "Finished stages" in rest, rest
    assert _result(run, "ptq")["held_out_kl"] > 0
    assert (run / "qad/checkpoints").is_dir()


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_the_teachers_file_on_two_ranks(one: Path, layout: str) -> None:
    """Written by two ranks it holds what one rank writes, and QAD from it is the same."""
    for name, extra in (("sparse_one", []), (f"sparse_{layout}", [f"parallel=local_{layout}"])):
        cache = f"cache_dir={one / name / 'cache'}"
        (one / name / "cache").mkdir(parents=True, exist_ok=True)
        for known in (*(one / "cache").glob("data-*"), *(one / "cache").glob("teacher-*")):
            link = one / name / "cache" / known.name
            link.exists() or link.symlink_to(known)
        if not (one / name / "run/stages/qad.json").exists():
            status, output = _run(
                one, cache, f"run_dir={one / name / 'run'}", "qad.loss=top_k", "qad.sparse_values=64",
                "stages=[ptq,logits,qad]", *extra,
            )  # fmt: skip
            assert status == 0, output
    ours, theirs = (_result(one / name / "run", "qad") for name in (f"sparse_{layout}", "sparse_one"))
    for key in ("held_out_kl_ptq", "held_out_kl"):
        assert ours[key] == pytest.approx(theirs[key], rel=2e-2)
    ours, theirs = (_result(one / name / "run", "logits") for name in (f"sparse_{layout}", "sparse_one"))
    assert ours["num_bytes"] == theirs["num_bytes"]


def test_ctrl_c_while_the_teacher_trains_for_two_ranks_continues_it(tmp_path: Path, one: Path) -> None:
    """In a process of its own, behind the first rank: it saves, and the next start goes on from there."""
    (tmp_path / "cache").mkdir()
    for data in (one / "cache").glob("data-*"):
        (tmp_path / "cache" / data.name).symlink_to(data)
    extra = ["stages=[ptq]", "run_dir=run", "parallel=local_tp2"]
    status, output = command.interrupt(tmp_path, SHORT, "teacher 12/60", *extra)
    assert status == 130 and "Traceback" not in output, output
    status, output = _run(tmp_path, *extra)
    assert status == 0 and "teacher: continues after step" in output, output
    ours, theirs = (next((root / "cache").glob("teacher-*/training.json")) for root in (tmp_path, one))
    assert json.loads(ours.read_text())["digest"] == json.loads(theirs.read_text())["digest"]
