"""What is kept of a teacher's distribution: the k best words and the rest, or draws (cases A1, A2)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from loss_cases import allocated, as_head, heads, normal

from nemo_qad.distillation import kl
from nemo_qad.distillation.kl import NonFiniteError
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits

NAN, INF = float("nan"), float("inf")
LAST_BELOW_1 = 1 - 2.0**-53
# Buffers of a budget are counted in advance; blocks of a megabyte come on top.
BUDGET, SLACK = 2**24, 3 * 2**20


def teacher(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    models = heads(tokens, width)
    return models.teacher_hidden_TD, models.teacher_weight_WD


def counts(drawn, vocab: int) -> torch.Tensor:
    """How often each word is drawn, [T, V]."""
    zeros = torch.zeros(len(drawn.indices_TK), vocab, dtype=torch.float64)
    return zeros.scatter_add_(1, drawn.indices_TK.long(), torch.ones(drawn.indices_TK.shape, dtype=torch.float64))


@pytest.fixture(params=[1, 2**20], ids=["many blocks", "one block"], autouse=True)
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(kl, "CPU_BLOCK_BYTES", request.param)


@pytest.mark.parametrize("budget", [1, 2**30])
@pytest.mark.parametrize(("tokens", "vocab", "width"), [(1, 100, 128), (7, 507, 507), (255, 100, 100)])
def test_top_k_is_what_sorting_finds(tokens, vocab, width, budget):
    hidden, weight = teacher(tokens, width)
    p = torch.exp(hidden @ weight[:vocab].T / 1.7)
    p = p / p.sum(-1, keepdim=True)
    order = p.argsort(-1, descending=True)
    for k in (1, 7, vocab - 1, vocab):
        kept = top_k_logits(hidden, weight, k=k, vocab_size=vocab, temperature=1.7, memory_budget=budget)
        assert (kept.indices_TK.dtype, kept.log_prob_TK.dtype) == (torch.int32, torch.float32)
        assert kept.log_tail_T is not None and kept.log_tail_T.dtype == torch.float32
        assert torch.equal(kept.indices_TK.long(), order[:, :k])
        torch.testing.assert_close(kept.log_prob_TK, p.gather(1, order[:, :k]).log().float(), rtol=1e-6, atol=1e-6)
        tail = p.gather(1, order[:, k:]).sum(1).log().float()
        torch.testing.assert_close(kept.log_tail_T, tail, rtol=1e-6, atol=1e-6)
    assert kept.log_tail_T.isneginf().all()


def test_a_small_tail_keeps_its_digits():
    """Summed, not 1 minus the k probabilities: that would be 0 here."""
    logits = torch.zeros(1, 300)
    logits[0, 40] = 60.0
    kept = top_k_logits(*as_head(logits), k=1, vocab_size=300)
    assert kept.log_tail_T.item() == pytest.approx(torch.tensor(299.0).log().item() - 60, rel=1e-6)
    assert kept.log_prob_TK.item() == 0 and kept.indices_TK.item() == 40


@pytest.mark.parametrize("rubbish", [1e4, NAN, INF])
def test_padding_rows_are_never_kept(rubbish):
    """C4."""
    hidden, weight = teacher(9, 100)
    padded = torch.cat([weight, torch.full((28, 16), rubbish, dtype=weight.dtype)])
    uniform = torch.linspace(0, LAST_BELOW_1, 9, dtype=torch.float64)
    for found, expected in [
        [top_k_logits(hidden, w, k=20, vocab_size=100) for w in (padded, weight)],
        [sampled_logits(hidden, w, num_samples=20, uniform_T=uniform, vocab_size=100) for w in (padded, weight)],
    ]:
        assert torch.equal(found.indices_TK, expected.indices_TK)
        assert torch.equal(found.log_prob_TK, expected.log_prob_TK)


def test_bf16_is_cast_first():
    """A1: S 256, V 8,192, k 16: bit for bit what FP32 copies of the same values give."""
    hidden, weight = (x.bfloat16() for x in teacher(256, 8192))
    uniform = torch.rand(256, generator=torch.Generator().manual_seed(2))
    for keep in (
        lambda h, w: top_k_logits(h, w, k=16, vocab_size=8192),
        lambda h, w: sampled_logits(h, w, num_samples=16, uniform_T=uniform, vocab_size=8192),
    ):
        narrow, wide = keep(hidden, weight), keep(hidden.float(), weight.float())
        assert torch.equal(narrow.indices_TK, wide.indices_TK) and torch.equal(narrow.log_prob_TK, wide.log_prob_TK)


@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_memory_is_that_of_a_chunk(kind, block_bytes):
    """A1, A2: the peak is the budget's for any T, and no tensor comes near T x V."""

    def used(tokens: int):
        hidden, weight = (x.float() for x in teacher(tokens, 20_000))
        if kind == "top_k":
            return allocated(lambda: top_k_logits(hidden, weight, k=16, vocab_size=20_000, memory_budget=BUDGET))
        settings = {"num_samples": 16, "uniform_T": torch.zeros(tokens), "vocab_size": 20_000}
        return allocated(lambda: sampled_logits(hidden, weight, memory_budget=BUDGET, **settings))

    few, many = used(128), used(512)
    assert many.peak <= few.peak + 400 * 512  # what is kept: 128 bytes a token, twice while it is put together
    assert many.peak <= BUDGET + SLACK and many.largest <= BUDGET / 2 < 512 * 20_000 * 4 / 4


