"""Run folders as a finished or half-finished run leaves them, for the tests of reports and sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TASKS = {"next_token_accuracy": 0.30, "copy": 0.90, "key_lookup": 0.70, "brackets": 0.51}
CHANCE = {"copy": 0.0, "key_lookup": 0.0, "brackets": 0.5}
CONFIG = """\
recipe: {name: four_over_six, scale_search: four_over_six, weight_scales: static, qad_scales: frozen}
model: {name: tiny_hybrid, hybrid_pattern: ME*ME, hidden_size: 128, precision: fp32}
qad: {name: tiny, learning_rate: 3.0e-05, steps: 100, keep: best}
evaluation: {name: tiny, num_questions: 400, band_low: 0.95, band_high: 0.99}
seed: 7
"""


def measured(kl: float, perplexity: float, factor: float) -> dict[str, Any]:
    """A model of evaluate.json whose scores are `factor` times those of BF16."""
    return {
        "held_out_kl": kl,
        "held_out_loss": 3.6,
        "perplexity": perplexity,
        "tasks": {task: score * factor for task, score in TASKS.items()},
    }


def write_run(run_dir: Path, *, qad: bool = True, kl_qad: float = 0.002, factor_ptq: float = 0.96) -> Path:
    """Writes a run folder; `qad` False leaves out the stages qad and export."""
    (run_dir / "stages").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(CONFIG, encoding="utf-8")
    write(run_dir / "environment.json", {"python": "3.12.3", "versions": {"torch": "2.14.1"}})
    row = {"part": "routed experts", "format": "nvfp4", "kind": "weights", "expected": 32, "matched": 32}
    stages: dict[str, dict[str, Any]] = {
        "teacher": {
            "seconds": 200.0,
            "held_out_loss": 3.6,
            "unigram_loss": 6.5,
            "reused": True,
            "peak_gib": 1.5,
        },
        "ptq": {"seconds": 14.0, "coverage": [row], "held_out_kl": 0.009, "peak_gib": 2.0},
    }
    models = {"bf16": measured(0.0, 36.0, 1.0), "ptq": measured(0.008, 37.0, factor_ptq)}
    evaluate = {"models": models, "chance": CHANCE, "num_questions": 400, "num_held_out_tokens": 30000}
    stages["evaluate"] = {**evaluate, "seconds": 40.0, "peak_gib": 1.0}
    if qad:
        models["qad"] = measured(kl_qad, 36.25, 0.995)
        stages["qad"] = {
            "seconds": 3700.0, "steps": 100, "kept": "best", "kept_step": 80, "held_out_kl_ptq": 0.009,
            "held_out_kl": 0.0025, "peak_gib": 3.25, "tokens": 204800,
        }  # fmt: skip
        stages["export"] = {
            "seconds": 3.0, "bytes_bf16": 4_000_000, "bytes_export": 1_250_000, "num_tensors": 200,
            "verified_tensors": 41, "folder": str(run_dir / "export"), "quant_algo": "W4A16_NVFP4",
        }  # fmt: skip
        lines = [{"stage": "qad", "step": s, "held_out_kl": 0.009 - 0.00008 * s} for s in (0, 20, 40, 60, 80)]
        lines += [{"stage": "qad", "step": 81, "kl": 0.003, "tokens_per_second": 2000.0}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    for stage, content in stages.items():
        write(run_dir / "stages" / f"{stage}.json", content)
    return run_dir


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
