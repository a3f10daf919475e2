"""A program of test_sparse_teacher.py: the stages by hand, for what cannot be seen from outside a process.

It counts the models that are alive while QAD runs, stops the writing of a teacher's file between two shards, and
starts QAD without the file, or with a damaged one.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

from nemo_qad import command_line, stages  # noqa: F401 (stages: sets up the process before torch comes in)

# ruff: isort: split
from megatron.core.models.hybrid.hybrid_model import HybridModel
from safetensors.numpy import load_file

from nemo_qad.errors import UserError
from nemo_qad.runtime import process_groups
from nemo_qad.schema import Loss, RunConfig, Stage
from nemo_qad.stages import evaluate, logits, pipeline, teacher
from nemo_qad.stages.folder import RunFolder
from nemo_qad.stages.session import Session
from nemo_qad.training.interrupt import Interrupted

num_models: list[int] = []


def count_models() -> int:
    return sum(isinstance(thing, HybridModel) for thing in gc.get_objects())


def say(text: str) -> None:
    """Stage qad speaks after its last step, when everything that it works with is still there."""
    print(text)
    if text.startswith("qad: held-out KL"):
        num_models.append(count_models())


class Stopped(Session):
    """Ctrl-C comes while the n-th batch of the teacher is computed."""

    countdown = -1

    @property
    def teacher(self):
        self.countdown -= 1
        if self.countdown == 0:
            signal.raise_signal(signal.SIGINT)
        return super().teacher


def begin(run: RunConfig, name: str) -> Stopped:
    session = Stopped(run, RunFolder(Path(name), run), say)
    session.folder.finish(Stage.teacher, teacher.run(session), {}, [])
    pipeline._run_stage(session, Stage.ptq)
    return session


def interrupted_writing(session: Stopped) -> dict[str, object]:
    """Writes the file whole, and in two goes, in shards of 3 batches."""
    contents = logits.contents_of(session)
    shard_bytes = 12 * contents.parts["train"].bytes_per_sample
    straight, stopped = Path("straight"), Path("stopped-logits")
    logits.write_file(session, straight, contents, shard_bytes)
    session.countdown = 8
    try:
        logits.write_file(session, stopped, contents, shard_bytes)
        raise AssertionError("the signal was not heeded")
    except Interrupted:
        whole = len(list(stopped.glob("*.safetensors")))
    logits.write_file(session, stopped, contents, shard_bytes)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (straight, stopped)]
    return {
        "shards": len(list(straight.glob("*.safetensors"))),
        "whole_when_stopped": whole,
        "same_bytes": files[0] == files[1],
    }


def same_draws(session: Stopped) -> float:
    """The share of the sampled words that is the same when the teacher sees 4 samples at a time, and 2."""
    contents, run, read = logits.contents_of(session), session.run, []
    sampled = {name: replace(part, kind="sampled", temperature=2.0) for name, part in contents.parts.items()}
    contents = replace(contents, parts=sampled)
    for size in (4, 2):
        session.run = replace(run, qad=replace(run.qad, micro_batch_size=size))
        logits.write_file(session, Path(f"draws-{size}"), contents)
        read.append(load_file(f"draws-{size}/train-00000.safetensors")["indices"])
    session.run = run
    assert not (read[0][0] == read[0][1]).all()
    return float((read[0] == read[1]).mean())


def refused(session: Stopped) -> str:
    """What the pipeline says where QAD cannot start."""
    try:
        pipeline._run_stage(session, Stage.qad)
    except UserError as error:
        return str(error)
    raise AssertionError("QAD started")


def refused_without_room(session: Stopped) -> str:
    contents = logits.contents_of(session)
    train = replace(contents.parts["train"], num_samples=10**7)
    try:
        logits.write_file(session, Path("large"), replace(contents, parts={"train": train}))
    except UserError as error:
        assert not Path("large").exists()
        return str(error)
    raise AssertionError("there are terabytes here")


def refused_when_damaged(session: Stopped) -> str:
    shard = Path(session.folder.result(Stage.logits)["path"]) / "train-00000.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    message = refused(session)
    shard.write_bytes(raw)
    return message


def main() -> None:
    run = command_line.read(sys.argv[1:]).runs[0]
    with process_groups(run.parallel, seed=run.seed, threads=run.threads):
        dense = replace(run, qad=replace(run.qad, loss=Loss.linear_kl))
        session = begin(dense, "dense-in-process")
        pipeline._run_stage(session, Stage.qad)
        del session
        gc.collect()
        session = begin(run, "sparse-in-process")
        assert session.teacher.training is False  # loaded by PTQ, and still here
        num_models.append(count_models())
        found = {**interrupted_writing(session), "same_draws": same_draws(session)}
        found["refused_without_room"] = refused_without_room(session)
        found["refused_without_file"] = refused(session)
        session.folder.finish(Stage.logits, logits.run(session), {}, [])
        found["refused_when_damaged"] = refused_when_damaged(session)
        pipeline._run_stage(session, Stage.qad)
        measured = evaluate.run(session)["models"]
    found["models_in_dense_qad"], found["models_after_ptq"], found["models_in_sparse_qad"] = num_models
    found["held_out_kl"] = {name: values["held_out_kl"] for name, values in measured.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
