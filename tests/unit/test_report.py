"""The report and its pictures from run folders that are whole, half-finished or damaged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from run_folders import write, write_run

from nemo_qad.errors import UserError
from nemo_qad.evaluation import plots
from nemo_qad.evaluation.recovery import recover
from nemo_qad.evaluation.report import headline, next_command, write_report
from nemo_qad.evaluation.results import HeldOutPoint, read_held_out, read_results
from nemo_qad.files import replace_text


def _rows(text: str) -> dict[str, list[str]]:
    """Every table row of the report by its first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return {row[0]: row[1:] for row in rows}


def test_verdict_comes_first_and_the_numbers_are_those_of_the_run(tmp_path):
    plots.write_plots(write_run(tmp_path / "run"))
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    assert lines[0] == "# tiny_hybrid, recipe four_over_six"
    assert lines[1].startswith("**QAD took away 75 % of the damage that PTQ did")
    assert "0.00800 -> 0.00200" in lines[1] and "3.20x smaller" in lines[1]
    assert "PTQ kept 96.0 % of BF16's accuracy (median of 3 tasks" in lines[2]
    rows = _rows(text)
    assert rows["copy"] == ["90.00 %", "86.40 %", "89.55 %", "96.0 %", "99.5 %"]
    assert rows["brackets"][3:] == ["-", "-"]
    assert "Left out of the median and the minimum: brackets" in text
    assert rows["held-out KL to BF16, nats per token"][:3] == ["0", "0.008000", "0.002000"]
    assert "Perplexity gap closed by QAD: 75.0 %" in text
    assert rows["exported"] == ["1.25 MB", "3.20x"]
    assert "41 weights, decoded" in text
    assert rows["routed experts"] == ["weights", "nvfp4", "32", "32"]
    assert rows["qad"] == ["1 h 2 min", "3.25 GiB"] and rows["export"] == ["3.0 s", "-"]
    assert rows["teacher (reused)"][0] == "3 min 20 s"
    assert "step 80 of 100" in text and rows["torch"] == ["2.14.1"]


def test_pictures_are_linked_relatively_and_exist(tmp_path):
    run_dir = write_run(tmp_path / "run")
    assert "![" not in write_report(run_dir).read_text(encoding="utf-8")
    plots.write_plots(run_dir)
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", write_report(run_dir).read_text(encoding="utf-8"))
    assert links == ["plots/recovery.png", "plots/held_out_kl.png"]
    for link in links:
        height, width, _ = matplotlib.image.imread(run_dir / link).shape
        assert width == 1800 and 500 < height < 2000


def test_ptq_only_run_says_what_is_missing_and_what_to_do(tmp_path):
    run_dir = write_run(tmp_path / "run", qad=False)
    assert [path.name for path in plots.write_plots(run_dir)] == ["recovery.png"]
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "Missing in this run folder: qad, export." in text
    assert "Run QAD" in text and "Not exported yet." in text
    assert _rows(text)["copy"] == ["90.00 %", "86.40 %", "-", "96.0 %", "-"]
    assert f"run_dir={run_dir}" in text.split("## Next")[1]


def test_every_stage_may_be_absent_or_damaged(tmp_path):
    for stage in ("teacher", "ptq", "qad", "evaluate", "export"):
        run_dir = write_run(tmp_path / f"without_{stage}")
        (run_dir / "stages" / f"{stage}.json").unlink()
        assert re.search(
            f"Missing in this run folder: {stage}", write_report(run_dir).read_text(encoding="utf-8")
        )
        for content in (
            "{}",
            '{"models": 3, "coverage": {}, "seconds": "x", "bytes_bf16": null}',
            "{half",
            "[]",
        ):
            (run_dir / "stages" / f"{stage}.json").write_text(content, encoding="utf-8")
            if content.startswith('{"models"'):
                plots.write_plots(run_dir)
            assert "## Next" in write_report(run_dir).read_text(encoding="utf-8")
    (tmp_path / "empty").mkdir()
    assert "finished so far: nothing" in write_report(tmp_path / "empty").read_text(encoding="utf-8")


def test_qad_that_did_harm_is_called_so(tmp_path):
    results = read_results(write_run(tmp_path / "run", kl_qad=0.010))
    assert headline(results).startswith("QAD did not help")
    what, command = next_command(results)
    assert "lower learning rate" in what and "qad.learning_rate=1.0e-05" in command


@pytest.mark.parametrize(
    ("factor", "sentence"), [(0.9, "pushed too far"), (0.97, "as far as intended"), (1.0, "alone keeps")]
)
def test_band_of_ptq_is_in_the_verdict(tmp_path, factor, sentence):
    text = write_report(write_run(tmp_path / "run", factor_ptq=factor)).read_text(encoding="utf-8")
    assert sentence in text.split("## Accuracy")[0]


