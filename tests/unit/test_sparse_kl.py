"""The loss against a teacher known by K values a token: against its definition, and against the whole loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loss_cases import (
    Heads,
    allocated,
    as_head,
    errors,
    heads,
    sparse_kl_by_hand,
    with_gradients,
)
from torch.utils.checkpoint import checkpoint

from nemo_qad.distillation import kl
from nemo_qad.distillation.kl import NonFiniteError
from nemo_qad.distillation.sparse_kl import SparseLogits, reference_sparse_kl, sparse_kl
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits

NAN, INF = float("nan"), float("inf")
KINDS = ["top_k", "sampled"]
TOLERANCE = 1e-10  # the bucket of one word takes 1e-4 nats from differences of numbers near 1


def sparse(models: Heads, kind: str, num_values: int, vocab: int, tau: float = 1.0) -> SparseLogits:
    """What is kept of the teacher, in FP64, so that it can be compared with FP64 truth."""
    head = [x.double() for x in models.inputs[:2]]
    log_p = (head[0] @ head[1][:vocab].T / tau).log_softmax(-1)
    if kind == "top_k":
        index = top_k_logits(*head, k=num_values, vocab_size=vocab, temperature=tau).indices_TK.long()
        return SparseLogits(index.int(), log_p.gather(1, index), log_p.scatter(1, index, -INF).logsumexp(1))
    uniform = torch.rand(len(models.mask_T), generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    settings = {"uniform_T": uniform, "vocab_size": vocab, "temperature": tau}
    index = sampled_logits(*head, num_samples=num_values, **settings).indices_TK
    return SparseLogits(index, log_p.gather(1, index.long()), None)


def run(teacher: SparseLogits, models: Heads, **settings) -> list[torch.Tensor]:
    return with_gradients(sparse_kl(teacher, *models.leaves, models.mask_T, **settings)[0], models.leaves)


def truth_of(teacher: SparseLogits, models: Heads, vocab: int, tau: float = 1.0) -> list[torch.Tensor]:
    exact = models.to(torch.float64)
    total = sparse_kl_by_hand(teacher, exact.logits()[1][:, :vocab], exact.mask_T, tau)
    return with_gradients(total, exact.leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "vocab", "width"), [(1, 100, 100), (7, 100, 128), (255, 507, 512), (2, 131072, 131072)]
)
def test_every_chunk_size_gives_the_truth(tokens, vocab, width, kind, monkeypatch):
    """Also with the values spread over blocks of 64 columns, and several draws of one word."""
    if width < 1000:
        monkeypatch.setattr(kl, "CPU_BLOCK_BYTES", 1)
    models = heads(tokens, width)
    for num_values in (1, 40):
        teacher = sparse(models, kind, num_values, vocab, 1.7)
        truth = truth_of(teacher, models, vocab, 1.7)
        settings = {"vocab_size": vocab, "temperature": 1.7}
        plain = reference_sparse_kl(teacher, models.logits()[1], models.mask_T, **settings)[0]
        assert max(errors(with_gradients(plain, models.leaves), truth)) <= TOLERANCE
        choices = [{"chunk_size": size} for size in (1, 7, tokens, tokens + 1, None)]
        for choice in [*choices, {"memory_budget": 8 * (width + 64)}, {"memory_budget": 2**34}]:
            found = run(teacher, models, **settings, **choice)
            assert max(errors(found, truth)) <= TOLERANCE, choice
            assert not found[1][models.mask_T == 0].any() and not found[2][vocab:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    models = heads(5, 11, 4)
    teacher, settings = sparse(models, kind, 4, 9, 1.4), {"vocab_size": 9, "temperature": 1.4, "repeat_backward": True}
    assert torch.autograd.gradcheck(
        lambda hidden, weight: sparse_kl(teacher, hidden, weight, models.mask_T, chunk_size=2, **settings)[0],
        models.leaves,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs(kind, dtype):
    """FP32 within 1e-6 in the loss, and as good as autograd in the gradients; BF16: rounded once."""
    models = heads(64, 2000, 32, noise=1.0).to(dtype)
    teacher = sparse(models, kind, 16, 2000)
    truth, found = truth_of(teacher, models, 2000), run(teacher, models, vocab_size=2000)
    plain = reference_sparse_kl(teacher, models.logits()[1].float(), models.mask_T, vocab_size=2000)[0]
    naive = errors(with_gradients(plain, models.leaves), truth)
    assert errors(found, truth)[0] <= 1e-6 and found[1].dtype == found[2].dtype == dtype
    assert all(ours <= max(1e-6, 1.1 * theirs) for ours, theirs in zip(errors(found, truth), naive, strict=True))


def test_equal_models_and_temperature():
    """B17, B4; and the tail alone teaches: equal top words with a heavier rest are a loss."""
    models = heads(20, 60)
    same = models.with_(student_hidden_TD=models.teacher_hidden_TD.clone().requires_grad_())
    same = same.with_(student_weight_WD=models.teacher_weight_WD.clone().requires_grad_())
    loss, *found = run(sparse(models, "top_k", 8, 60), same, vocab_size=60)
    assert abs(loss) < 1e-5 and max(x.abs().max() for x in found) < 1e-5
    for kind in KINDS:
        norms = []
        for tau in (1.0, 2.0, 4.0, 64.0, 128.0):
            teacher = sparse(models, "top_k", 20, 60, tau) if kind == "top_k" else sparse(models, kind, 4096, 60, tau)
            norms.append(run(teacher, models, vocab_size=60, temperature=tau)[1].norm())
        assert max(norms[:3]) < 2 * min(norms[:3])
    assert abs(norms[4] / norms[3] - 1) < 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rubbish", [1e4, NAN])
def test_padding_and_masked_tokens_count_for_nothing(kind, rubbish):
    """C4, B18; and no valid token is 0, 0 and zero gradients."""
    models = heads(9, 100)
    teacher = sparse(models, kind, 12, 100)
    truth = run(teacher, models, vocab_size=100)
    hidden, weight = (x.detach() for x in models.leaves)
    masked = models.mask_T == 0
    weight = torch.cat([weight, torch.full((28, 16), rubbish, dtype=weight.dtype)]).requires_grad_()
    changed = models.with_(student_hidden_TD=hidden.masked_fill(masked[:, None], rubbish).requires_grad_())
    changed = changed.with_(student_weight_WD=weight, mask_T=0.5 * models.mask_T)
    other = replace(teacher, log_prob_TK=teacher.log_prob_TK.masked_fill(masked[:, None], rubbish))
    loss, of_hidden, of_weight = run(other, changed, vocab_size=100)
    assert torch.equal(loss, truth[0]) and torch.equal(of_hidden, truth[1])
    assert torch.equal(of_weight[:100], truth[2]) and not of_weight[100:].any()
    nothing = changed.with_(student_hidden_TD=torch.full_like(hidden, NAN).requires_grad_(), mask_T=torch.zeros(9))
    total, count = sparse_kl(other, *nothing.leaves, nothing.mask_T, vocab_size=100)
    assert count == 0 and not any(x.any() for x in with_gradients(total, nothing.leaves))


def test_a_value_of_probability_0_adds_nothing():
    """-inf among the k values: a teacher whose probability lies on fewer words, with and without a tail."""
    models = heads(6, 40)
    teacher = sparse(models, "top_k", 5, 40)
    longer = SparseLogits(
        torch.cat([teacher.indices_TK, torch.full((6, 1), 39, dtype=torch.int32)], 1),
        torch.cat([teacher.log_prob_TK, torch.full((6, 1), -INF, dtype=torch.float64)], 1),
        teacher.log_tail_T,
    )
    assert not (teacher.indices_TK == 39).any()
    plain = reference_sparse_kl(longer, models.logits()[1], models.mask_T, vocab_size=40)[0]
    found = run(longer, models, vocab_size=40)
    assert max(errors(found, with_gradients(plain, models.leaves))) <= 1e-12
    assert all(x.isfinite().all() for x in found) and found[0] > run(teacher, models, vocab_size=40)[0]




@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_huge_logits_do_not_overflow(kind):
    """A student that is sure of one word by 1e4; the teacher gives it 0.9 and the rest 0.1."""
    student, weight = as_head(torch.zeros(1, 300).index_fill(1, torch.tensor([3]), 1e4).double())
    log_p = torch.tensor([[0.9]]).log() if kind == "top_k" else torch.tensor([[0.9, 0.1]]).log()
    index = torch.tensor([[3]]) if kind == "top_k" else torch.tensor([[3, 200]])
    teacher = SparseLogits(index, log_p, torch.tensor([0.1]).log() if kind == "top_k" else None)
    total, _ = sparse_kl(teacher, student, weight.requires_grad_(), torch.ones(1), vocab_size=300)
    loss, gradient = with_gradients(total, (weight,))
    assert loss.item() == pytest.approx(1e3 if kind == "top_k" else 5e3, rel=0.01)
    assert gradient.isfinite().all() and abs(gradient.sum()) < 1e-6
    assert gradient[3].item() == pytest.approx(0.1 if kind == "top_k" else 0.5, rel=1e-6)


HIDDEN, WEIGHT = "the student's hidden state hold NaN or Inf", "the student's output weight hold NaN or Inf"


@pytest.mark.parametrize(
    ("kind", "place", "value", "token", "source"),
    [
        ("top_k", "hidden", NAN, 6, HIDDEN),
        ("top_k", "hidden", INF, 6, HIDDEN),
        ("sampled", "hidden", NAN, 6, HIDDEN),
        ("top_k", "weight", NAN, 0, WEIGHT),
        ("sampled", "weight", INF, 0, WEIGHT),
        ("sampled", "log_prob", NAN, 6, "the teacher's log-probabilities hold NaN or Inf"),
        pytest.param("top_k", "log_prob", NAN, 6, "the teacher's log-probabilities"),
        pytest.param("top_k", "log_prob", INF, 6, "the teacher's log-probabilities"),
        pytest.param("sampled", "log_prob", -INF, 6, "the teacher's log-probabilities"),
        pytest.param("top_k", "log_tail", NAN, 6, "the teacher's"),
        pytest.param("top_k", "log_tail", INF, 6, "the teacher's"),
        pytest.param("top_k", "hidden, and log_prob of a masked token", NAN, 6, HIDDEN),
    ],
)
def test_what_is_not_finite_is_named(kind, place, value, token, source):
    models = heads(9, 30)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1])
    teacher = sparse(models, kind, 5, 30)
    hidden, weight = (x.detach().clone() for x in models.leaves)
    if "hidden" in place:
        hidden[6] = value
    if "log_prob" in place:
        teacher.log_prob_TK[2 if "masked" in place else 6, 3] = value
    if place == "weight":
        weight[6] = value
    if place == "log_tail":
        teacher.log_tail_T[6] = value
    with pytest.raises(NonFiniteError) as raised:
        sparse_kl(teacher, hidden, weight, mask, vocab_size=30, chunk_size=2)
    assert raised.value.token == token and raised.value.source.startswith(source)


def test_peak_memory_is_that_of_a_chunk():
    """A1, A2: it scales with the chunk and the k values, not with T x V."""

    def used(tokens: int, **settings) -> tuple[int, int]:
        models = heads(tokens, 20_000).to(torch.float32).with_(mask_T=torch.ones(tokens))
        teacher = SparseLogits(torch.arange(16).repeat(tokens, 1), torch.full((tokens, 16), -3.0), torch.zeros(tokens))
        of_call = allocated(lambda: run(teacher, models, vocab_size=20_000, **settings))
        return of_call.peak - sum(leaf.nbytes for leaf in models.leaves) - 16 * tokens, of_call.largest

    few, many = used(32, chunk_size=16), used(512, chunk_size=16)
    assert many[0] <= 1.01 * few[0] and many[1] < 32 * 20_000 * 4
    by_chunk = [used(128, chunk_size=size)[0] for size in (1, 4, 16, 64)]
    assert by_chunk == sorted(by_chunk)
    assert used(256, memory_budget=2**24)[0] <= 1.25 * 2**24


def test_backward_scaling_and_recompute():
    models = heads(12, 40)
    teacher = sparse(models, "top_k", 6, 40)
    expected = run(teacher, models, vocab_size=40)

    def loss(hidden, weight, **settings):
        return sparse_kl(teacher, hidden, weight, models.mask_T, vocab_size=40, **settings)[0]

    total = loss(*models.leaves)
    torch.autograd.grad(total, models.leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="repeat_backward"):
        torch.autograd.grad(total, models.leaves)
    for reentrant in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in models.leaves]
        (0.3 * checkpoint(loss, *leaves, use_reentrant=reentrant)).backward()
        assert max(errors([x.grad for x in leaves], [0.3 * g for g in expected[1:]])) <= 1e-14
    with torch.no_grad():
        assert loss(*models.leaves) == expected[0]
    (alone,) = torch.autograd.grad(loss(models.student_hidden_TD, models.student_weight_WD.detach()), models.leaves[:1])
    assert torch.equal(alone, expected[1])


def test_settings_are_checked():
    models = heads(6, 30)
    teacher = sparse(models, "top_k", 5, 30)
    for message, changes in [
        ("outside 0..29", {"indices_TK": teacher.indices_TK + 30}),
        ("outside 0..29", {"indices_TK": teacher.indices_TK - 30}),
        (r"\[T, K\] with T=6", {"indices_TK": teacher.indices_TK[:, :4]}),
        (r"log_tail \(5,\)", {"log_tail_T": teacher.log_tail_T[:5]}),
    ]:
        with pytest.raises(ValueError, match=message):
            sparse_kl(replace(teacher, **changes), *models.leaves, models.mask_T, vocab_size=30)
    with pytest.raises(ValueError, match=r"outside 0\.\.25"):
        sparse_kl(
            replace(teacher, indices_TK=teacher.indices_TK.clamp(26)), *models.leaves, models.mask_T, vocab_size=26
        )
    with pytest.raises(ValueError, match="memory_budget=9"):
        sparse_kl(teacher, *models.leaves, models.mask_T, vocab_size=30, memory_budget=9)


@pytest.mark.parametrize("tau", [-1.0, 0.0, NAN])
def test_temperature_is_checked(tau):
    models = heads(6, 30)
    with pytest.raises(ValueError, match="temperature="):
        sparse_kl(sparse(models, "top_k", 5, 30), *models.leaves, models.mask_T, vocab_size=30, temperature=tau)
