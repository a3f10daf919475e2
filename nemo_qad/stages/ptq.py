"""Stage ptq: the teacher's copy, quantised by the recipe with a real calibration loop, and checked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nemo_qad.checkpoint.tensors import META, TENSORS, save_tensors
from nemo_qad.evaluation.console import coverage_table
from nemo_qad.files import require_space
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.stages.session import Session, peak_gib, student_tensors


def folder(session: Session) -> Path:
    return session.folder.path / "ptq"


def run(session: Session) -> tuple[dict[str, Any], list[Path]]:
    """Returns the stage's result and the files that it wrote."""
    started = time.monotonic()
    student = session.load_teacher()
    size = sum(4 * p.numel() for p in student.parameters())
    require_space(folder(session), 2 * size, "the quantised student")
    calibrated = quantize(
        student, session.run.recipe, session.run.model, session.calibration_batches(), session.say,
        calibration=session.run.calibration,
    )  # fmt: skip
    rows = calibrated.coverage.to_json()
    coverage_table(rows)
    kl, perplexity = session.validate(student)
    session.say(f"ptq: held-out KL {kl:.5f} nats per token")
    save_tensors(folder(session), student_tensors(student), {"held_out_kl": kl})
    result = {
        "seconds": time.monotonic() - started,
        "coverage": rows,
        "held_out_kl": kl,
        "held_out_perplexity": perplexity,
        "peak_gib": peak_gib(),
    }
    return result, [folder(session) / TENSORS, folder(session) / META]
