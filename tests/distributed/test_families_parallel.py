"""Layers of Llama and Qwen3 (gated, rotary, normed heads, softmax router) over ranks: one step equals one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, ONE, SEQUENCE, build
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.choices import Architecture
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.models.forward import whole_hidden
from nemo_qad.models.whole import gather, parameter_cut
from nemo_qad.schema import (
    AttentionConfig,
    Loss,
    MambaConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    Precision,
    QadConfig,
    Schedule,
)
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Trainer

MODEL = ModelConfig(
    name="small", architecture=Architecture.qwen3_moe, hybrid_pattern="*-*E", hidden_size=64, vocab_size=500,
    max_position_embeddings=64, ffn_hidden_size=96, precision=Precision.fp32, init_std=0.1, rotary_base=10000.0,
    attention=AttentionConfig(num_heads=4, num_query_groups=4, head_dim=16), mamba=MambaConfig(0, 0, 0, 0),
    moe=MoeConfig(4, 2, 48, 0, 1.0, 0.0, 0.0),
)  # fmt: skip
QAD = QadConfig(
    name="test", learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=1, steps=3, schedule=Schedule.cosine,
    global_batch_size=4, micro_batch_size=2, sequence_length=SEQUENCE, loss=Loss.linear_kl,
)  # fmt: skip
GRID = ("tp2_ep2", "cp2", "pp2")


def micro_batches() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(9)
    shape = (2, SEQUENCE)
    return [
        {"tokens": torch.randint(0, MODEL.vocab_size, shape, generator=random), "loss_mask": torch.ones(shape)}
        for _ in range(2)
    ]


def part(weights: Results | None, prefix: str) -> Results | None:
    if weights is None:
        return None
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def step(rank: int, parallel: ParallelConfig, weights: Results | None, folder: str) -> Results:
    """Loss and gradients of one step, hidden states, and the weights as they come back from a folder."""
    with runtime.process_groups(parallel, seed=1, threads=1):
        student = build(MODEL, parallel, part(weights, "start."))
        teacher = build(MODEL, parallel, part(weights, "teacher."), 2)
        found: Results = {}
        if weights is None:
            found = {f"start.{n}": p.detach().clone() for n, p in student.named_parameters()}
            found |= {f"teacher.{n}": p.detach().clone() for n, p in teacher.named_parameters()}
        hidden = whole_hidden(student, micro_batches()[0]["tokens"])
        if hidden is not None:
            found["hidden"] = hidden
        save_bf16(student, Path(folder, parallel.name), MODEL, None, 1.0)
        loss = distillation_loss(QAD, vocab_size=MODEL.vocab_size, teacher=teacher.requires_grad_(False))
        trainer = Trainer(student, qad_settings(QAD), loss, precision=Precision.fp32)
        data: Any = student.pg_collection.dp
        result = trainer.train_step(micro_batches()[data.rank() :: data.size()])
        found |= {"loss": torch.tensor(result.loss), "norm": torch.tensor(result.grad_norm)}
        gradients = {n: p.main_grad for n, p in student.named_parameters()}
        found |= {f"gradient.{n}": g.clone() for n, g in gather(student, gradients, parameter_cut(student)).items()}
        load_weights(teacher, Path(folder, parallel.name), MODEL)
        return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Results]:
    folder = str(tmp_path_factory.mktemp("families"))
    return folder, run_ranks(step, 1, ONE, None, folder, environment=True)[0]


@pytest.mark.parametrize("layout", GRID)
def test_a_step_equals_that_of_one_rank(one: tuple[str, Results], layout: str) -> None:
    folder, truth = one
    parallel = LAYOUTS[layout]
    ranks = run_ranks(step, parallel.ranks_per_node, parallel, truth, folder, environment=True)
    for found in ranks:
        for name in ("loss", "norm"):
            assert float(found[name]) == pytest.approx(float(truth[name]), rel=1e-5), name
        if "hidden" in found:
            assert (found["hidden"] - truth["hidden"]).norm() <= 1e-5 * truth["hidden"].norm()
    for name, reference in truth.items():
        if name.startswith("gradient."):
            value = ranks[0][name][: len(reference)]
            assert (value - reference[: len(value)]).norm() <= 1e-5 * reference.norm() + 1e-9, name
    ours, theirs = (Path(f"{folder}/{name}/model.safetensors").read_bytes() for name in (layout, "one"))
    assert ours == theirs
