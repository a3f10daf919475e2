"""The main command as a user runs it: from nothing to a checkpoint, stopped, continued, and misused."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import command
import pytest
from safetensors.numpy import load_file

SHORT = [
    "+recipe=four_over_six", "experiment=quick", "teacher.steps=60", "teacher.warmup_steps=10", "qad.steps=6",
    "qad.validate_every=2", "qad.save_every=2", "calibration.num_samples=16", "evaluation.num_questions=20",
    "qad.average_decay=0.5", "evaluation.held_out_samples=16", "qad.validation_samples=16", "threads=1",
]  # fmt: skip


def _run(root: Path, *overrides: str) -> tuple[int, str]:
    return command.run(root, SHORT, *overrides)


def _interrupt(root: Path, when: str, *overrides: str) -> tuple[int, str]:
    return command.interrupt(root, SHORT, when, *overrides)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, str]:
    """The uninterrupted run, and what it printed."""
    root = tmp_path_factory.mktemp("pipeline")
    status, output = _run(root, f"run_dir={root / 'straight'}")
    assert status == 0, output
    return root, output


def _markers(folder: Path) -> dict[str, float]:
    return {path.stem: path.stat().st_mtime for path in (folder / "stages").glob("*.json")}


def _record(run: Path) -> list[tuple]:
    """metrics.jsonl without what depends on the clock."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(sorted((k, v) for k, v in e.items() if k != "tokens_per_second")) for e in entries]


def test_from_nothing_to_a_checkpoint_and_a_report(straight):
    root, output = straight
    run = root / "straight"
    assert sorted(_markers(run)) == ["evaluate", "export", "ptq", "qad", "teacher"]
    assert "Done" in output.splitlines()[-1] and str(run / "export") in output
    for name in ("report.md", "plots/recovery.png", "plots/held_out_kl.png", "metrics.jsonl", "environment.json",
                 "export/config.json", "export/hf_quant_config.json", "export/tokenizer.json"):  # fmt: skip
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").iterdir())
    scores = json.loads((run / "stages/evaluate.json").read_text())["models"]
    assert set(scores) == {"bf16", "ptq", "qad"} and scores["bf16"]["held_out_kl"] == 0
    assert scores["ptq"]["held_out_kl"] > 0 and scores["qad"]["held_out_kl"] > 0
    export = json.loads((run / "stages/export.json").read_text())
    assert export["verified_tensors"] > 40 and export["bytes_export"] < 0.7 * export["bytes_bf16"]


def test_second_run_skips_everything_and_is_short(straight):
    root, _ = straight
    before = _markers(root / "straight")
    status, output = _run(root, f"run_dir={root / 'straight'}")
    assert status == 0, output
    assert _markers(root / "straight") == before
    assert output.count("finished before, skipped") == 4 and "reused" in output


def test_stopped_qad_continues_to_the_same_bytes(straight):
    root, _ = straight
    run = root / "stopped"
    status, output = _interrupt(root, "qad 3/6", f"run_dir={run}")
    assert status == 130 and "interrupted" in output, output
    assert not (run / "stages/qad.json").exists() and (run / "stages/ptq.json").exists()
    status, output = _run(root, f"run_dir={run}")
    assert status == 0 and "continues after step" in output, output
    ours, theirs = (load_file(root / name / "qad/student/tensors.safetensors") for name in ("stopped", "straight"))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert _record(root / "stopped") == _record(root / "straight")


@pytest.mark.parametrize(
    ("when", "stages", "kept"),
    [
        ("Calibrating, batch 1", "[ptq]", ["teacher"]),
        ("evaluate 3/", "[ptq,qad,evaluate]", ["ptq", "qad", "teacher"]),
    ],
)
def test_ctrl_c_keeps_what_is_finished(straight, when, stages, kept):
    root, _ = straight
    run = root / f"ctrl-c-{len(kept)}"
    status, output = _interrupt(root, when, f"run_dir={run}", f"stages={stages}")
    assert status == 130 and "interrupted" in output, output
    before = _markers(run)
    assert sorted(before) == kept
    assert _run(root, f"run_dir={run}", f"stages={stages}")[0] == 0
    after = _markers(run)
    assert {name: after[name] for name in kept} == before


