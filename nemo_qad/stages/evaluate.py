"""Stage evaluate: teacher, PTQ student and QAD student on the same held-out text and the same questions."""

from __future__ import annotations

import time
from typing import Any

import torch

from nemo_qad.evaluation.console import progress
from nemo_qad.evaluation.tasks import Task, build_tasks, score
from nemo_qad.models.forward import Ranks
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import Stage
from nemo_qad.sharding import sequence_multiple
from nemo_qad.stages import qad
from nemo_qad.stages.session import Session, peak_gib


def run(session: Session) -> dict[str, Any]:
    """Scores of each model that the run folder holds."""
    started = time.monotonic()
    config = session.run.evaluation
    tasks = build_tasks(
        session.data, num_questions=config.num_questions, sequence_length=config.sequence_length,
        seed=session.run.data.seed, multiple=sequence_multiple(session.run.parallel),
    )  # fmt: skip
    distilled = session.folder.result(Stage.qad)
    names = ["bf16", "ptq"] + (["qad"] if distilled else [])
    models = {}
    with progress("evaluate", len(names) * (len(tasks) + 1), 0) as bar:
        for name in names:
            if name == "bf16":
                models[name] = _measure(session, session.teacher, tasks, bar)
                continue
            student = qad.load_student(session, distilled=name == "qad")
            with deployed_weights(student):
                models[name] = _measure(session, student, tasks, bar)
    return {
        "models": models,
        "chance": {task.name: task.chance for task in tasks},
        "num_questions": config.num_questions,
        "num_held_out_tokens": models["bf16"].pop("num_tokens"),
        "qad_kept": (distilled or {}).get("kept"),
        "qad_kept_step": (distilled or {}).get("kept_step"),
        "seconds": time.monotonic() - started,
        "peak_gib": peak_gib(),
    }


def _measure(session: Session, module: torch.nn.Module, tasks: list[Task], bar: Any) -> dict[str, Any]:
    size = session.run.evaluation.micro_batch_size
    teacher, spread = session.projected(session.teacher), Ranks.of(module)
    measured = session.held_out(module, teacher, session.evaluation_batches)
    bar.advance()
    scores = {"next_token_accuracy": measured.accuracy}
    for task in tasks:
        scores[task.name] = float(score(task, session.projected(module), size, spread).float().mean())
        bar.advance()
    return {
        "held_out_kl": measured.kl,
        "held_out_loss": measured.loss,
        "perplexity": measured.perplexity,
        "num_tokens": measured.num_tokens,
        "tasks": scores,
    }
