"""Stage ptq: the teacher's copy, quantised by the recipe with a real calibration loop, checked and measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from nemo_qad import agreement
from nemo_qad.checkpoint.tensors import META, TENSORS, save_tensors
from nemo_qad.evaluation.console import coverage_table
from nemo_qad.evaluation.layer_errors import FILE, LayerErrors, write_errors
from nemo_qad.evaluation.layer_table import layer_table
from nemo_qad.files import require_space
from nemo_qad.models.placement import Placement
from nemo_qad.quantization.calibrate import Calibrated, quantize
from nemo_qad.quantization.layers import Progress, measure_layers
from nemo_qad.quantization.recipes import formats
from nemo_qad.stages.session import Session, peak_gib, student_tensors

SECONDS_BETWEEN_LINES = 10.0


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
    for warning in calibrated.warnings:
        session.say(f"Warning: {warning}")
    errors = _measure_layers(session, student, calibrated)
    layers = session.folder.path / FILE
    layer_table(errors, layers)
    kl, perplexity = session.validate(student)
    session.say(f"ptq: held-out KL {kl:.5f} nats per token")
    tensors = student_tensors(student)

    def write() -> None:
        save_tensors(folder(session), tensors, {"held_out_kl": kl})
        write_errors(layers, errors)  # after the tensors, which come with a new folder

    agreement.first_alone(write)
    result = {
        "seconds": time.monotonic() - started,
        "coverage": rows,
        "held_out_kl": kl,
        "held_out_perplexity": perplexity,
        "warnings": calibrated.warnings,
        "peak_gib": peak_gib(),
    }
    return result, [folder(session) / TENSORS, folder(session) / META, layers]


def _measure_layers(session: Session, student: nn.Module, calibrated: Calibrated) -> LayerErrors:
    recipe = session.run.recipe
    return measure_layers(
        student,
        formats(recipe, session.run.model),
        recipe.scale_search,
        Placement(student).global_name,
        expert_tokens=calibrated.expert_tokens,
        idle_experts=calibrated.idle_experts,
        progress=_now_and_then(session),
    )


def _now_and_then(session: Session) -> Progress:
    """A line at most every ten seconds: small models are measured before the first one is due."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            session.say(f"Measuring the error of each linear, {done} of {total}")

    return progress
