"""The losses of a step on a real hybrid model, plain and quantised, agree; the teacher stands still (B17, D4)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.distillation.kl import reference_kl
from nemo_qad.distillation.sparse_kl import SparseLogits
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits
from nemo_qad.distillation.step import distillation_loss, output_operands
from nemo_qad.models.build import build_model, forward_logits
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.schema import (
    AttentionConfig,
    ExtraRule,
    Format,
    Loss,
    MambaConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    Precision,
    QadConfig,
)

ONE_RANK = ParallelConfig(name="one")
B, S, V = 2, 16, 100  # V is padded to 128 columns
STUDENTS = ["noise", "tied", "four_over_six", "fp8 output"]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ONE_RANK, seed=1, threads=1):
        yield
    pair.cache_clear()


def small_model(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "name": "small",
        "hybrid_pattern": "ME*-",
        "hidden_size": 32,
        "vocab_size": V,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 48,
        "precision": Precision.fp32,
        "init_std": 0.2,
        "attention": AttentionConfig(num_heads=4, num_query_groups=2, head_dim=16),
        "mamba": MambaConfig(num_heads=4, head_dim=16, num_groups=2, state_dim=4, chunk_size=8),
        "moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_expert_ffn_hidden_size=32),
    }
    return ModelConfig(**(fields | changes))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    mask = (torch.rand(B, S, generator=generator) > 0.3).float()
    return {"tokens": torch.randint(0, V, (B, S), generator=generator), "loss_mask": mask}


def settings(loss: Loss = Loss.linear_kl, **changes: Any) -> QadConfig:
    return QadConfig(name="test", loss=loss, **changes)


def make(kind: str) -> tuple[nn.Module, nn.Module]:
    """(teacher, student): the student with noise on its weights, or quantised by a shipped recipe."""
    model = small_model(tied_output=kind == "tied")
    teacher, student = (build_model(model, ONE_RANK, sequence_length=S).eval() for _ in range(2))
    student.load_state_dict(teacher.state_dict())
    if kind in ("noise", "tied"):
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    elif kind != "same":
        extra = [ExtraRule("output_layer", Format.fp8)] if kind == "fp8 output" else []
        recipe = dataclasses.replace(compose(["+recipe=four_over_six"]).recipe, extra_rules=extra)
        quantize(student, recipe, model, [{"tokens": batch()["tokens"]}])
    return teacher, student


pair = cache(make)


def of_step(kind: str, qad: QadConfig, given: dict[str, Tensor] | None = None, vocab: int = V) -> dict[str, Tensor]:
    """The loss by the name "loss" and the gradients by the names of the student's parameters."""
    teacher, student = pair(kind)
    takes_teacher = qad.loss not in (Loss.top_k, Loss.sampled)
    loss = distillation_loss(qad, vocab_size=vocab, teacher=teacher if takes_teacher else None)
    total, count = loss(student, given or batch())
    assert count == batch()["loss_mask"].sum()
    return backward(student, total)


def backward(student: nn.Module, total: Tensor) -> dict[str, Tensor]:
    student.zero_grad()
    total.backward()
    found = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    assert len(found) == len(list(student.parameters()))
    return {"loss": total.detach(), **found}


