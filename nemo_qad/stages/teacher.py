"""Stage teacher: the BF16 model, read from a folder or trained from scratch once and cached.

The embedded teacher is trained by one rank, whatever the layout of the run: so every layout has the same teacher.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nemo_qad import agreement, config, launcher, runtime
from nemo_qad.checkpoint import sharded
from nemo_qad.checkpoint.newest import newest_good
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.config import to_plain
from nemo_qad.data import tokenizer
from nemo_qad.data.datasets import training_batches, unigram_loss
from nemo_qad.errors import UserError
from nemo_qad.evaluation.console import progress, say
from nemo_qad.files import read_json, require_space, write_json
from nemo_qad.huggingface.architectures import read_config
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.huggingface.source import dtypes_of
from nemo_qad.huggingface.weight_files import weight_files, weights_digest
from nemo_qad.schema import ParallelConfig, RunConfig, Stage
from nemo_qad.stages.folder import RunFolder
from nemo_qad.stages.session import Session, cache_lock, peak_gib
from nemo_qad.training.interrupt import Interrupted, deferred_stop
from nemo_qad.training.language_model import LanguageModelLoss
from nemo_qad.training.optimizer import teacher_settings
from nemo_qad.training.trainer import Batch, Trainer

# Raised when training changes in a way that the configuration does not show.
TRAINING_VERSION = 1


def run(session: Session) -> dict[str, Any]:
    """Finds or makes the teacher and sets `session.teacher_folder` and `session.teacher_digest`."""
    started = time.monotonic()
    path = session.run.teacher.path
    if path is not None:
        folder, facts = Path(path), {"reused": True}
        _ = session.data  # which all ranks have before the first looks at it
        agreement.first_alone(lambda: _check_folder(session, folder))
    else:
        folder, facts = _cached(session)
    known = agreement.first_alone(lambda: _known(folder))
    session.know_teacher(known)
    if session.folder.result(Stage.teacher) is None:
        _ = session.teacher  # reads and checks every tensor before anything is spent on it; later the digest tells
    return {
        **facts,
        **known,
        "num_bytes": sum(path.stat().st_size for path in weight_files(folder)),
        "seconds": time.monotonic() - started,
        "peak_gib": peak_gib(),
    }


def _known(folder: Path) -> dict[str, Any]:
    """What later stages need of a teacher, even where its folder is gone by then."""
    return {
        "path": str(folder),
        "digest": weights_digest(folder),
        "dtypes": asdict(dtypes_of(folder)),
        "config": read_config(folder),
    }


def _check_folder(session: Session, folder: Path) -> None:
    """That it is a checkpoint, whose tokenizer is the data's."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"teacher.path={folder}: no config.json there. Give the folder of a Hugging Face checkpoint "
            "of this model, or leave teacher.path out to train the embedded teacher"
        )
    if not (folder / "tokenizer.json").is_file():
        session.say(f"teacher: {folder} has no tokenizer.json, so its words cannot be compared with the data's")
        return
    ours = tokenizer.load(session.data.tokenizer_folder)
    tokenizer.require_same_vocabulary(ours, tokenizer.load(folder), folder)


