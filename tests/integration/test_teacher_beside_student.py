"""A teacher beside a student that is quantised and trained in the same process: dropout and types (D4, D7)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from small_model import SEQUENCE_LENGTH, batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.models import build as building
from nemo_qad.models.build import logits_fn
from nemo_qad.quantization import modelopt
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.schema import Loss, ParallelConfig, QadConfig
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Batch, Trainer

MODEL = small_model()
ONE = ParallelConfig(name="single")


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ONE, seed=1, threads=1):
        yield


def with_mask(batch: Batch) -> Batch:
    return {**batch, "loss_mask": torch.ones(batch["tokens"].shape)}


def trainer_of(student: nn.Module, teacher: nn.Module, loss: Loss) -> Trainer:
    settings = QadConfig(
        "test", 1e-3, 0.0, 0, 10, global_batch_size=2, sequence_length=SEQUENCE_LENGTH, weight_decay=0.1, loss=loss
    )
    step = distillation_loss(settings, vocab_size=MODEL.vocab_size, teacher=teacher)
    return Trainer(student, qad_settings(settings), step, precision=MODEL.precision)


def quantizers(module: nn.Module) -> int:
    return sum(isinstance(part, modelopt.TensorQuantizer) for part in module.modules())


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("loss", [Loss.linear_kl, Loss.kl])
def test_dropout_of_the_configuration_reaches_the_student_alone(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: both models are built with dropout 0.5 in attention and between layers, and trained a step."""
    original = building.transformer_config

    def with_dropout(*arguments: Any) -> Any:
        config = original(*arguments)
        config.hidden_dropout = config.attention_dropout = 0.5
        return config

    monkeypatch.setattr(building, "transformer_config", with_dropout)
    teacher, student = build(MODEL), build(MODEL)
    assert teacher.decoder.layers[2].self_attention.core_attention.dropout == 0.5
    quantize(student, load_recipe("four_over_six"), MODEL, batches(MODEL))
    given = with_mask(batches(MODEL)[0])
    seen: list[Tensor] = []
    teacher.decoder.register_forward_hook(lambda _, __, out: seen.append(out.clone()))
    teacher.train()
    for _ in range(2):
        teacher.decoder(teacher.embedding(given["tokens"], None), attention_mask=None)
    assert not torch.equal(*seen)  # the dropout is real
    seen.clear()
    trainer = trainer_of(student, teacher, loss)
    trainer.train_step([given, given])
    student.train()
    totals = [trainer.loss(student, given)[0] for _ in range(2)]
    assert len(seen) == 4 and all(torch.equal(seen[0], other) for other in seen[1:])
    assert totals[0] != totals[1]  # the student keeps its dropout
    sum(totals).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any(hasattr(parameter, "main_grad") for parameter in teacher.parameters())  # where DDP keeps gradients
    assert all(parameter.main_grad.abs().max() > 0 for parameter in student.decoder.layers[4].parameters())


Specification = dict[str, Any]


def specification(module: nn.Module) -> Specification:
    """What a model is made of: types and settings of its modules, names and shapes of its tensors, its logits."""
    config: Any = module.config
    return {
        "types": {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in module.named_modules()},
        "settings": {name: m.extra_repr() for name, m in module.named_modules()},
        "forwards": {name: m.forward.__func__.__qualname__ for name, m in module.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in module.named_modules()},
        "tensors": {name: (tuple(t.shape), str(t.dtype)) for name, t in module.state_dict().items() if t is not None},
        "config": {field.name: str(_plain(getattr(config, field.name))) for field in dataclasses.fields(config)},
        "logits": checksum(logits_fn(module, MODEL.vocab_size)(batches(MODEL)[0]["tokens"])),
    }


def _plain(value: Any) -> Any:
    """Functions and bound methods by name: their addresses differ from process to process."""
    if isinstance(value, functools.partial):
        return _plain(value.func), value.args, value.keywords
    return getattr(value, "__qualname__", value)


def plain_specification() -> Specification:
    """In a process of its own, to which ModelOpt's quantization never came."""
    with runtime.process_groups(ONE, seed=1, threads=1):
        found = specification(build(MODEL))
    assert not modelopt._installed
    return found


def test_a_quantised_student_leaves_no_trace_on_teachers() -> None:
    """D7: ModelOpt converts classes in place and patches its own modules, in the process that builds teachers."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other_process:
        expected = other_process.submit(plain_specification).result()
    before = build(MODEL)
    student = build(MODEL)
    quantize(student, load_recipe("lightning_release"), MODEL, batches(MODEL))
    after = build(MODEL)
    assert modelopt._installed and quantizers(student) > 50
    changed = specification(student)
    for what in ("types", "tensors", "logits"):
        assert changed[what] != expected[what]  # else the comparison would prove nothing
    for teacher in (before, after):
        assert quantizers(teacher) == 0
        for what, value in specification(teacher).items():
            assert value == expected[what], what


def test_a_training_student_leaves_no_trace_on_its_teacher() -> None:
    """D7: its DDP and its optimizer hang hooks and attributes on modules and parameters; two steps, then look."""
    teacher, untouched, student = build(MODEL), build(MODEL), build(MODEL)
    quantize(student, load_recipe("four_over_six"), MODEL, batches(MODEL))
    trainer = trainer_of(student, teacher, Loss.linear_kl)
    for _ in range(2):
        trainer.train_step([with_mask(batch) for batch in batches(MODEL, 2)])
    assert specification(teacher) == specification(untouched)
    for name, parameter in teacher.named_parameters():
        assert vars(parameter).keys() == vars(untouched.get_parameter(name)).keys(), name
