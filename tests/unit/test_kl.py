"""The distillation loss on logits against FP64 truth, in loss and in gradient (cases A10, B4, B17, B18, C1, C4)."""

from __future__ import annotations

import pytest
import torch
from loss_cases import allocated, errors, kl_by_hand, logit_pair, normal, some_tokens, with_gradients

from nemo_qad.distillation import kl
from nemo_qad.distillation.kl import NonFiniteError, kl_divergence, kl_per_token, reference_kl

INF, NAN = float("inf"), float("nan")
SIZES = [(1, 100, 100), (7, 100, 128), (255, 507, 512), (257, 507, 1024), (3, 131072, 131072)]


def run(teacher, student, mask, **settings) -> list[torch.Tensor]:
    """[loss, gradient] of `kl_divergence`."""
    return with_gradients(kl_divergence(teacher, student, mask, **settings)[0], (student,))


def truth_of(teacher, student, mask, vocab, tau=1.0, reverse=False) -> list[torch.Tensor]:
    """[loss, gradient] by hand in FP64 of the same values."""
    leaf = student.detach().double().requires_grad_()
    return with_gradients(kl_by_hand(teacher.double(), leaf, mask, vocab, tau, reverse), (leaf,))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 columns and chunks of one or two tokens, as large models have them."""
    monkeypatch.setattr(kl, "CPU_BLOCK_BYTES", 1)
    monkeypatch.setattr(kl, "LOGITS_SCRATCH_BYTES", 16_000)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize(("tokens", "vocab", "width"), SIZES)
def test_loss_and_gradient_equal_fp64_truth(tokens, vocab, width, tau, reverse):
    """FP32 within 1e-6 where the models are well apart: here 2.5 to 4.5 nats a token."""
    teacher, student, mask = logit_pair(tokens, width, noise=3.0)
    truth = truth_of(teacher, student, mask, vocab, tau, reverse)
    settings = {"vocab_size": vocab, "temperature": tau, "reverse": reverse}
    for function, dtype, tolerance in [
        (reference_kl, torch.float64, 1e-12),
        (kl_divergence, torch.float64, 1e-12),
        (kl_divergence, torch.float32, 1e-6),
    ]:
        leaf = student.detach().to(dtype).requires_grad_()
        total, count = function(teacher.to(dtype), leaf, mask, **settings)
        expected = truth
        if dtype is torch.float32:  # the truth of the rounded inputs
            expected = truth_of(teacher.float(), leaf, mask, vocab, tau, reverse)
        found = with_gradients(total, (leaf,))
        assert total.dtype == dtype and count.dtype == torch.int64 and int(count) == int((mask > 0).sum())
        assert max(errors(found, expected)) <= tolerance
        assert not found[1][:, vocab:].any() and not found[1][mask == 0].any()


@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_and_chunks_change_nothing(small_blocks, reverse):
    """Eight blocks of a vocabulary, one without any probability, and many chunks; a budget of a token is enough."""
    teacher, student, mask = logit_pair(23, 507)
    with torch.no_grad():
        teacher[:, 64:128] -= 300  # e^-300 is 0 in FP32 and a number in FP64
        student[:, 64:128] -= 300 + teacher[:, :64].abs()
    truth = truth_of(teacher, student, mask, 500, 1.3, reverse)
    settings = {"vocab_size": 500, "temperature": 1.3, "reverse": reverse}
    assert max(errors(run(teacher, student, mask, **settings), truth)) <= 1e-12


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_without_probability_weigh_nothing(reverse):
    """A rank whose columns are all padding, and one whose parts are all -inf, beside a rank that has everything."""
    empty, full = torch.tensor([-INF, -INF, 0.0]).double(), torch.tensor([1.0, 2.0, 0.25]).double()
    divergence = kl.Divergence(reverse=reverse)
    nothing = kl.combine(torch.stack([empty, empty])[:, None], divergence)
    assert torch.equal(nothing[0], empty)
    assert torch.equal(kl.combine(torch.stack([nothing[0], full, empty])[:, None], divergence)[0], full)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck(reverse):
    teacher, student, mask = logit_pair(5, 11)
    settings = {"vocab_size": 9, "temperature": 1.7, "reverse": reverse}
    assert torch.autograd.gradcheck(lambda s: kl_divergence(teacher, s, mask, **settings)[0], (student,))
    assert torch.autograd.gradcheck(lambda s: kl_per_token(teacher, s, mask, **settings), (student,))


def test_temperature_keeps_the_gradients_size():
    """B4: the factor tau^2; without it the gradient falls as 1 / tau^2."""
    teacher, student, mask = logit_pair(16, 50)
    taus = (1.0, 2.0, 4.0, 64.0, 128.0)
    norms = [run(teacher, student, mask, vocab_size=50, temperature=tau)[1].norm().item() for tau in taus]
    assert max(norms[:3]) / min(norms[:3]) < 2 and norms[4] == pytest.approx(norms[3], rel=0.05)


def test_equal_models_lose_nothing_and_swapping_them_changes_the_loss():
    """B17, B4."""
    teacher, student, mask = logit_pair(17, 33)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        same = teacher.to(dtype)
        for reverse in (False, True):
            loss, gradient = run(same, same.clone().requires_grad_(), mask, vocab_size=33, reverse=reverse)
            assert loss == 0 and gradient.abs().max() <= 1e-7
    forward, swapped, reverse = (
        kl_divergence(a.detach(), b.detach(), mask, vocab_size=33, reverse=flag)[0].item()
        for a, b, flag in [(teacher, student, False), (student, teacher, False), (teacher, student, True)]
    )
    assert swapped == pytest.approx(reverse, rel=1e-12) and abs(forward - swapped) > 1e-3 * forward


def test_appended_padding_tokens_change_nothing():
    """B18; and the loss of each token stands at its place, 0 where the mask is."""
    teacher, student, mask = logit_pair(9, 40)
    longer = [torch.cat([x.detach(), 50 * normal(100, 40, seed=5)]) for x in (teacher, student)]
    longer_mask = torch.cat([mask, torch.zeros(100)])
    loss, gradient = run(teacher, student, mask, vocab_size=40)
    leaf = longer[1].requires_grad_()
    longer_loss, longer_gradient = run(longer[0], leaf, longer_mask, vocab_size=40)
    assert longer_loss == loss and torch.equal(longer_gradient[:9], gradient) and not longer_gradient[9:].any()
    per_token = kl_per_token(longer[0], leaf, longer_mask, vocab_size=40)
    assert per_token.sum().item() == pytest.approx(loss.item(), rel=1e-14)
    assert not per_token[longer_mask == 0].any() and (per_token[longer_mask > 0] > 0).all()
    one = torch.zeros(109).index_fill(0, torch.tensor([0]), 1)
    assert kl_divergence(longer[0], leaf, one, vocab_size=40)[0].item() == pytest.approx(per_token[0].item(), rel=1e-14)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.bfloat16, "weights", "column of a batch"])
def test_masks_of_any_kind(kind):
    teacher, student, mask = logit_pair(20, 30)
    other = {"weights": 0.3 * mask, "column of a batch": torch.stack([mask, 1 - mask], 1)[:, 0]}.get(kind)
    other = mask.to(kind) if other is None else other
    total, count = kl_divergence(teacher, student, other, vocab_size=30)
    assert total == kl_divergence(teacher, student, mask, vocab_size=30)[0] and count == mask.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inputs_are_left_alone_and_may_be_views(dtype):
    teacher, student, mask = logit_pair(6, 10, dtype=dtype)
    before = [x.detach().clone() for x in (teacher, student, mask)]
    ours = run(teacher, student, mask, vocab_size=10, temperature=2.0)
    assert all(torch.equal(x.detach(), y) for x, y in zip((teacher, student, mask), before, strict=True))
    views = [x.detach().T.contiguous().T for x in (teacher, student)]
    found = run(views[0], views[1].requires_grad_(), mask, vocab_size=10, temperature=2.0)
    assert all(torch.equal(x, y) for x, y in zip(ours, found, strict=True))


@pytest.mark.parametrize("width", [100, 128, 256, 1024])
@pytest.mark.parametrize("rubbish", [0.0, 1e4, INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_columns_change_nothing(width, rubbish, dtype):
    """C4: in either model, and no gradient reaches them; C1: the two models padded to different widths."""
    teacher, student, mask = logit_pair(9, 100, dtype=dtype)
    truth = run(teacher, student, mask, vocab_size=100)

    def padded(logits: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([logits.detach(), torch.full((9, size - 100), rubbish, dtype=dtype)], 1)

    for teacher_width in {width, 100, 112}:
        leaf = padded(student, width).requires_grad_()
        loss, gradient = run(padded(teacher, teacher_width), leaf, mask, vocab_size=100)
        assert loss == truth[0] and torch.equal(gradient[:, :100], truth[1])
        assert not gradient[:, 100:].any()


def test_no_counted_token_and_nan_in_a_masked_token():
    teacher, student, _ = logit_pair(4, 8)
    with torch.no_grad():
        student[1], teacher[2] = NAN, INF
    for kept in ([0, 0, 0, 0], [1, 0, 0, 1]):
        mask = torch.tensor(kept)
        total, count = kl_divergence(teacher, student, mask, vocab_size=8)
        loss, gradient = with_gradients(total, (student,))
        assert count == sum(kept) and loss.isfinite() and gradient.isfinite().all()
        assert (loss > 0) == bool(count) and bool(gradient.any()) == bool(count)
        assert not gradient[mask == 0].any()
    assert kl_divergence(teacher[:0], student[:0], mask[:0], vocab_size=8)[0] == 0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("guilty", [0, 1])
def test_the_token_that_is_not_finite_is_named(guilty, value):
    """A word that the student rules out (-inf) and the teacher does not is an infinite loss."""
    teacher, student, mask = (x.detach() for x in logit_pair(30, 70))
    mask[17] = 1
    (teacher, student)[guilty][17, 65] = value
    if guilty == 0 and value == -INF:
        assert kl_divergence(teacher, student, mask, vocab_size=70)[0].isfinite()
        return
    with pytest.raises(NonFiniteError, match="token 17: the loss is not finite") as raised:
        kl_divergence(teacher, student, mask, vocab_size=70)
    assert raised.value.token == 17 and "logits hold NaN or Inf" in raised.value.source


@pytest.mark.parametrize("blocks", ["one block", "many blocks"])
def test_minus_infinity_of_the_teacher_is_probability_0(blocks, request):
    """Forward: those words add 0 and keep the gradient q. Reverse: infinite, unless the student rules them out too."""
    if blocks == "many blocks":
        request.getfixturevalue("small_blocks")
    teacher, student, mask = logit_pair(12, 200)
    out = torch.zeros(12, 200, dtype=torch.bool)
    out[:, 3::5], out[2, :150], out[4, 64:128] = True, True, True
    teacher.masked_fill_(out, -INF)
    leaf = student.detach().clone().requires_grad_()
    log_q = leaf.log_softmax(-1)
    p = torch.where(out, 0, teacher.exp() / teacher.exp().sum(-1, keepdim=True))
    truth = (torch.where(out, 0, p * (p.clamp(min=1e-300).log() - log_q)).sum(-1) * mask).sum()
    found = run(teacher, student, mask, vocab_size=200)
    assert max(errors(found, with_gradients(truth, (leaf,)))) <= 1e-12
    counted = mask[:, None] > 0
    assert torch.equal(found[1][out & counted].sign(), torch.ones_like(found[1][out & counted]))

    with pytest.raises(NonFiniteError):
        kl_divergence(teacher, student, mask, vocab_size=200, reverse=True)
    both = student.detach().masked_fill(out, -INF).requires_grad_()
    for reverse in (False, True):
        loss, gradient = run(teacher, both, mask, vocab_size=200, reverse=reverse)
        expected = 0.0
        for row in range(12):
            real = ~out[row]
            rows = teacher[row, real][None], both.detach()[row, real][None]
            expected += kl_by_hand(*rows, mask[row, None], 200, 1.0, reverse).item()
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        assert gradient.isfinite().all() and not gradient[out].any()


@pytest.mark.parametrize("reverse", [False, True])
def test_huge_logits_do_not_overflow(reverse):
    """Both models are sure, of different words 1e4 apart: 1e4 nats."""
    teacher, student = torch.zeros(1, 300), torch.zeros(1, 300, requires_grad=True)
    with torch.no_grad():
        teacher[0, 7], student[0, 200] = 1e4, 1e4
    loss, gradient = run(teacher, student, torch.ones(1), vocab_size=300, reverse=reverse)
    assert loss.item() == pytest.approx(1e4, rel=1e-6) and gradient.isfinite().all()
    if not reverse:
        assert gradient[0, 200] == 1 and gradient[0, 7] == -1 and gradient.abs().sum() == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_is_scaled_in_fp32(dtype):
    """The mean over the tokens and a loss scale of 0.3, which BF16 would round to 0.3008."""
    teacher, student, mask = logit_pair(20, 30, dtype=dtype)
    _, plain = run(teacher, student, mask, vocab_size=30)
    total, count = kl_divergence(teacher, student, mask, vocab_size=30)
    (scaled,) = torch.autograd.grad(total * 0.3 / count, student)
    exact = plain.double() * (0.3 / int(count))
    assert (scaled.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    ratio = (scaled.double() * exact).sum() / (exact * exact).sum()
    assert ratio == pytest.approx(1, abs=1e-9 if dtype is torch.float64 else 5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_memory_does_not_grow_with_the_tokens(dtype):
    """A gradient of the student's size and scratch: no FP32 copy of BF16 logits at any time, for any T."""
    scratch = []
    for tokens in (128, 512):  # more than scratch memory holds
        teacher, student, _ = logit_pair(tokens, 40_000, dtype=dtype)
        used = allocated(lambda t=teacher, s=student, n=tokens: run(t, s, torch.ones(n), vocab_size=40_000))
        assert used.largest <= student.nbytes
        scratch.append(used.peak - 2 * student.nbytes)  # the gradient as it was kept, and as it is handed on
    assert scratch[1] <= scratch[0] + 2**16 and scratch[0] <= 2 * kl.LOGITS_SCRATCH_BYTES


def test_settings_are_checked():
    teacher, student, mask = logit_pair(4, 8)
    with pytest.raises(ValueError, match=r"\[T, W\]"):
        kl_divergence(teacher[:2], student, mask, vocab_size=8)
    with pytest.raises(ValueError, match="3 tokens"):
        kl_divergence(teacher, student, some_tokens(3), vocab_size=8)
    for vocab in (9, 0, -1):
        with pytest.raises(ValueError, match=f"vocab_size={vocab}"):
            kl_divergence(teacher, student, mask, vocab_size=vocab)
    with pytest.raises(ValueError, match="vocab_size=8"):
        kl_divergence(teacher[:, :7], student, mask, vocab_size=8)
    for tau in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match="temperature="):
            kl_divergence(teacher, student, mask, vocab_size=8, temperature=tau)
