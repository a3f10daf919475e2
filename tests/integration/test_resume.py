"""QAD stopped and continued in this process: what is taken up, what is refused, what is said (F1, F10, F12, I4)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_model import SEQUENCE_LENGTH, build
from test_frozen_teacher import MODEL, ONE, SETTINGS

from nemo_qad import runtime
from nemo_qad.checkpoint import manifest
from nemo_qad.config import compose
from nemo_qad.data import indexed, tokenizer
from nemo_qad.distillation.step import DistillationLoss
from nemo_qad.errors import EXIT_STOPPED, RunFolderError, UserError
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.schema import Stage
from nemo_qad.stages import pipeline
from nemo_qad.stages.folder import RunFolder
from nemo_qad.stages.session import Session
from nemo_qad.training.interrupt import Interrupted
from nemo_qad.training.trainer import Trainer

NUM_TOKENS = 4 * 150  # 18 samples of 32 an epoch: ten steps of two pass its end


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ONE, seed=1, threads=1):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, teacher, and a run folder in ROOT/ptq that has finished PTQ."""
    root = tmp_path_factory.mktemp("resume")
    for name, seed in (("data", 7), ("other", 8)):
        generator = np.random.default_rng(seed)
        (root / name).mkdir()
        for kind in ("train", "held_out"):
            texts = [generator.integers(2, 512, NUM_TOKENS // 4) for _ in range(4)]
            indexed.write(root / name / kind, texts, MODEL.vocab_size)
        tokenizer.save(tokenizer.train(["some text"], 512), root / name)
    save_bf16(build(MODEL, seed=3), root / "teacher", MODEL, root / "data", 5.0)
    return root


def qad(root: Path, run: Path, *overrides: str, stop: int | None = None, number: int = signal.SIGTERM) -> list[str]:
    """Runs PTQ and QAD in the folder `run`, or until a signal comes in step `stop`; what was said."""
    given = [f"data.path={root / 'data'}", f"teacher.path={root / 'teacher'}", f"cache_dir={root / 'cache'}"]
    config = dataclasses.replace(compose([*SETTINGS, *given, *overrides]), model=MODEL)
    said: list[str] = []
    folder = RunFolder(run, config)
    try:
        session = Session(config, folder, said.append)
        pipeline._run_teacher(session)
        pipeline._run_stage(session, Stage.ptq)
        with pytest.MonkeyPatch.context() as patch:
            if stop is not None:
                patch.setattr(Trainer, "train_step", _signalled(Trainer.train_step, stop, number))
            pipeline._run_stage(session, Stage.qad)
    finally:
        folder.close()
    return said


def _signalled(original: Any, stop: int, number: int) -> Any:
    def train_step(self: Trainer, batch: Any) -> Any:
        if self.step + 1 == stop:
            signal.raise_signal(number)
        return original(self, batch)

    return train_step


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "qad/student/tensors.safetensors")


def newest(run: Path) -> Path:
    return max((run / "qad/checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def straight(source: Path) -> Path:
    qad(source, source / "straight")
    return source / "straight"


@pytest.mark.parametrize("how", ["qad.async_save=true", "qad.async_save=false"])
def test_two_stops_change_no_bit(source: Path, straight: Path, tmp_path: Path, how: str) -> None:
    """F10: the data ends within the run; step numbers of stops do not divide anything."""
    for stop, number in ((3, signal.SIGTERM), (7, signal.SIGUSR1)):
        with pytest.raises(Interrupted) as caught:
            qad(source, tmp_path, how, "qad.save_every=4", stop=stop, number=number)
        assert caught.value.step == stop and caught.value.exit_status == EXIT_STOPPED == 75
    said = qad(source, tmp_path, how, "qad.save_every=4")
    assert any("continues after step 7" in text for text in said)
    ours, theirs = weights(tmp_path), weights(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_samples_of_stopped_runs_are_those_of_a_straight_one(source: Path, tmp_path: Path) -> None:
    """F10: each step's token ids, over the end of an epoch."""
    seen: dict[str, list[int]] = {"straight": [], "stopped": []}
    original = Trainer.train_step
    for name, stops in (("straight", [None]), ("stopped", [4, 8, None])):

        def spy(self: Trainer, batch: Any, name: str = name) -> Any:
            seen[name] += [int(b["tokens"].double().mul(torch.arange(1, SEQUENCE_LENGTH + 1)).sum()) for b in batch]
            return original(self, batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "train_step", spy)
            for stop in stops:
                try:
                    qad(source, tmp_path / name, stop=stop)
                except Interrupted:
                    assert stop is not None
    assert len(seen["straight"]) == 20 and seen["stopped"] == seen["straight"] and len(set(seen["straight"])) >= 18


DAMAGE = {"deleted": Path.unlink, "truncated": lambda path: os.truncate(path, path.stat().st_size // 2)}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(source: Path, tmp_path: Path, damage: str) -> None:
    with pytest.raises(Interrupted):
        qad(source, tmp_path, stop=5)
    path = next(newest(tmp_path).glob("*.distcp"))
    DAMAGE[damage](path)
    said = qad(source, tmp_path)
    assert any(str(path) in text and "passed over" in text for text in said)
    assert any("continues after step 4" in text for text in said)


def test_without_a_whole_checkpoint_nothing_begins_anew_unless_told(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        qad(source, tmp_path, stop=3)
    for path in (tmp_path / "qad/checkpoints").glob("step-*/checkpoint.json"):
        path.write_text("{}")
    with pytest.raises(UserError, match=r"None of the 2 checkpoints .* is whole.*resume\.restart=N"):
        qad(source, tmp_path)
    for _ in range(2):  # the same command again, as a requeued job gives it, restarts nothing
        qad(source, tmp_path, "resume.restart=1")
    assert (tmp_path / "qad-set-aside-1/checkpoints/step-000003").is_dir()
    assert not (tmp_path / "qad-set-aside-2").exists() and (tmp_path / "qad/student").is_dir()


def test_a_loss_that_jumps_stops_the_run(source: Path, tmp_path: Path) -> None:
    """What a checkpoint recorded of its own samples, and what they have now."""
    with pytest.raises(Interrupted):
        qad(source, tmp_path, stop=3)
    folder = newest(tmp_path)
    found = manifest.read_manifest(folder)
    assert found["meta"]["loss"] > 0
    manifest.write_manifest(folder, found["files"], {**found["meta"], "loss": found["meta"]["loss"] / 1.3})
    with pytest.raises(UserError, match=r"step 3 had a loss of .*max_loss_jump=1\.2"):
        qad(source, tmp_path)
    qad(source, tmp_path, "qad.max_loss_jump=1.4")


@pytest.mark.parametrize(
    ("change", "field"),
    [("qad.global_batch_size=4", "qad.global_batch_size"), ("qad.sequence_length=16", "qad.sequence_length")],
)
def test_another_batch_or_length_needs_a_flag_and_says_what_it_costs(
    source: Path, tmp_path: Path, change: str, field: str
) -> None:
    """F12"""
    with pytest.raises(Interrupted):
        qad(source, tmp_path, stop=3)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(RunFolderError, match=rf"another configuration \({field}.*resume\.allow=\[{field}\]"):
        qad(source, tmp_path, change)
    assert (tmp_path / "config.yaml").read_text() == before
    said = qad(source, tmp_path, change, f"resume.allow=[{field}]")
    tokens = 0 if "batch" in field else (18 * 32 - 6 * 32) * (6 * 32) // (37 * 16)
    text = next(text for text in said if "goes on at sample" in text)
    assert "goes on at sample 6 " in text or "goes on at sample 12 " in text
    assert abs(int(text.split(" tokens are read twice")[0].split()[-1]) - tokens) <= 16
    assert field in (tmp_path / "config_history.jsonl").read_text()


def test_other_text_needs_a_flag(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        qad(source, tmp_path, stop=3)
    other = f"data.path={source / 'other'}"
    with pytest.raises(UserError, match=r"the text has digest .*resume\.allow=\[data\]"):
        qad(source, tmp_path, other)
    said = qad(source, tmp_path, other, "resume.allow=[data]")
    assert any("goes on at sample 0 " in text and "384 not at all" in text for text in said), said


def test_another_recipe_is_refused_whatever_is_allowed(source: Path, tmp_path: Path) -> None:
    """F1"""
    with pytest.raises(Interrupted):
        qad(source, tmp_path, stop=3)
    with pytest.raises(RunFolderError, match="finished stages were made from"):
        qad(source, tmp_path, "recipe=max", "resume.allow=[recipe]")


def test_nan_stops_by_name_or_is_passed_over_as_often_as_allowed(source: Path, tmp_path: Path) -> None:
    original = DistillationLoss.__call__
    calls: list[int] = []

    def broken(self: DistillationLoss, student: Any, batch: Any) -> Any:
        total, count = original(self, student, batch)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) in (5, 6):  # step 3
                return total * float("nan"), count
        return total, count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistillationLoss, "__call__", broken)
        with pytest.raises(UserError, match=r"step 3: the loss is nan\. rank 0: NaN or Inf in micro-batch 0, 1"):
            qad(source, tmp_path / "stops")
        calls.clear()
        said = qad(source, tmp_path / "passes", "qad.max_skipped_steps=1")
    assert any("Passed over, 1 of at most 1" in text for text in said)
    result = json.loads((tmp_path / "passes/stages/qad.json").read_text())
    assert result["skipped_steps"] == 1 and result["steps"] == 10
    assert any("continues after step 2" in text for text in qad(source, tmp_path / "stops"))