def by_reference(kind: str, vocab: int = V, tau: float = 1.0, reverse: bool = False) -> dict[str, Tensor]:
    """The oracle on whole logits."""
    teacher, student = pair(kind)
    with torch.no_grad():
        teacher_TW = forward_logits(teacher, batch()["tokens"]).flatten(0, 1)
    student_TW = forward_logits(student, batch()["tokens"]).flatten(0, 1)
    mask_T = batch()["loss_mask"].flatten()
    total, _ = reference_kl(teacher_TW, student_TW, mask_T, vocab_size=vocab, temperature=tau, reverse=reverse)
    return backward(student, total)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative error in norm over loss and gradients."""
    assert found.keys() == expected.keys()
    return max(((found[name] - truth).norm() / truth.norm().clamp(min=1e-9)).item() for name, truth in expected.items())


@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize(("tau", "reverse"), [(1.0, False), (2.0, False), (1.0, True)])
def test_every_form_agrees_with_the_oracle(kind: str, tau: float, reverse: bool) -> None:
    """Loss and gradient of every parameter; a tied output layer, one in NVFP4 and one in FP8 with quantised inputs."""
    expected = by_reference(kind, tau=tau, reverse=reverse)
    assert 1e-3 < expected["loss"] / batch()["loss_mask"].sum() < 3
    for loss in (Loss.linear_kl, Loss.kl):
        assert worst(of_step(kind, settings(loss, temperature=tau, reverse=reverse)), expected) <= 1e-4
    small = settings(temperature=tau, reverse=reverse, loss_memory_mib=1)
    assert worst(of_step(kind, small), expected) <= 1e-4


@pytest.mark.parametrize("kind", ["four_over_six", "fp8 output"])
def test_the_quantised_output_layer_is_what_the_loss_sees(kind: str) -> None:
    """Straight through to the parameter: its gradient is there, its value is not what was multiplied."""
    _, student = pair(kind)
    hidden, weight = output_operands(student, batch()["tokens"])
    assert (weight - student.output_layer.weight).norm() > 1e-3 * weight.norm()
    logits = forward_logits(student, batch()["tokens"]).flatten(0, 1)
    torch.testing.assert_close(hidden @ weight.T, logits, rtol=1e-5, atol=1e-5)


def test_modelopts_loss_agrees_where_no_column_is_padding() -> None:
    """And not where some are, which it counts: its words are the 128 columns."""
    modelopt = of_step("noise", settings(Loss.modelopt))
    assert worst(modelopt, by_reference("noise", vocab=128)) <= 1e-4
    assert worst(of_step("noise", settings(Loss.linear_kl), vocab=128), modelopt) <= 1e-4
    assert worst(modelopt, by_reference("noise")) > 1e-2


def test_sparse_losses_read_the_batch() -> None:
    teacher, _ = pair("noise")
    with torch.no_grad():
        head = output_operands(teacher, batch()["tokens"])

    def carrying(kept: SparseLogits) -> dict[str, Tensor]:
        fields = {"teacher_indices": kept.indices_TK, "teacher_log_prob": kept.log_prob_TK}
        if kept.log_tail_T is not None:
            fields["teacher_log_tail"] = kept.log_tail_T
        return batch() | {name: values.unflatten(0, (B, S)) for name, values in fields.items()}

    whole = by_reference("noise", tau=1.5)
    qad = settings(Loss.top_k, temperature=1.5)
    every = carrying(top_k_logits(*head, k=V, vocab_size=V, temperature=1.5))
    assert worst(of_step("noise", qad, every), whole) <= 1e-4
    some = of_step("noise", qad, carrying(top_k_logits(*head, k=9, vocab_size=V, temperature=1.5)))
    assert 0.3 * whole["loss"] < some["loss"] < whole["loss"]
    draws = {"num_samples": 20_000, "uniform_T": torch.rand(B * S), "vocab_size": V, "temperature": 1.5}
    drawn = of_step("noise", settings(Loss.sampled, temperature=1.5), carrying(sampled_logits(*head, **draws)))
    assert worst(drawn, whole) <= 0.02


@pytest.mark.parametrize("loss", [Loss.linear_kl, Loss.kl])
def test_equal_models_lose_nothing_and_a_quantised_student_something(loss: Loss) -> None:
    """B17: 0 with quantizers off, and with them on more than 0 and less than random models have."""
    teacher, student = make("same")
    assert distillation_loss(settings(loss), vocab_size=V, teacher=teacher)(student, batch())[0].item() == 0
    per_token = of_step("four_over_six", settings(loss))["loss"] / batch()["loss_mask"].sum()
    assert 1e-4 < per_token < 0.5


@pytest.mark.parametrize("loss", [Loss.linear_kl, Loss.kl, Loss.modelopt])
def test_the_teacher_stands_still(loss: Loss) -> None:
    """D4: with dropout in its layers and left in train mode, two passes are bit-equal; no gradient, no count moves."""
    teacher, student = make("noise")
    for module in teacher.modules():
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = 0.5
    teacher.train()
    with torch.no_grad():
        noisy = [forward_logits(teacher, batch()["tokens"]) for _ in range(2)]
    assert not torch.equal(*noisy)  # the dropout is real
    before = {name: value.clone() for name, value in teacher.state_dict().items() if torch.is_tensor(value)}
    step, with_grad = distillation_loss(settings(loss), vocab_size=V, teacher=teacher), []
    teacher.decoder.register_forward_hook(lambda *_: with_grad.append(torch.is_grad_enabled()))
    totals = [step(student, batch())[0] for _ in range(2)]
    assert torch.equal(*totals) and with_grad == [False, False]
    sum(totals).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    after = teacher.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("loss", [Loss.linear_kl, Loss.kl])
def test_nan_names_the_token_and_the_sample(loss: Loss) -> None:
    """One counted token, then a weight of the student that is NaN."""
    (teacher, student), given = make("noise"), batch()
    given["loss_mask"] = torch.zeros(B, S)
    given["loss_mask"][1, 3] = 1
    with torch.no_grad():
        student.decoder.layers[0].mixer.in_proj.weight[0, 0] = float("nan")
    step = distillation_loss(settings(loss), vocab_size=V, teacher=teacher)
    total, count = step(student, given)
    assert torch.isnan(total) and int(count) == 1
    assert "token 3 of sample 1 of the micro-batch is not finite" in str(step.trouble)


def test_nan_names_the_model_and_the_part() -> None:
    for index, part in ((0, "the teacher's output weight"), (1, "the student's output weight")):
        models = make("noise")
        with torch.no_grad():
            models[index].output_layer.weight[7] = float("inf")
        step = distillation_loss(settings(), vocab_size=V, teacher=models[0])
        assert torch.isnan(step(models[1], batch())[0])
        assert re.search(f"token . of sample 0 .*: {part} hold NaN or Inf", str(step.trouble)), step.trouble
    teacher, student = make("noise")
    with torch.no_grad():
        teacher.decoder.layers[3].mlp.linear_fc1.weight[0] = float("nan")
    step = distillation_loss(settings(), vocab_size=V, teacher=teacher)
    assert torch.isnan(step(student, batch())[0]) and "the teacher's hidden state hold" in str(step.trouble)