def test_next_command_repeats_recorded_overrides(tmp_path):
    run_dir = write_run(tmp_path / "run", qad=False)
    overrides = ["+recipe=mse", "qad.steps=100", "stages=[ptq,evaluate]", "run_dir=elsewhere"]
    write(run_dir / "environment.json", {"overrides": overrides})
    _, command = next_command(read_results(run_dir))
    assert command == f"python -m nemo_qad.train +recipe=mse qad.steps=100 run_dir={run_dir}"


def test_metrics_of_a_resumed_and_killed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    entries = [
        {"stage": "qad", "step": 0, "held_out_kl": 0.9},
        {"stage": "teacher", "step": 5, "held_out_kl": 7.0},
        {"stage": "qad", "step": 20, "held_out_kl": 0.5},
        {"stage": "qad", "step": 10, "held_out_kl": 0.6, "average_held_out_kl": 0.7},
        {"stage": "qad", "step": 20, "held_out_kl": 0.4},
        {"stage": "qad", "step": 30, "held_out_kl": float("nan")},
        {"stage": "qad", "step": 31, "kl": 0.3},
    ]
    path.write_text("".join(json.dumps(e) + "\n" for e in entries) + '{"stage": "qad", "st', encoding="utf-8")
    assert read_held_out(path) == [HeldOutPoint(0, 0.9), HeldOutPoint(10, 0.6, 0.7), HeldOutPoint(20, 0.4)]
    assert read_held_out(tmp_path / "none.jsonl") == []


def test_summary_of_a_run(tmp_path):
    run_dir = write_run(tmp_path / "run")
    summary = read_results(run_dir).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary == {
        "recipe": "four_over_six", "model": "tiny_hybrid", "seed": 7, "kl_ptq": 0.008, "kl_qad": 0.002,
        "kl_fall": pytest.approx(0.75), "recovery_ptq_median": pytest.approx(0.96),
        "recovery_ptq_min": pytest.approx(0.96), "recovery_qad_median": pytest.approx(0.995),
        "recovery_qad_min": pytest.approx(0.995), "bytes_bf16": 4_000_000, "bytes_export": 1_250_000,
        "run_dir": str(run_dir),
    }  # fmt: skip
    partial = read_results(write_run(tmp_path / "partial", qad=False)).summary()
    assert partial.keys() == summary.keys()
    assert partial["kl_qad"] is partial["kl_fall"] is partial["bytes_export"] is None


def test_the_fall_never_mixes_two_samples_of_text(tmp_path):
    run_dir = write_run(tmp_path / "run")
    evaluate = json.loads((run_dir / "stages" / "evaluate.json").read_text(encoding="utf-8"))
    del evaluate["models"]["qad"]
    write(run_dir / "stages" / "evaluate.json", evaluate)
    assert read_results(run_dir).kl_fall == pytest.approx(1 - 0.0025 / 0.009)


def test_pictures_are_the_same_bytes_twice_and_show_other_numbers_otherwise(tmp_path):
    ptq = recover({"a": 0.5, "b": 0.6}, {"a": 0.48, "b": 0.61})
    points = [HeldOutPoint(0, 0.5), HeldOutPoint(10, 0.1, 0.2), HeldOutPoint(20, 0.01, 0.02)]
    for name in ("one", "two"):
        plots.draw_recovery(tmp_path / name / "a.png", {"ptq": ptq}, low=0.95, high=0.99)
        plots.draw_held_out_kl(tmp_path / name / "b.png", points, kl_ptq=0.5, kept="average", kept_step=20)
    for picture in ("a.png", "b.png"):
        assert (tmp_path / "one" / picture).read_bytes() == (tmp_path / "two" / picture).read_bytes()
    plots.draw_held_out_kl(tmp_path / "c.png", points, kl_ptq=0.5, kept="best", kept_step=20)
    assert (tmp_path / "c.png").read_bytes() != (tmp_path / "one" / "b.png").read_bytes()
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.draw_held_out_kl(tmp_path / "d.png", [], kl_ptq=None, kept=None, kept_step=None)


def test_a_failed_write_leaves_the_old_report_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    replace_text(path, "older")
    with path.open(encoding="utf-8") as reader:
        replace_text(path, "old")
        assert reader.read() == "older"  # who reads while it is replaced sees a whole file

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nemo_qad.files.flush", full)
    with pytest.raises(UserError, match="disk is full"):
        replace_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.md"]


def test_reports_need_no_torch():
    code = (
        "import sys, nemo_qad.evaluation.recovery, nemo_qad.evaluation.results, nemo_qad.evaluation.report, "
        "nemo_qad.evaluation.console, nemo_qad.evaluation.plots, nemo_qad.sweep;"
        "print(sorted({'torch', 'megatron', 'modelopt'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
