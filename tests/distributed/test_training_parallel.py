"""Three optimizer steps of distillation in each layout equal those of one rank: losses, weights, optimizer state."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, ONE, SEQUENCE, build, hybrid
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.checkpoint import sharded
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.errors import UserError
from nemo_qad.models.whole import gather, parameter_cut
from nemo_qad.schema import Loss, ParallelConfig, Precision, QadConfig, Recompute, Schedule
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Trainer

MODEL = hybrid()
STEPS, NUM_MICRO, ROWS = 3, 4, 2  # of one rank; R data-parallel ranks take NUM_MICRO / R micro-batches each
# The last micro-batch counts one token: under context parallelism a rank has none of it.
QAD = QadConfig(
    name="test", learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=1, steps=STEPS, schedule=Schedule.cosine,
    global_batch_size=NUM_MICRO * ROWS, micro_batch_size=ROWS, sequence_length=SEQUENCE, loss=Loss.linear_kl,
    clip_grad=1.0, weight_decay=0.1,
)  # fmt: skip


def micro_batches(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for number in range(NUM_MICRO):
        tokens = torch.randint(0, MODEL.vocab_size, (ROWS, SEQUENCE), generator=generator)
        mask = (torch.rand((ROWS, SEQUENCE), generator=generator) > 0.3).float()
        if number == NUM_MICRO - 1:
            mask = torch.zeros(ROWS, SEQUENCE)
            mask[1, 2] = 1
        found.append({"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask})
    return found


def train(rank: int, parallel: ParallelConfig, weights: Results | None, folder: Path | None = None) -> Results:
    """Metrics of each step on every rank; the state after the last, and the gradients of the first, on rank 0.

    `folder` gets a checkpoint of the first step.
    """
    with runtime.process_groups(parallel, seed=1, threads=1):
        start = part(weights, "start.") if weights else None
        student = build(MODEL, parallel, start)
        found: Results = {}
        if weights is None:
            found = {f"start.{n}": p.detach().clone() for n, p in student.named_parameters()}
            teacher = build(MODEL, parallel, None, seed=2)
            found |= {f"teacher.{n}": p.detach().clone() for n, p in teacher.named_parameters()}
        else:
            teacher = build(MODEL, parallel, part(weights, "teacher."))
        teacher.requires_grad_(False)
        trainer = Trainer(
            student, qad_settings(QAD), distillation_loss(QAD, vocab_size=MODEL.vocab_size, teacher=teacher),
            precision=Precision.fp32, average_decay=0.5, distributed_optimizer=parallel.distributed_optimizer,
        )  # fmt: skip
        data: Any = student.pg_collection.dp
        saver = CheckpointSaver(StepFolders(folder), print, asynchronous=True) if folder else None
        for step in range(STEPS):
            result = trainer.train_step(micro_batches(step)[data.rank() :: data.size()])
            found |= {f"loss.{step}": torch.tensor(result.loss), f"norm.{step}": torch.tensor(result.grad_norm)}
            found[f"count.{step}"] = torch.tensor(result.num_tokens)
            if step == 0:
                if saver is not None:
                    saver.save(1, trainer.saving(), {})  # and training goes on at once
                gradients = {n: p.main_grad for n, p in student.named_parameters()}
                if not parallel.distributed_optimizer:
                    whole = gather(student, gradients, parameter_cut(student))
                    found |= {f"gradient.{n}": g.clone() for n, g in whole.items()}
        if saver is not None:
            saver.require_saved()
        return found | {f"state.{n}": t for n, t in trainer.state().items() if n != "rng"}


def resumed(rank: int, parallel: ParallelConfig, weights: Results, folder: Path, same_ranks: bool) -> Results:
    """The last two steps from the checkpoint after the first, which another layout may have written."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        student = build(MODEL, parallel, part(weights, "start."))
        teacher = build(MODEL, parallel, part(weights, "teacher.")).requires_grad_(False)
        trainer = Trainer(
            student, qad_settings(QAD), distillation_loss(QAD, vocab_size=MODEL.vocab_size, teacher=teacher),
            precision=Precision.fp32, average_decay=0.5, distributed_optimizer=parallel.distributed_optimizer,
        )  # fmt: skip
        trainer.restore(functools.partial(sharded.load, folder / "step-000001"), 1, same_ranks=same_ranks)
        data: Any = student.pg_collection.dp
        for step in (1, 2):
            trainer.train_step(micro_batches(step)[data.rank() :: data.size()])
        return {f"state.{n}": t for n, t in trainer.state().items() if n != "rng"}


