"""What reports say of a run whose teacher was a file of sparse logits: its KL is not that of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import CONFIG, write, write_run

from nemo_qad.evaluation.report import headline, missing_stages, write_report
from nemo_qad.evaluation.results import STAGES, read_results
from nemo_qad.schema import Loss, Stage


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = write_run(tmp_path / "run")
    config = CONFIG.replace("qad: {name: tiny,", "qad: {name: tiny, loss: top_k, sparse_values: 64,")
    (run_dir / "config.yaml").write_text(config, encoding="utf-8")
    write(run_dir / "stages" / "logits.json", {"seconds": 61.0, "reused": True, "peak_gib": 1.25})
    return run_dir


def test_reports_know_the_stages_and_losses_of_the_schema(run_dir):
    assert tuple(stage.value for stage in Stage) == STAGES
    for loss in Loss:
        text = (run_dir / "config.yaml").read_text().replace("loss: top_k", f"loss: {loss.value}")
        (run_dir / "other").mkdir(exist_ok=True)
        (run_dir / "other" / "config.yaml").write_text(text)
        assert read_results(run_dir / "other").is_sparse is loss.is_sparse


def test_the_stage_is_asked_for_and_counted_where_the_loss_needs_it(run_dir, tmp_path):
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "| logits (reused) | 1 min 1 s | 1.25 GiB |" in text
    assert "counts the 64 most likely words" in text and "lower bound" in text
    (run_dir / "stages" / "logits.json").unlink()
    assert missing_stages(read_results(run_dir)) == ["logits"]
    dense = write_run(tmp_path / "dense")
    assert missing_stages(read_results(dense)) == []
    assert "logits" not in write_report(dense).read_text(encoding="utf-8")


def test_a_lower_bound_is_called_so_and_kept_from_a_sweep(run_dir):
    evaluated = read_results(run_dir)
    assert "lower bound" not in headline(evaluated) and evaluated.summary()["kl_qad"] == 0.002
    path = run_dir / "stages" / "evaluate.json"
    content = json.loads(path.read_text())
    path.unlink()
    coarse = read_results(run_dir)
    assert "0.00900 -> 0.00250 nats per token, a lower bound by 64 words a token" in headline(coarse)
    summary = coarse.summary()
    assert (summary["kl_ptq"], summary["kl_qad"], summary["kl_fall"]) == (0.009, None, None)
    write(path, content)
    assert read_results(run_dir).summary() == evaluated.summary()
