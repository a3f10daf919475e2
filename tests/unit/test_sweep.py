"""The comparison of a sweep's runs: whole, half-finished, failed, damaged."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from run_folders import write, write_run

from nemo_qad import sweep
from nemo_qad.errors import UserError
from nemo_qad.evaluation.results import read_results


def _job(
    sweep_dir: Path, number: int, overrides: list[str], *, error: str | None = None, kl: float = 0.002
) -> None:
    run_dir = sweep_dir / f"run{number}"
    summary = None
    if error is None:
        recipe = next(item.split("=")[1] for item in overrides if item.startswith("+recipe="))
        summary = {**read_results(write_run(run_dir, kl_qad=kl)).summary(), "recipe": recipe}
    content = {"overrides": overrides, "run_dir": str(run_dir), "status": "failed" if error else "done"}
    write(sweep_dir / "jobs" / f"{number:03d}.json", {**content, "error": error, "summary": summary})


@pytest.fixture
def sweep_dir(tmp_path) -> Path:
    """Five jobs: two recipes done, one failed, one without a record, one with a damaged record."""
    _job(tmp_path, 0, ["+recipe=max", "seed=1", "qad=tiny"], kl=0.004)
    _job(tmp_path, 1, ["+recipe=mse", "seed=1", "qad=tiny"], error="calibration found 3 scales that are 0")
    _job(tmp_path, 3, ["+recipe=four_over_six_nvfp4_kv", "seed=2", "qad=tiny"], kl=0.003)
    (tmp_path / "jobs" / "004.json").write_text("{half", encoding="utf-8")
    return tmp_path


def _shown(sweep_dir: Path) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    sweep.show(sweep_dir, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n").splitlines()


def test_table_names_every_job_fits_80_columns_and_ends_with_the_best(sweep_dir):
    lines = _shown(sweep_dir)
    assert max(len(line) for line in lines[:-1]) <= 80
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    assert cells[1] == ["max", "0.00800", "0.00400", "50 %", "96.0 / 96.0", "99.5 / 99.5", "3.20x"]
    assert cells[2][0] == "seed=1"
    assert [row[1] for row in cells if row[1] in ("FAILED", "MISSING")] == ["FAILED", "MISSING", "MISSING"]
    assert "failed: mse seed=1: calibration found 3 scales that are 0" in lines
    assert lines[-1] == (
        "2 of 5 runs done, 1 failed, 2 missing. Lowest held-out KL after QAD: four_over_six_nvfp4_kv seed=2, "
        f"0.00300. Next: read {sweep_dir}/comparison.md"
    )


def test_comparison_is_saved_with_its_picture_and_the_errors(sweep_dir):
    _shown(sweep_dir)
    text = (sweep_dir / "comparison.md").read_text(encoding="utf-8")
    assert "](comparison.png)" in text and (sweep_dir / "comparison.png").stat().st_size > 10_000
    assert "| max seed=1 | 0.00800 | 0.00400 | 50 % |" in text and "| 1.25 MB |" in text
    assert "- mse seed=1: calibration found 3 scales that are 0" in text


def test_only_overrides_that_differ_are_shown(tmp_path):
    _job(tmp_path, 0, ["+recipe=max", "qad.steps=10", "seed=1"])
    _job(tmp_path, 1, ["+recipe=max", "qad.steps=20", "seed=1"])
    jobs = sweep.read_jobs(tmp_path)
    assert [sweep.differing(job, jobs) for job in jobs] == [["qad.steps=10"], ["qad.steps=20"]]
    assert sweep.summary_table(jobs).row_count == 2


def test_sweep_without_qad_or_without_any_number(tmp_path):
    _job(tmp_path, 0, ["+recipe=max"], error="no disk")
    assert _shown(tmp_path)[-1].startswith("0 of 1 runs done, 1 failed. Next: read")
    assert not (tmp_path / "comparison.png").exists()
    summary = read_results(write_run(tmp_path / "ptq", qad=False)).summary()
    write(
        tmp_path / "jobs" / "001.json", {"status": "done", "overrides": ["+recipe=mse"], "summary": summary}
    )
    assert "Lowest held-out KL after PTQ: four_over_six, 0.00800" in _shown(tmp_path)[-1]


def test_callback_shows_the_table_and_never_fails_a_sweep(sweep_dir, tmp_path, capsys):
    callback = sweep.SweepTable()
    callback.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep_dir)}}}))
    assert "2 of 5 runs done" in capsys.readouterr().out
    callback.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "none")}}}))
    assert "No comparison" in capsys.readouterr().out


def test_command_line(sweep_dir, tmp_path, capsys):
    assert sweep.main([str(sweep_dir)]) == 0
    assert "2 of 5 runs done" in capsys.readouterr().out
    assert sweep.main([str(tmp_path / "none")]) == 1
    assert "holds no jobs" in capsys.readouterr().err
    assert sweep.main([]) == 2
    with pytest.raises(UserError, match="nothing to compare"):
        sweep.show(tmp_path / "none")
