"""python -m nemo_qad.doctor RUN says what a start then does: told first, done after, compared."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_frozen_teacher import ONE
from test_resume import newest, qad, source

from nemo_qad import doctor, runtime
from nemo_qad.checkpoint import manifest
from nemo_qad.errors import UserError
from nemo_qad.training.interrupt import Interrupted

__all__ = ["source"]  # a fixture


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ONE, seed=1, threads=1):
        yield


@pytest.fixture(scope="module")
def stopped(source: Path) -> Path:
    """A run stopped in step 5, with checkpoints of steps 4 and 5."""
    with pytest.raises(Interrupted):
        qad(source, source / "stopped", stop=5)
    return source / "stopped"


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def told(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    status = doctor.main([str(run), *arguments])
    output = capsys.readouterr().out
    assert max(map(len, (line for line in output.splitlines() if line.startswith("|")))) <= 80
    return status, output


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_sound_run_continues_as_told(source: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = told(run, capsys)
    assert status == 0 and "All as it was written" in output, output
    assert output.splitlines()[-1].endswith("continues QAD after step 5 of 10, with sample 10.")
    assert any("continues after step 5" in text for text in qad(source, run))
    status, output = told(run, capsys)
    assert status == 0 and "stage qad" in output and "begins with stage evaluate" in output.splitlines()[-1]


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip])
def test_a_damaged_checkpoint_is_passed_over_as_told(
    source: Path, run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    path = next(newest(run).glob("*.distcp"))
    damage(path)
    status, output = told(run, capsys)
    assert status == 1 and f"Wrong: {path}: " in output and "QAD step 5     | DAMAGED" in output, output
    last = output.splitlines()[-1]
    assert "1 damaged" in last and "after step 4 of 10" in last and "the damaged one of step 5 is passed over" in last
    status, output = told(run, capsys, "--quick")
    assert status == (0 if damage is flip else 1), output  # which sees names and sizes
    assert any("continues after step 4" in text for text in qad(source, run))


def test_best_weights_that_are_lost_are_said_and_made_again(
    source: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "qad/best/tensors.safetensors")
    status, output = told(run, capsys)
    assert status == 1 and "best weights   | DAMAGED" in output
    said = qad(source, run)
    assert any("The best weights so far are lost" in text for text in said), said
    assert told(run, capsys)[0] == 0


def test_best_weights_that_stood_aside_come_back(source: Path, run: Path) -> None:
    """A kill between the two renames of a replacement."""
    before = (run / "qad/best/tensors.safetensors").read_bytes()
    os.rename(run / "qad/best", run / "qad/.best.77.old")
    (run / "qad/.best.77.tmp").mkdir()
    with pytest.raises(Interrupted):
        qad(source, run, stop=6)
    assert (run / "qad/best").is_dir() and not list((run / "qad").glob(".best*"))
    assert len((run / "qad/best/tensors.safetensors").read_bytes()) == len(before)


def test_a_start_that_would_stop_is_told_with_its_reason(
    source: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "ptq/tensors.safetensors")
    status, output = told(run, capsys)
    assert status == 1 and "The same command stops: " in output.splitlines()[-1]
    assert str(run / "ptq/tensors.safetensors") in output.splitlines()[-1]
    with pytest.raises(UserError, match="missing or changed since stage ptq"):
        qad(source, run)


def test_without_a_whole_checkpoint_it_stops_as_told(
    source: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run / "qad/checkpoints").glob("step-*/checkpoint.json"):
        path.unlink()
    status, output = told(run, capsys)
    assert status == 1 and "none of the 2 checkpoints of QAD is whole" in output.splitlines()[-1]
    with pytest.raises(UserError, match="None of the 2 checkpoints"):
        qad(source, run)


def test_a_checkpoint_of_another_origin_stops_as_told(
    source: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = newest(run)
    found = manifest.read_manifest(folder)
    origin = {**found["meta"]["made_from"], "teacher": "0" * 64}
    manifest.write_manifest(folder, found["files"], {**found["meta"], "made_from": origin})
    status, output = told(run, capsys)
    assert status == 1 and "trained from another teacher" in output.splitlines()[-1]
    with pytest.raises(UserError, match="another teacher"):
        qad(source, run)


def test_configuration_lock_and_rests_are_seen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "config.yaml").read_text()
    assert "  steps: 10\n" in text
    (run / "config.yaml").write_text(text.replace("  steps: 10\n", "  steps: 11\n"))
    (run / "qad/checkpoints/.step-000006.tmp").mkdir()
    status, output = told(run, capsys)
    assert status == 1 and "config.yaml: its hash is" in output and "what a killed save left" in output
    (run / "config.yaml").write_text(text)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, output = told(run, capsys)
    assert status == 0 and "A process works in it" in output.splitlines()[-1] and "killed save" not in output


def test_what_is_not_a_run_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {run.parent: "Its run folders are", run / "qad": "not a run folder", run / "x": "no such"}
    for folder, words in answers.items():
        assert doctor.main([str(folder)]) == 1 and words in capsys.readouterr().err


def test_an_index_that_asks_for_a_program_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle is looked through for names before anything reads it, also where its digest was written anew."""
    folder = newest(run)
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    found = manifest.read_manifest(folder)
    files = {**found["files"], ".metadata": manifest.describe_file(folder / ".metadata")}
    manifest.write_manifest(folder, files, found["meta"])
    status, output = told(run, capsys, "--quick")
    assert status == 1 and "asks for os.system" in output, output
