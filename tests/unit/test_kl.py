"""The distillation loss against FP64 truth, in loss and in gradient."""

from __future__ import annotations

import pytest
import torch

from nemo_qad.distillation.kl import kl_divergence, reference_kl


def _logits(tokens: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    teacher = 3 * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    student = teacher + 0.5 * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    mask = (torch.rand(tokens, generator=generator) > 0.3).float()
    mask[0] = 1
    return teacher.to(dtype), student.to(dtype).requires_grad_(), mask


def _by_hand(teacher, student, mask, vocab, tau):
    """The definition, written with nothing but exp, sum and log."""
    p = torch.exp(teacher[:, :vocab] / tau)
    q = torch.exp(student[:, :vocab] / tau)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return tau**2 * ((p * torch.log(p / q)).sum(-1) * (mask > 0)).sum()


@pytest.mark.parametrize("tokens", [1, 7, 255])
@pytest.mark.parametrize(("vocab", "width"), [(100, 100), (100, 128), (507, 1024)])
@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_loss_and_gradient_equal_fp64_truth(tokens, vocab, width, tau):
    teacher, student, mask = _logits(tokens, width)
    truth = _by_hand(teacher, student, mask, vocab, tau)
    (truth_gradient,) = torch.autograd.grad(truth, student)
    for function, dtype, tolerance in [
        (reference_kl, torch.float64, 1e-12),
        (kl_divergence, torch.float64, 1e-12),
        (kl_divergence, torch.float32, 2e-5),
    ]:
        leaf = student.detach().to(dtype).requires_grad_()
        total, count = function(teacher.to(dtype), leaf, mask, vocab_size=vocab, temperature=tau)
        (gradient,) = torch.autograd.grad(total, leaf)
        assert int(count) == int((mask > 0).sum())
        assert abs(total.item() - truth.item()) <= tolerance * truth.item()
        assert (gradient.double() - truth_gradient).norm() <= tolerance * truth_gradient.norm()
        assert not gradient[:, vocab:].any()
        assert not gradient[mask == 0].any()


def test_gradcheck():
    teacher, student, mask = _logits(5, 11)
    assert torch.autograd.gradcheck(
        lambda s: kl_divergence(teacher, s, mask, vocab_size=9, temperature=1.7)[0], (student,)
    )


def test_equal_models_lose_nothing_and_swapping_them_changes_the_loss():
    teacher, student, mask = _logits(17, 33)
    assert kl_divergence(teacher, teacher, mask, vocab_size=33)[0].item() == pytest.approx(0, abs=1e-12)
    forward = kl_divergence(teacher, student.detach(), mask, vocab_size=33)[0]
    reverse = kl_divergence(student.detach(), teacher, mask, vocab_size=33)[0]
    assert abs(forward - reverse) > 1e-3 * forward


def test_padding_columns_change_nothing():
    teacher, student, mask = _logits(9, 128)
    plain = kl_divergence(teacher[:, :100], student[:, :100], mask, vocab_size=100)[0]
    with torch.no_grad():
        student[:, 100:] = 1e4
    assert kl_divergence(teacher, student, mask, vocab_size=100)[0].item() == plain.item()


def test_no_counted_token_and_nan_in_a_masked_token():
    teacher, student, mask = _logits(4, 8)
    total, count = kl_divergence(teacher, student, torch.zeros(4), vocab_size=8)
    (gradient,) = torch.autograd.grad(total, student)
    assert (total.item(), count.item(), gradient.abs().sum().item()) == (0.0, 0, 0.0)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    with torch.no_grad():
        student[1] = float("nan")
    total, _ = kl_divergence(teacher, student, mask, vocab_size=8)
    (gradient,) = torch.autograd.grad(total, student)
    assert torch.isfinite(total) and torch.isfinite(gradient).all()


def test_inputs_are_left_alone():
    teacher, student, mask = _logits(6, 10, torch.float32)
    before = (teacher.clone(), student.detach().clone())
    kl_divergence(teacher, student, mask, vocab_size=10)[0].backward()
    assert torch.equal(teacher, before[0]) and torch.equal(student.detach(), before[1])


def test_large_temperature_keeps_the_gradients_size():
    teacher, student, mask = _logits(16, 50)
    norms = []
    for tau in (1.0, 2.0, 4.0, 64.0, 128.0):
        total, _ = kl_divergence(teacher, student, mask, vocab_size=50, temperature=tau)
        norms.append(torch.autograd.grad(total, student)[0].norm().item())
    assert max(norms[:3]) / min(norms[:3]) < 2 and norms[4] == pytest.approx(norms[3], rel=0.05)


def test_shapes_and_vocabulary_are_checked():
    teacher, student, mask = _logits(4, 8)
    with pytest.raises(ValueError, match=r"\[T, W\]"):
        kl_divergence(teacher[:2], student, mask, vocab_size=8)
    with pytest.raises(ValueError, match="vocab_size=9"):
        kl_divergence(teacher, student, mask, vocab_size=9)