def _key(session: Session) -> str:
    run = session.run
    made_of = {
        "model": to_plain(run.model), "teacher": to_plain(run.teacher), "data": session.data.digest,
        "version": TRAINING_VERSION,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def _cached(session: Session) -> tuple[Path, dict[str, Any]]:
    _ = session.data  # takes the lock by itself
    root = session.cache / f"teacher-{_key(session)}"
    return root / "model", agreement.first_alone(lambda: _find_or_make(session, root))


def _find_or_make(session: Session, root: Path) -> dict[str, Any]:
    """What is known of the teacher's training. On several ranks one process more trains it."""
    facts = root / "training.json"
    if session.run.parallel.ranks_per_node * session.run.parallel.nodes > 1 and not facts.exists():
        launcher.run("nemo_qad.stages.teacher:make", (session.run,), 1)
        return {**read_json(facts), "reused": False}
    with cache_lock(session.cache):
        if facts.exists():
            known = read_json(facts)
            if weights_digest(root / "model") != known["digest"]:
                raise UserError(f"{root}: the cached teacher has changed. Delete the folder to train it again")
            session.say(f"teacher: reused from {root}")
            return {**known, "reused": True}
        result = _train(session, root)
        write_json(facts, result)
        return {**result, "reused": False}


def make(run: RunConfig) -> None:
    """Finds or trains the embedded teacher of a run in this process alone; it is in the cache then."""
    run = replace(run, parallel=ParallelConfig(name="single"))
    with runtime.process_groups(run.parallel, seed=run.seed, threads=run.threads):
        torch.use_deterministic_algorithms(run.deterministic)
        _cached(Session(run, RunFolder(config.run_folder(run), run, owner=False), say))


def _micro_batches(session: Session, start: int) -> Iterator[Batch]:
    teacher = session.run.teacher
    return training_batches(
        session.data,
        sequence_length=teacher.sequence_length,
        micro_batch_size=teacher.global_batch_size,
        num_samples=teacher.steps * teacher.global_batch_size,
        seed=teacher.seed,
        start_sample=start * teacher.global_batch_size,
    )


def _train(session: Session, root: Path) -> dict[str, Any]:
    settings, vocab_size = session.run.teacher, session.run.model.vocab_size
    module = session.build(balance_experts=True)
    num_parameters = sum(p.numel() for p in module.parameters())
    require_space(root, 40 * num_parameters, "the teacher with its checkpoints")
    trainer = Trainer(
        module,
        teacher_settings(settings),
        LanguageModelLoss(vocab_size=vocab_size),
        precision=session.run.model.precision,
    )
    found = newest_good(StepFolders(root / "checkpoints"), session.say, f"delete {root} to train the teacher anew")
    if found:
        trainer.restore(lambda state: sharded.load(found.folder, state), found.step)
        session.say(f"teacher: continues after step {trainer.step}")
    _loop(session, trainer, root)
    save_bf16(module, root / "model", session.run.model, session.data.tokenizer_folder, 5.0)
    return _judge(session, root, num_parameters)


def _loop(session: Session, trainer: Trainer, root: Path) -> None:
    settings = session.run.teacher
    tokens = settings.global_batch_size * settings.sequence_length
    batches = _micro_batches(session, trainer.step)
    saver = CheckpointSaver(StepFolders(root / "checkpoints"), session.say, asynchronous=False)
    with deferred_stop() as stop, progress("teacher", settings.steps, trainer.step) as bar:
        while trainer.step < settings.steps:
            result = trainer.train_step(list(itertools.islice(batches, 1)))
            bar.advance(tokens=tokens, loss=result.loss)
            if stop.requested or trainer.step % 200 == 0:
                saver.save(trainer.step, trainer.saving(), {})
            if stop.requested:
                saver.require_saved()
                raise Interrupted(trainer.step, stop.exit_status())


def _judge(session: Session, root: Path, num_parameters: int) -> dict[str, Any]:
    """Held-out loss of the BF16 weights as written, against the unigram model's."""
    session.teacher_folder = root / "model"
    measured = session.held_out(session.teacher, None, session.evaluation_batches)
    unigram = unigram_loss(session.data)
    session.say(f"teacher: held-out loss {measured.loss:.3f} nats, a unigram model has {unigram:.3f}")
    if measured.loss > 0.9 * unigram:
        raise UserError(
            f"teacher.steps={session.run.teacher.steps}: held-out loss {measured.loss:.3f} is not clearly below "
            f"the unigram model's {unigram:.3f}. Train for more steps or with another teacher.learning_rate"
        )
    return {
        "held_out_loss": measured.loss,
        "held_out_accuracy": measured.accuracy,
        "unigram_loss": unigram,
        "num_parameters": num_parameters,
        "digest": weights_digest(root / "model"),
    }
