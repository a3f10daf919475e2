"""Stage logits: what the teacher says of every sample that QAD will read, on disk, for the sparse losses.

Legend: B samples of a batch, S tokens of a sample, T = B S, K values of a token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_qad import agreement, runtime
from nemo_qad.config import to_plain
from nemo_qad.data.datasets import training_batches
from nemo_qad.distillation.kl import NonFiniteError
from nemo_qad.distillation.sparse_kl import SparseLogits, reference_sparse_kl
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits
from nemo_qad.distillation.step import output_operands_of
from nemo_qad.distillation.teacher_file import FORMAT, INDEX, Contents, Part, TeacherFile
from nemo_qad.distillation.teacher_writer import SHARD_BYTES, Shard, Writer
from nemo_qad.errors import UserError
from nemo_qad.evaluation.console import progress
from nemo_qad.evaluation.metrics import CHUNK, ProjectedLogits, held_out
from nemo_qad.files import require_space, sha256
from nemo_qad.models.forward import Ranks, whole_hidden
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import Loss, Stage
from nemo_qad.stages.session import Session, cache_lock, peak_gib
from nemo_qad.training.interrupt import Interrupted, deferred_stop
from nemo_qad.training.trainer import Batch

DRAWS = 1  # keeps the sampled draws apart from what else is drawn from the run's seed


def run(session: Session) -> dict[str, Any]:
    """Finds, makes or, where qad.teacher_logits names it, checks the teacher's file."""
    started = time.monotonic()
    given = session.run.qad.teacher_logits
    contents = contents_of(session)
    folder = Path(given) if given else session.cache / f"teacher_logits-{_key(session, contents)}"
    reused = True
    if not given:
        with cache_lock(session.cache):
            reused = agreement.first_alone((folder / INDEX).is_file)
            if not reused:
                write_file(session, folder, contents)
    TeacherFile(folder, contents, _remedy(session, folder))
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    session.say(f"logits: {'reused from' if reused else 'written to'} {folder}, {num_bytes / 2**20:,.0f} MiB")
    return {
        "path": str(folder.resolve()),
        "digest": sha256(folder / INDEX),
        "reused": reused,
        "num_bytes": num_bytes,
        "seconds": time.monotonic() - started,
        "peak_gib": peak_gib(),
    }


def open_file(session: Session) -> TeacherFile:
    """The file that the stage left.

    Raises:
        UserError: it is gone, damaged, or does not belong to this run.
    """
    result = session.folder.result(Stage.logits)
    assert result is not None, "the stage logits runs first"
    folder = Path(result["path"])
    return TeacherFile(folder, contents_of(session), _remedy(session, folder))


def contents_of(session: Session) -> Contents:
    """What the file of this run is made of."""
    run, qad = session.run, session.run.qad
    # Validation is measured at temperature 1, as everywhere, and needs no gradient: the exact form suits it.
    num_validation = sum(len(batch["tokens"]) for batch in session.validation_batches)
    parts = {
        "train": Part(
            qad.loss.value, qad.sparse_values, qad.temperature, qad.sequence_length, qad.steps * qad.global_batch_size
        ),
        "validation": Part(Loss.top_k.value, qad.sparse_values, 1.0, run.evaluation.sequence_length, num_validation),
    }
    return Contents(
        tokenizer=sha256(session.data.tokenizer_folder / "tokenizer.json"),
        data=session.data.digest,
        teacher=session.teacher_digest,
        vocab_size=run.model.vocab_size,
        seed=run.seed,
        parts=parts,
    )


