"""Stage qad: the student learns from its frozen teacher, or from the teacher's file; the best held-out KL is kept."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_qad import agreement
from nemo_qad.checkpoint import sharded
from nemo_qad.checkpoint.newest import newest_good
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.checkpoint.tensors import META, TENSORS, check_tensors, load_tensors, save_tensors
from nemo_qad.config import config_hash, to_plain
from nemo_qad.data.position import Position, Stream
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.distillation.teacher_file import TeacherFile
from nemo_qad.errors import UserError
from nemo_qad.evaluation.console import progress
from nemo_qad.files import bring_back
from nemo_qad.models.forward import Ranks
from nemo_qad.quantization import modelopt
from nemo_qad.quantization.in_place import student_weights
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import Keep
from nemo_qad.stages import logits, ptq
from nemo_qad.stages.qad_record import RESTART, Best, Record, Start, made_from, start_from
from nemo_qad.stages.session import Session, peak_gib, student_tensors
from nemo_qad.training.guards import NonFiniteStepError, require_no_jump
from nemo_qad.training.interrupt import Interrupted, StopRequest, deferred_stop
from nemo_qad.training.metrics import MetricsLog
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.sharded_state import is_readable_by_modelopt
from nemo_qad.training.trainer import Batch, Trainer


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
        self.folders = StepFolders(self.root / "checkpoints", self.config.keep_checkpoints)
        self.saver = CheckpointSaver(self.folders, session.say, asynchronous=self.config.async_save)
        self.stream = Stream.of(session.data, self.config.sequence_length, session.run.seed)
        self.start = Start()
        self.best, self.skipped = Best(), 0
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
        self._continue()
        log = MetricsLog(self.session.folder.path, "qad", start_step=self.trainer.step)
        try:
            if self.start.record is None or self.best.step < 0:  # nothing to compare with yet
                self._validate(log)
            if self.start.record is None:
                self.first_kl = self.last_kl
            self._loop(log)
            self.saver.wait()
        except NonFiniteStepError:  # which every rank has seen
            self.saver.wait()
            raise
        finally:
            self.saver.close()
            log.close()
        return self._hand_on(time.monotonic() - started)

    def _continue(self) -> None:
        """Takes up the newest whole checkpoint, where there is one.

        Raises:
            UserError: none is whole, it belongs to another run, or the model that it gives is not what was saved.
        """
        found = newest_good(self.folders, self.session.say, RESTART)
        if found is None:
            return
        self.start = start_from(self.session, found, self.stream)
        record = self.start.record
        assert record is not None
        self.skipped, self.first_kl, self.last_kl = record.skipped, record.first_kl, record.last_kl
        if self.start.comparable:
            self.best = agreement.first_alone(lambda: self._best_of(record))
        else:
            self.first_kl, _ = self._measure()  # of the PTQ student, on the terms that hold from here on
        self.trainer.restore(
            lambda state: sharded.load(found.folder, state),
            record.step,
            record.updates,
            same_ranks=record.ranks == agreement.count(),
        )
        if self.start.same_samples and record.step:
            again = self._batches(self.start.sample - self.config.global_batch_size, self.start.sample)
            require_no_jump(self.trainer.measure(list(again)), record.loss, self.config.max_loss_jump, record.step)
        self.session.say(f"qad: continues after step {record.step}, from {found.folder}")

    def _best_of(self, record: Record) -> Best:
        """The best so far, if its weights are there; without them the next validation begins a new one."""
        if record.best.step < 0:
            return record.best
        try:
            bring_back(self.root / "best")
            check_tensors(self.root / "best")
        except UserError as error:
            self.session.say(f"Warning: {str(error).partition('. Delete')[0]}. The best weights so far are lost")
            return Best()
        return record.best

    def _batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's micro-batches of the samples `start` to `stop` - 1."""
        config, data = self.config, Ranks.of(self.student).groups.dp
        batches = logits.train_batches(self.session, start, stop, rank=data.rank(), num_ranks=data.size())
        if self.file is None:
            return batches
        first = start + data.rank() * config.micro_batch_size
        return logits.with_teacher(batches, self.file, "train", first, config.micro_batch_size * data.size())

    def _all_batches(self) -> Iterator[Batch]:
        """Of the steps that remain."""
        config, start = self.config, self.start.sample
        stop = start + (config.steps - self.trainer.step) * config.global_batch_size
        end = config.steps * config.global_batch_size
        if self.file is not None and stop > end:
            raise UserError(
                f"qad.loss={config.loss}: the teacher's file ends with sample {end:,} "
                f"and this run would read up to sample {stop:,}, as its batch or sequence length was changed. Not "
                "supported with a file: give the former values, or qad.loss=linear_kl"
            )
        return self._batches(start, stop)

    def _measure(self) -> tuple[float, float]:
        """Held-out KL and perplexity of the weights now in the student."""
        with self.trainer.latent():
            if self.file is None:
                return self.session.validate(self.student)
            return logits.validate(self.session, self.file, self.student)

    def _loop(self, log: MetricsLog) -> None:
        config, trainer = self.config, self.trainer
        batches, replicas = self._all_batches(), Ranks.of(self.student).groups.dp.size()
        num_micro = config.global_batch_size // (config.micro_batch_size * replicas)
        with deferred_stop() as stop, progress("qad", config.steps, trainer.step) as bar:
            while trainer.step < config.steps:
                batch = list(itertools.islice(batches, num_micro))
                shown = self._step(batch, log)
                if trainer.step % config.validate_every == 0 or trainer.step == config.steps:
                    self._validate(log)
                bar.advance(**shown, held_out_kl=self.last_kl)
                self.saver.poll()
                self.saver.reserve(trainer.saving)
                if stop.agreed() or trainer.step % config.save_every == 0 or trainer.step == config.steps:
                    self._save(batch)
                    self._stop_if_asked(stop)

    def _stop_if_asked(self, stop: StopRequest) -> None:
        """Also where it was asked for while the step was saved."""
        if self.trainer.step < self.config.steps and stop.agreed():
            self.saver.require_saved()
            raise Interrupted(self.trainer.step, stop.exit_status())

    def _step(self, batch: list[Batch], log: MetricsLog) -> dict[str, Any]:
        """One step, or one that is passed over; what the progress bar shows of it."""
        trainer, started = self.trainer, time.monotonic()
        try:
            result = trainer.train_step(batch)
        except NonFiniteStepError as error:
            if self.skipped >= self.config.max_skipped_steps:
                raise
            self.skipped += 1
            trainer.skip()
            log.write(trainer.step, skipped_steps=self.skipped)
            of = f"{self.skipped} of at most {self.config.max_skipped_steps}"
            self.session.say(f"Warning: {error}. Passed over, {of} (qad.max_skipped_steps)")
            return {"tokens": 0}
        log.write(
            trainer.step, kl=result.loss, grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens_per_second=result.num_tokens / (time.monotonic() - started),
        )  # fmt: skip
        return {"tokens": result.num_tokens, "kl": result.loss}

    def _save(self, batch: list[Batch]) -> None:
        """Begins to save this step, with the loss of its samples as the weights are now: what a resume must find."""
        trainer, config = self.trainer, self.config
        done = self.start.record.step if self.start.record else 0
        record = Record(
            step=trainer.step,
            updates=trainer.updates,
            skipped=self.skipped,
            ranks=agreement.count(),
            loss=trainer.measure(batch),
            best=self.best,
            first_kl=self.first_kl,
            last_kl=self.last_kl,
            position=Position(self.stream, self.start.sample + (trainer.step - done) * config.global_batch_size),
            made_from=made_from(self.session),
            config=to_plain(self.session.run),
            config_hash=config_hash(self.session.run),
        )
        extra = functools.partial(modelopt.save_state, self.student) if is_readable_by_modelopt(self.student) else None
        self.saver.save(trainer.step, trainer.saving(), record.to_json(), extra)

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
            "skipped_steps": self.skipped,
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