def test_ctrl_c_while_the_teacher_trains_continues_it(tmp_path, straight):
    root, _ = straight
    (tmp_path / "cache").mkdir()
    for data in (root / "cache").glob("data-*"):
        (tmp_path / "cache" / data.name).symlink_to(data)
    status, output = _interrupt(tmp_path, "teacher 12/60", "stages=[ptq]", "run_dir=run")
    assert status == 130, output
    status, output = _run(tmp_path, "stages=[ptq]", "run_dir=run")
    assert status == 0 and "teacher: continues after step" in output, output
    ours, theirs = (next((r / "cache").glob("teacher-*/training.json")) for r in (tmp_path, root))
    assert json.loads(ours.read_text())["digest"] == json.loads(theirs.read_text())["digest"]


def test_run_folder_of_another_configuration_is_refused(straight):
    root, _ = straight
    started = time.monotonic()
    status, output = _run(root, f"run_dir={root / 'straight'}", "qad.learning_rate=2e-4")
    assert status == 2 and "another configuration" in output and "learning_rate" in output, output
    assert time.monotonic() - started < 60


def test_damaged_student_is_named_and_nothing_is_retrained(straight):
    root, _ = straight
    run = root / "damaged"
    assert _run(root, f"run_dir={run}", "stages=[ptq]")[0] == 0
    path = run / "ptq/tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, output = _run(root, f"run_dir={run}", "stages=[ptq,qad]")
    assert status == 1 and str(path) in output, output
    assert "Calibrating" not in output and not (run / "stages/qad.json").exists()


@pytest.mark.parametrize("damage", ["truncated", "no config", "wrong model", "other words"])
def test_wrong_teacher_is_refused(straight, tmp_path, damage):
    root, _ = straight
    source = next((root / "cache").glob("teacher-*/model"))
    folder = tmp_path / "teacher"
    folder.mkdir()
    for path in source.iterdir():
        raw = path.read_bytes()
        if damage == "truncated" and path.suffix == ".safetensors":
            raw = raw[:-100]
        if damage == "other words" and path.name == "tokenizer.json":
            raw = raw.replace(b'"<pad>"', b'"<fill>"')
        if not (damage == "no config" and path.name == "config.json"):
            (folder / path.name).write_bytes(raw)
    extra = ["model.hidden_size=64"] if damage == "wrong model" else []
    status, output = _run(root, f"teacher.path={folder}", f"run_dir={tmp_path / 'run'}", *extra)
    assert status in (1, 2) and str(folder) in output and "Traceback" not in output, output


def test_given_teacher_is_used(straight, tmp_path):
    root, _ = straight
    source = next((root / "cache").glob("teacher-*/model"))
    status, output = _run(root, f"teacher.path={source}", f"run_dir={tmp_path / 'run'}", "stages=[ptq]")
    assert status == 0 and "teacher 1" not in output, output
    assert "Not in this run: qad" in output.splitlines()[-1]
    ours, theirs = (load_file(r / "ptq/tensors.safetensors") for r in (tmp_path / "run", root / "straight"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_empty_data_folder_is_refused(straight, tmp_path):
    root, _ = straight
    status, output = _run(root, "data=indexed", f"data.path={tmp_path}", f"run_dir={tmp_path / 'run'}")
    assert status in (1, 2) and str(tmp_path) in output and "Traceback" not in output, output


def test_stage_without_what_it_needs_says_so(straight, tmp_path):
    root, _ = straight
    status, output = _run(root, f"run_dir={tmp_path / 'run'}", "stages=[evaluate]")
    assert status == 1 and "needs stage ptq" in output, output


def test_disk_without_room_is_said_before_anything_is_written(straight, tmp_path):
    root, _ = straight
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        status, output = _run(root, f"run_dir={small / 'run'}", "stages=[ptq]")
        assert status == 1 and "MiB are free" in output and "Calibrating" not in output, output
        assert not (small / "run/ptq").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)
