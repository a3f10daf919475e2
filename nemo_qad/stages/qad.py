"""Stage qad: the student learns from its frozen teacher, or from the teacher's file; the best held-out KL is kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_qad import agreement
from nemo_qad.checkpoint.steps import load_newest, save_step
from nemo_qad.checkpoint.tensors import META, TENSORS, load_tensors, save_tensors
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.distillation.teacher_file import TeacherFile
from nemo_qad.evaluation.console import progress
from nemo_qad.models.forward import Ranks
from nemo_qad.quantization.in_place import student_weights
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import Keep
from nemo_qad.stages import logits, ptq
from nemo_qad.stages.session import Session, peak_gib, student_tensors
from nemo_qad.training.interrupt import Interrupted, deferred_stop
from nemo_qad.training.metrics import MetricsLog
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Batch, Trainer


@dataclass
class Best:
    """The lowest held-out KL so far, in nats per token: whose weights, at which step."""

    kl: float = float("inf")
    step: int = -1
    kind: str = "none"


def student_folder(session: Session) -> Path:
    """Where the weights stand that QAD hands on."""
    return session.folder.path / "qad" / "student"


def run(session: Session) -> tuple[dict[str, Any], list[Path]]:
    """Returns the stage's result and the files that it wrote."""
    return Distillation(session).run()