def _key(session: Session, contents: Contents) -> str:
    """Twelve hex digits over all that makes the file, to the last bit."""
    made_of = {
        "format": FORMAT,
        "contents": asdict(contents),
        "model": to_plain(session.run.model),
        "batches": _batch_sizes(session),
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def _remedy(session: Session, folder: Path) -> str:
    if session.run.qad.teacher_logits:
        return "Give the run the settings that the folder was made with, or leave qad.teacher_logits out to write one"
    marker = session.folder.marker(Stage.logits)
    return f"Delete {folder} and {marker}, and run again to write it anew"


def _batch_sizes(session: Session) -> dict[str, int]:
    return {
        "train": session.run.qad.micro_batch_size,
        "validation": session.run.evaluation.micro_batch_size,
    }


def write_file(session: Session, folder: Path, contents: Contents, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `folder` from the teacher, or what an interrupted call left of it to do.

    Raises:
        Interrupted: on request, after a batch; whole shards stay. UserError: no room, or the teacher is damaged.
    """
    # The first rank writes; all make the values together, whatever part of the teacher each has.
    writer = Writer(folder, contents, _batch_sizes(session), shard_bytes) if agreement.is_first() else None
    plan = agreement.from_first((writer.missing, writer.num_written, writer.num_bytes) if writer else None)
    assert plan is not None
    missing, num_written, num_bytes = plan
    total = sum(part.num_samples for part in contents.parts.values())
    require_space(folder, num_bytes, f"the teacher's file of {total - num_written} samples")
    if num_written:
        session.say(f"logits: continues after {num_written} of {total} samples")
    with deferred_stop() as stop, progress("logits", total, num_written) as bar:
        for shard in missing:
            batches = []
            for first, batch in _batches(session, shard):
                batches.append(_sparse_batch(session, contents.parts[shard.part], first, batch["tokens"]))
                bar.advance(len(batch["tokens"]), tokens=batch["tokens"].numel())
                if stop.agreed():
                    raise Interrupted(num_written, stop.exit_status())
            if writer:
                writer.write(shard, batches)
            num_written += sum(len(batch["tokens"]) for batch in batches)
    if writer:
        writer.finish()
    agreement.from_first(None)  # no rank reads it before it is whole


def _batches(session: Session, shard: Shard) -> Iterator[tuple[int, Batch]]:
    """The batches of a shard, each with the number of its first sample."""
    size = _batch_sizes(session)[shard.part]
    if shard.part == "validation":
        batches: Iterator[Batch] = iter(session.validation_batches[shard.start // size : -(-shard.stop // size)])
    else:
        batches = train_batches(session, shard.start, shard.stop)
    for number, batch in enumerate(batches):
        yield shard.start + number * size, batch


def train_batches(session: Session, start: int, stop: int, *, rank: int = 0, num_ranks: int = 1) -> Iterator[Batch]:
    """The micro-batches that QAD reads, from sample `start` to `stop` - 1; those of one data-parallel rank."""
    config = session.run.qad
    return training_batches(
        session.data,
        sequence_length=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        num_samples=stop,
        seed=session.run.seed,
        start_sample=start,
        data_parallel_rank=rank,
        data_parallel_size=num_ranks,
    )


@torch.no_grad()
def _sparse_batch(session: Session, part: Part, first: int, tokens_BS: Tensor) -> dict[str, Tensor]:
    """What `Writer.write` takes of the samples from number `first` on; the teacher's logits never exist whole."""
    teacher, found = session.teacher, None
    hidden_BSD = whole_hidden(teacher, tokens_BS.to(runtime.device()))
    if hidden_BSD is not None:
        found = _sparse_values(session, teacher, part, first, hidden_BSD)
    return {"tokens": tokens_BS, **Ranks.of(teacher).from_last_stage(found)}


def _sparse_values(
    session: Session, teacher: torch.nn.Module, part: Part, first: int, hidden_BSD: Tensor
) -> dict[str, Tensor]:
    """indices, log_prob [B, S, K] and, of the exact form, log_tail [B, S], on the CPU."""
    size, (hidden_TD, weight_vD) = hidden_BSD.shape[:2], output_operands_of(teacher, hidden_BSD.flatten(0, 1))
    settings: dict[str, Any] = {
        "vocab_size": session.run.model.vocab_size,
        "temperature": part.temperature,
        "memory_budget": session.run.qad.loss_memory_mib * 2**20,
        "group": Ranks.of(teacher).groups.tp,
    }
    try:
        if part.kind == Loss.top_k.value:
            sparse = top_k_logits(hidden_TD, weight_vD, k=part.sparse_values, **settings)
        else:
            uniform_T = torch.cat([_uniform(session.run.seed, first + i, size[1]) for i in range(size[0])])
            settings["uniform_T"] = uniform_T.to(hidden_TD.device)
            sparse = sampled_logits(hidden_TD, weight_vD, num_samples=part.sparse_values, **settings)
    except NonFiniteError as error:
        row, position = divmod(error.token, size[1])
        raise UserError(
            f"logits: token {position} of sample {first + row}: {error.source}. The teacher in "
            f"{session.teacher_folder} is damaged: bring a good one"
        ) from None
    values = {
        "indices": sparse.indices_TK.unflatten(0, size).cpu(),
        "log_prob": sparse.log_prob_TK.unflatten(0, size).cpu(),
    }
    if sparse.log_tail_T is not None:
        values["log_tail"] = sparse.log_tail_T.unflatten(0, size).cpu()
    return values


def _uniform(seed: int, sample: int, sequence_length: int) -> Tensor:
    """float32 [S] in [0, 1): of one sample, whatever batch or process it is drawn in."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, DRAWS, sample])))
    return torch.from_numpy(generator.random(sequence_length, dtype=np.float32))


def with_teacher(
    batches: Iterator[Batch], file: TeacherFile, part: str, start: int, stride: int
) -> Iterator[Batch]:
    """Adds the file's teacher_* tensors to batches: the first begins with sample `start`, the next `stride` later."""
    for number, batch in enumerate(batches):
        yield {**batch, **file.read(part, start + number * stride, batch["tokens"])}


def validate(session: Session, file: TeacherFile, student: torch.nn.Module) -> tuple[float, float]:
    """`Session.validate` without the teacher: held-out KL over its top K words and the rest as one, perplexity.

    The KL is a lower bound of the dense one, and at most one batch of logits exists.

    Raises:
        UserError: they are not finite, or the file does not belong to the held-out text.
    """
    projected, ranks, kl, count = session.projected(student), Ranks.of(student), 0.0, 0
    batches, size, current = session.validation_batches, session.run.evaluation.micro_batch_size, Batch()

    def remembered() -> Iterator[Batch]:
        nonlocal current
        mine = ranks.share(len(batches))
        for batch, (number, _) in zip(session.deal(student, batches), mine, strict=True):
            current = {**batch, **file.read("validation", number * size, batch["tokens"])}
            yield current

    def compared(tokens_BS: Tensor) -> ProjectedLogits | None:
        nonlocal kl, count
        logits = projected(tokens_BS)
        if logits is not None:
            part_kl, part_count = _batch_kl(current, logits)
            kl, count = kl + part_kl, count + part_count
        return logits

    with deployed_weights(student):
        measured = held_out(compared, None, remembered(), ranks.total)
    total_kl, total_count = ranks.total((kl, count))
    return total_kl / total_count, measured.perplexity


def _batch_kl(batch: Batch, logits: ProjectedLogits) -> tuple[float, int]:
    """Sum and count of the KL of one batch, `CHUNK` tokens at a time."""
    student, mask_T = replace(logits, hidden=logits.hidden.flatten(0, 1)), batch["loss_mask"].flatten()
    names = ("teacher_indices", "teacher_log_prob", "teacher_log_tail")
    indices_TK, log_prob_TK, log_tail_T = (batch[name].flatten(0, 1).to(student.device) for name in names)
    kl, count = 0.0, 0
    for start in range(0, len(mask_T), CHUNK):
        part = slice(start, start + CHUNK)
        teacher = SparseLogits(indices_TK[part], log_prob_TK[part], log_tail_T[part])
        mask = mask_T[part].to(student.device)
        chunk_kl, chunk_count = reference_sparse_kl(
            teacher, student[part].float(), mask, vocab_size=logits.vocab_size, temperature=1.0
        )
        kl, count = kl + float(chunk_kl), count + int(chunk_count)
    return kl, count