def part(results: Results, prefix: str) -> Results:
    return {name.removeprefix(prefix): value for name, value in results.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def one() -> Results:
    return run_ranks(train, 1, ONE, None, environment=True)[0]


DISTRIBUTED = ParallelConfig(name="dp2_optimizer", ranks_per_node=2, distributed_optimizer=True)
RECOMPUTED = {
    f"cp2_{recompute}": ParallelConfig(name="cp2", ranks_per_node=2, context=2, recompute=recompute)
    for recompute in (Recompute.selective, Recompute.full)
}
GRID = {
    name: LAYOUTS[name]
    for name in (
        "tp2", "etp2", "ep2", "dp2", "cp2", "pp2", "tp2_ep2", "tp2_cp2", "tp2_pp2", "cp2_pp2", "pp2_dp2_ep2",
        "dp4_ep2", "cp4",
    )
} | {"dp2_optimizer": DISTRIBUTED, **RECOMPUTED}


@pytest.mark.parametrize("layout", GRID)
def test_three_steps_equal_those_of_one_rank(one: Results, layout: str) -> None:
    parallel = GRID[layout]
    ranks = run_ranks(train, parallel.ranks_per_node, parallel, one, environment=True)
    for found in ranks:
        for step in range(STEPS):
            assert int(found[f"count.{step}"]) == int(one[f"count.{step}"]) > 50
            for name in (f"loss.{step}", f"norm.{step}"):
                assert float(found[name]) == pytest.approx(float(one[name]), rel=1e-5), name
    state = part(ranks[0], "state.")
    assert state.keys() == part(one, "state.").keys()
    assert not any(part(found, "state.") for found in ranks[1:])
    for kind, tolerance in (("gradient.", 1e-5), ("state.main.", 1e-5), ("state.average.", 1e-5)):
        expected = part(one, kind)
        if kind == "gradient." and parallel.distributed_optimizer:
            continue
        for name, reference in expected.items():
            value = ranks[0][kind + name][: len(reference)] if reference.dim() else ranks[0][kind + name]
            error = float((value - reference[: len(value)]).norm())
            assert error <= tolerance * float(reference.norm()) + 1e-9, f"{kind}{name}: {error}"


def step_on_other_data(rank: int, parallel: ParallelConfig) -> Results:
    """What each rank says when the second has read something else."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        student, teacher = build(MODEL, parallel), build(MODEL, parallel, None, seed=2).requires_grad_(False)
        loss = distillation_loss(QAD, vocab_size=MODEL.vocab_size, teacher=teacher)
        trainer = Trainer(student, qad_settings(QAD), loss, precision=Precision.fp32)
        given = micro_batches(0)
        if rank == 1:
            given[2]["tokens"] = given[2]["tokens"].flip(1)
        before = [p.detach().clone() for p in student.parameters()]
        with pytest.raises(UserError, match="rank 1 has read other tokens than rank 0"):
            trainer.train_step(given)
        same = all(torch.equal(p, b) for p, b in zip(student.parameters(), before, strict=True))
        return {"same": torch.tensor(same)}


def test_a_rank_that_reads_other_data_is_named() -> None:
    assert all(found["same"] for found in run_ranks(step_on_other_data, 2, LAYOUTS["tp2"], environment=True))


PAIRS = [
    ("one", "tp2_ep2"), ("tp2_ep2", "one"), ("dp2_optimizer", "pp2"), ("tp2_pp2", "one"), ("one", "cp2"),
    ("ep2", "dp2_optimizer"), ("dp2_optimizer", "dp2"), ("cp2", "tp2"), ("tp2", "tp2"),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_checkpoint_continues_in_another_layout(one: Results, writer: str, reader: str, tmp_path: Path) -> None:
    """One that was written beside the second step, by processes of their own."""
    layouts = {**GRID, "one": ONE}
    wrote, reads = layouts[writer], layouts[reader]
    known = {name: value for name, value in one.items() if name.startswith(("start.", "teacher."))}
    run_ranks(train, wrote.ranks_per_node, wrote, one, tmp_path, environment=True)
    same = wrote.ranks_per_node == reads.ranks_per_node
    found = run_ranks(resumed, reads.ranks_per_node, reads, known, tmp_path, same, environment=True)[0]
    expected = part(one, "state.")
    assert part(found, "state.").keys() == expected.keys()
    for name, reference in expected.items():
        error = float((found[f"state.{name}"] - reference).norm())
        assert error <= 1e-5 * float(reference.norm()) + 1e-9, f"{name}: {error}"