class Distillation:
    """One QAD run: resumes from its newest checkpoint, validates, keeps the best."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.config = session.run.qad
        self.root = session.folder.path / "qad"
        self.best = Best()
        self.first_kl = self.last_kl = float("nan")  # of step 0 and of the last validation
        self.file: TeacherFile | None = None
        if self.config.loss.is_sparse:
            self.file = logits.open_file(session)
            session.drop_teacher()
        self.student = session.load_student(load_tensors(ptq.folder(session))[0])
        self.trainer = Trainer(
            self.student,
            qad_settings(self.config),
            distillation_loss(
                self.config,
                vocab_size=session.run.model.vocab_size,
                teacher=session.teacher if self.file is None else None,
            ),
            precision=session.run.model.precision,
            average_decay=self.config.average_decay,
            distributed_optimizer=session.run.parallel.distributed_optimizer,
            weights=student_weights(self.student, self.config, session.run.recipe),
        )

    def run(self) -> tuple[dict[str, Any], list[Path]]:
        started = time.monotonic()
        found = load_newest(self.root / "checkpoints", self.session.say)
        if found:
            self.trainer.load_state(found[0], found[1]["step"])
            self.best = Best(**found[1]["best"])
            self.first_kl, self.last_kl = found[1]["first_kl"], found[1]["last_kl"]
            self.session.say(f"qad: continues after step {self.trainer.step}")
        log = MetricsLog(self.session.folder.path, "qad", start_step=self.trainer.step)
        try:
            agreement.require_same("the newest checkpoint of QAD at step", self.trainer.step)
            if not found:
                self._validate(log)
                self.first_kl = self.last_kl
            self._loop(log)
        finally:
            log.close()
        return self._hand_on(time.monotonic() - started)

    def _batches(self) -> Iterator[Batch]:
        config, data = self.config, Ranks.of(self.student).groups.dp
        start, stop = self.trainer.step * config.global_batch_size, config.steps * config.global_batch_size
        batches = logits.train_batches(self.session, start, stop, rank=data.rank(), num_ranks=data.size())
        if self.file is None:
            return batches
        first = start + data.rank() * config.micro_batch_size
        return logits.with_teacher(batches, self.file, "train", first, config.micro_batch_size * data.size())

    def _measure(self) -> tuple[float, float]:
        """Held-out KL and perplexity of the weights now in the student."""
        with self.trainer.latent():
            if self.file is None:
                return self.session.validate(self.student)
            return logits.validate(self.session, self.file, self.student)

    def _loop(self, log: MetricsLog) -> None:
        config, trainer = self.config, self.trainer
        batches, replicas = self._batches(), Ranks.of(self.student).groups.dp.size()
        num_micro = config.global_batch_size // (config.micro_batch_size * replicas)
        with deferred_stop() as stop, progress("qad", config.steps, trainer.step) as bar:
            while trainer.step < config.steps:
                started = time.monotonic()
                result = trainer.train_step(list(itertools.islice(batches, num_micro)))
                log.write(
                    trainer.step, kl=result.loss, grad_norm=result.grad_norm,
                    learning_rate=result.learning_rate,
                    tokens_per_second=result.num_tokens / (time.monotonic() - started),
                )  # fmt: skip
                if trainer.step % config.validate_every == 0 or trainer.step == config.steps:
                    self._validate(log)
                bar.advance(tokens=result.num_tokens, kl=result.loss, held_out_kl=self.last_kl)
                is_due = trainer.step % config.save_every == 0 or trainer.step == config.steps
                if stop.agreed() or is_due:
                    self._save()
                    if trainer.step < config.steps and stop.agreed():  # perhaps asked for while it was saved
                        raise Interrupted(trainer.step)

    def _save(self) -> None:
        meta = {"best": vars(self.best), "first_kl": self.first_kl, "last_kl": self.last_kl}
        state, folder = self.trainer.state(), self.root / "checkpoints"
        agreement.first_alone(lambda: save_step(folder, self.trainer.step, state, meta))

    def _validate(self, log: MetricsLog) -> None:
        """Held-out KL of the student and, if there is one, of its average; the better of all is stored."""
        self.last_kl, perplexity = self._measure()
        values = {"held_out_kl": self.last_kl, "held_out_perplexity": perplexity}
        self._consider(self.last_kl, "student")
        if self.trainer.average and self.trainer.step:
            with self.trainer.averaged():
                average_kl, _ = self._measure()
                self._consider(average_kl, "average")
            values["average_held_out_kl"] = average_kl
        log.write(self.trainer.step, **values)

    def _consider(self, kl: float, kind: str) -> None:
        """Stores the weights now in the student as the best, if they are."""
        if kl < self.best.kl:
            self.best = Best(kl, self.trainer.step, kind)
            self._store(self.root / "best")

    def _store(self, folder: Path) -> None:
        with self.trainer.latent(), deployed_weights(self.student):
            tensors = student_tensors(self.student)
            agreement.first_alone(lambda: save_tensors(folder, tensors, vars(self.best)))

    def _copy_best(self, target: Path) -> dict[str, Any]:
        tensors, meta = load_tensors(self.root / "best")
        save_tensors(target, tensors, meta)
        return meta

    def _hand_on(self, seconds: float) -> tuple[dict[str, Any], list[Path]]:
        target, step = student_folder(self.session), self.trainer.step
        if self.config.keep is Keep.best:
            meta = agreement.first_alone(lambda: self._copy_best(target))
            kept, kl, step = {"student": "best"}.get(meta["kind"], meta["kind"]), meta["kl"], meta["step"]
        else:
            kept, kl = "last", self.last_kl
            self._store(target)
        result = {
            "seconds": seconds,
            "steps": self.trainer.step,
            "tokens": self.trainer.step * self.config.global_batch_size * self.config.sequence_length,
            "kept": kept,
            "kept_step": step,
            "held_out_kl_ptq": self.first_kl,  # on the same terms as the other; PTQ's own is always dense
            "held_out_kl": kl,
            "peak_gib": peak_gib(),
        }
        self.session.say(f"qad: held-out KL {kl:.5f} nats per token, {kept} weights of step {step}")
        return result, [target / TENSORS, target / META]


def load_student(session: Session, *, distilled: bool) -> torch.nn.Module:
    """The student after PTQ, or after QAD."""
    folder = student_folder(session) if distilled else ptq.folder(session)
    return session.load_student(load_tensors(folder)[0])