@pytest.mark.parametrize("num_samples", [1, 7, 64])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_draws_are_unbiased(num_samples, tau):
    """Systematic: floor(K p) or ceil(K p) times at every draw, K p in the mean over an even grid of uniforms."""
    hidden, weight = teacher(1, 100)
    p = torch.softmax(hidden @ weight.T / tau, -1)
    uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    settings = {"num_samples": num_samples, "vocab_size": 100, "temperature": tau}
    drawn = sampled_logits(hidden.expand(2000, -1), weight, uniform_T=uniform, **settings)
    assert drawn.log_tail_T is None and drawn.indices_TK.dtype == torch.int32
    often = counts(drawn, 100)
    assert (often >= (num_samples * p - 1e-9).floor()).all() and (often <= (num_samples * p + 1e-9).ceil()).all()
    assert (often.mean(0) / num_samples - p[0]).abs().max() <= 1e-3
    log_p = p.log().expand(2000, -1).gather(1, drawn.indices_TK.long())
    torch.testing.assert_close(drawn.log_prob_TK, log_p.float(), rtol=1e-6, atol=1e-6)


def test_impossible_words_are_never_drawn():
    """Probability 0 at both ends and in the middle, points at 0 and as near to 1 as can be."""
    logits = 2 * normal(1, 200)
    out = torch.zeros(200, dtype=torch.bool)
    out[:3], out[70:140], out[197:] = True, True, True
    logits[:, out] = -1e4
    uniform = torch.tensor([0.0, 1e-300, 0.5, 1 - 2.0**-24, LAST_BELOW_1], dtype=torch.float64)
    hidden, weight = as_head(logits)
    for dtype in (torch.float64, torch.float32):
        for num_samples in (1, 3, 64, 1000):
            head = hidden.expand(5, -1).to(dtype), weight.to(dtype)
            drawn = sampled_logits(*head, num_samples=num_samples, uniform_T=uniform, vocab_size=200)
            assert not out[drawn.indices_TK.long()].any()
            assert drawn.indices_TK[-1, -1] == 196 and drawn.indices_TK[0, 0] == 3


def test_one_sure_word_takes_every_draw():
    logits = torch.zeros(2, 150)
    logits[0, 0], logits[1, 149] = 1e4, 1e4
    drawn = sampled_logits(*as_head(logits), num_samples=5, uniform_T=torch.tensor([0.0, 0.999]), vocab_size=150)
    assert drawn.indices_TK.tolist() == [[0] * 5, [149] * 5] and not drawn.log_prob_TK.any()


def test_a_draw_depends_on_its_own_uniform_alone():
    """So that it can be tied to a seed and a sample number, whatever the batch and the budget."""
    hidden, weight = teacher(30, 100)
    uniform = torch.rand(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    settings = {"num_samples": 9, "vocab_size": 100}
    drawn = sampled_logits(hidden, weight, uniform_T=uniform, memory_budget=1, **settings)
    turned = torch.arange(29, -1, -1)
    other = sampled_logits(hidden[turned], weight, uniform_T=uniform[turned], **settings)
    assert torch.equal(other.indices_TK, drawn.indices_TK[turned])
    shifted = sampled_logits(hidden, weight, uniform_T=1 - uniform, **settings)
    assert not torch.equal(shifted.indices_TK, drawn.indices_TK)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", ["hidden", "weight"])
@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_what_is_not_finite_is_named(kind, place, value):
    hidden, weight = teacher(20, 100)
    {"hidden": hidden, "weight": weight}[place][13] = value
    keep = partial(top_k_logits, k=5)
    if kind == "sampled":
        keep = partial(sampled_logits, num_samples=5, uniform_T=torch.zeros(20))
    with pytest.raises(NonFiniteError) as raised:
        keep(hidden, weight, vocab_size=100, memory_budget=50_000)
    assert raised.value.token == (13 if place == "hidden" else 0) and "holds NaN or Inf" in raised.value.source


def test_no_gradient_is_kept_and_inputs_are_left_alone():
    hidden, weight = (x.requires_grad_() for x in teacher(6, 50))
    before = hidden.detach().clone(), weight.detach().clone()
    kept = top_k_logits(hidden, weight, k=5, vocab_size=50)
    drawn = sampled_logits(hidden, weight, num_samples=5, uniform_T=torch.zeros(6), vocab_size=50)
    assert not kept.log_prob_TK.requires_grad and not drawn.log_prob_TK.requires_grad
    assert torch.equal(hidden.detach(), before[0]) and torch.equal(weight.detach(), before[1])


def test_settings_are_checked():
    hidden, weight = teacher(6, 50)
    for k in (0, 49):
        with pytest.raises(ValueError, match=rf"k={k} must be in 1\.\.48"):
            top_k_logits(hidden, weight, k=k, vocab_size=48)
    with pytest.raises(ValueError, match="num_samples=0"):
        sampled_logits(hidden, weight, num_samples=0, uniform_T=torch.zeros(6), vocab_size=50)
    with pytest.raises(ValueError, match=r"uniform \(5,\) be \[6\]"):
        sampled_logits(hidden, weight, num_samples=3, uniform_T=torch.zeros(5), vocab_size=50)
    for name, value in (("temperature", 0.0), ("temperature", NAN), ("vocab_size", 51)):
        with pytest.raises(ValueError, match=f"{name}="):
            top_k_logits(hidden, weight, **{"k": 3, "vocab_size": 50, name: value})


def test_hidden_sizes_are_checked():
    hidden, weight = teacher(6, 50)
    with pytest.raises(ValueError, match="15"):
        top_k_logits(hidden[:, :15], weight, k=3, vocab_size=50)
