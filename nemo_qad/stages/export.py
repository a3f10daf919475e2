"""Stage export: the Hugging Face checkpoint that engines load, decoded again and compared bit for bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nemo_qad import agreement, runtime
from nemo_qad.files import require_space
from nemo_qad.huggingface.export import Origin, expected_rows, export_student
from nemo_qad.huggingface.golden import NUM_PROMPTS, Golden, ask
from nemo_qad.huggingface.save import carried_tensors
from nemo_qad.huggingface.verify import verify_folder
from nemo_qad.models.forward import Ranks
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import Stage
from nemo_qad.stages import qad
from nemo_qad.stages.session import Session, peak_gib


def folder(session: Session) -> Path:
    return session.folder.path / "export"


def run(session: Session) -> tuple[dict[str, Any], list[Path]]:
    """Exports the QAD student, or the PTQ student where there was no QAD.

    Raises:
        UserError: a decoded weight differs from the trained one; the tensor is named.
    """
    started = time.monotonic()
    run, target = session.run, folder(session)
    assert session.teacher_folder is not None, "the teacher stage runs first"
    origin = Origin(
        session.teacher_folder, session.teacher_config,
        session.teacher_dtypes.default if session.teacher_dtypes else Origin.dtype,
    )  # fmt: skip
    student = qad.load_student(session, distilled=session.folder.result(Stage.qad) is not None)
    require_space(target, sum(2 * p.numel() for p in student.parameters()), "the export")
    with deployed_weights(student):
        facts = export_student(
            student, target, run.model, run.recipe, _tokenizer(session), run.export.max_shard_gb, origin,
            _golden(session, student),
        )  # fmt: skip
        with runtime.one_thread_an_operation() as threads:
            verified = agreement.first_reads(
                expected_rows(student, run.model),
                lambda weights: verify_folder(target, _and_carried(weights, session), threads),
            )
    session.say(f"export: {verified['num_tensors']} weights decoded again, all equal bit for bit")
    result = {
        **facts,
        "verified_tensors": verified["num_tensors"],
        "bytes_bf16": (session.folder.result(Stage.teacher) or {}).get("num_bytes"),  # it may be elsewhere by now
        "bytes_export": _weight_bytes(target),
        "folder": str(target),
        "seconds": time.monotonic() - started,
        "peak_gib": peak_gib(),
    }
    return result, [path for path in target.rglob("*") if path.is_file()]


def _tokenizer(session: Session) -> Path:
    """The teacher's own tokenizer, which brings the chat template and the generation settings; else the data's."""
    teacher = session.teacher_folder
    return teacher if teacher and (teacher / "tokenizer.json").is_file() else session.data.tokenizer_folder


def _golden(session: Session, student: nn.Module) -> Golden:
    """The student's answers after held-out text; a collective call."""
    batches = [batch["tokens"] for batch in session.evaluation_batches]
    kept, num_rows = [], 0
    for tokens_BS in batches:
        if num_rows < NUM_PROMPTS:
            kept.append(tokens_BS)
            num_rows += len(tokens_BS)
    logits = session.projected(student)

    def rows(tokens_BS: Tensor, mask_BS: Tensor) -> Tensor | None:
        projected = logits(tokens_BS)
        return None if projected is None else projected[mask_BS.to(projected.device)].float()

    return ask(rows, kept, num_rows, Ranks.of(student).from_last_stage)


def _and_carried(weights: Iterator[tuple[str, Any]], session: Session) -> Iterator[tuple[str, Any]]:
    return itertools.chain(weights, carried_tensors(session.run.model, session.teacher_folder))


def _weight_bytes(folder: Path) -> int:
    """Bytes of the weight files alone: a tokenizer would blur the ratio of a small model."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
