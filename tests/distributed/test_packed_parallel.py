"""Packed documents through the whole hybrid model: each alone, and the same at every context-parallel size."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, ONE, build, hybrid
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.models.forward import whole_hidden
from nemo_qad.models.whole import gather, parameter_cut
from nemo_qad.schema import Loss, ParallelConfig, Precision, QadConfig, Schedule
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Trainer

MODEL = hybrid(max_position_embeddings=1024)
# 712 tokens: chunks of 178 on 2 ranks and of 89 on 4. The last document of the first row is padding.
ROWS = ([7, 698, 1, 6], [100, 78, 1, 1, 532])
LENGTH = 712
QAD = QadConfig(
    name="test", learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=1, steps=3, schedule=Schedule.cosine,
    global_batch_size=2, micro_batch_size=2, sequence_length=LENGTH, loss=Loss.linear_kl,
)  # fmt: skip


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, MODEL.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in ROWS])
    mask = torch.ones(2, LENGTH)
    mask[0, -6:] = 0
    return {"tokens": tokens, "positions": positions, "loss_mask": mask}


def run(rank: int, parallel: ParallelConfig) -> Results:
    """Hidden states of the packed rows, twice; loss and gradients of a step on them."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        student, teacher = build(MODEL, parallel), build(MODEL, parallel, None, seed=2).requires_grad_(False)
        given = batch()
        hidden = [whole_hidden(student, given["tokens"], given["positions"]) for _ in range(2)]
        found: Results = {"hidden": hidden[0], "again": torch.tensor(torch.equal(*hidden))}
        if parallel.context == 1:
            found["alone"] = documents_alone(student, given["tokens"])
        loss = distillation_loss(QAD, vocab_size=MODEL.vocab_size, teacher=teacher)
        trainer = Trainer(student, qad_settings(QAD), loss, precision=Precision.fp32)
        result = trainer.train_step([given])
        found |= {"loss": torch.tensor(result.loss), "norm": torch.tensor(result.grad_norm)}
        gradients: dict[str, Any] = {n: p.main_grad for n, p in student.named_parameters()}
        whole = gather(student, gradients, parameter_cut(student))
        return found | {f"gradient.{name}": value.clone() for name, value in whole.items()}


def documents_alone(module: Any, tokens_BS: Tensor) -> Tensor:
    rows = []
    for tokens_S, sizes in zip(tokens_BS, ROWS, strict=True):
        rows.append(torch.cat([whole_hidden(module, part[None])[0] for part in tokens_S.split(sizes)]))
    return torch.stack(rows)


@cache
def ranks(context: int) -> list[Results]:
    layout = ONE if context == 1 else LAYOUTS[f"cp{context}"]
    return run_ranks(run, context, layout, environment=True)


def test_each_document_is_as_it_is_alone() -> None:
    one = ranks(1)[0]
    error = (one["hidden"] - one["alone"]).norm(dim=-1) / one["alone"].norm(dim=-1)
    assert error.max() < 1e-5


@pytest.mark.parametrize("context", [2, 4])
def test_context_parallel_ranks_equal_one(context: int) -> None:
    one = ranks(1)[0]
    for found in ranks(context):
        assert found["again"]  # two runs are bit-equal
        error = (found["hidden"] - one["hidden"]).norm(dim=-1) / one["hidden"].norm(dim=-1)
        assert error.max() < 1e-5
        for name in ("loss", "norm"):
            assert float(found[name]) == pytest.approx(float(one[name]), rel=1e-5)
    for name, reference in one.items():
        if name.startswith("gradient."):
            assert (ranks(context)[0][name] - reference).norm() <= 1e-5 * reference.norm() + 1e-9, name
