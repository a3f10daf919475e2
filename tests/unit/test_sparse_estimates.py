"""The sparse losses against the whole loss: what k words and a bucket miss, and what draws add in noise."""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
from loss_cases import as_head, errors, heads, kl_by_hand, normal, with_gradients

from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.sparse_kl import sparse_kl
from nemo_qad.distillation.sparse_logits import sampled_logits, top_k_logits


def test_all_words_give_the_whole_loss_and_fewer_give_less():
    """k = V is the full loss; with k < V the loss rises with k and stays below it."""
    models = heads(20, 60, noise=0.5)
    whole = with_gradients(linear_kl(*models.inputs, vocab_size=60)[0], models.leaves)
    by_k = []
    for k in (1, 2, 8, 30, 59, 60):
        kept = top_k_logits(*models.inputs[:2], k=k, vocab_size=60)
        total, _ = sparse_kl(kept, *models.leaves, models.mask_T, vocab_size=60)
        by_k.append(with_gradients(total, models.leaves))
        assert total <= whole[0] * (1 + 1e-6)
    assert max(errors(by_k[-1], whole)) <= 1e-6 and by_k[0][0] < 0.9 * whole[0]
    assert all(fewer[0] <= more[0] * (1 + 1e-6) for fewer, more in itertools.pairwise(by_k))


@pytest.mark.parametrize(("k", "true_kl"), [(1024, 1.01), (4096, 0.84)])
def test_tail_attack(k, true_kl):
    """All words outside the teacher's best k raised by 3: a form that forgets the tail sees nothing."""
    from modelopt.torch.distill.plugins.megatron import TopKLogitsKLLoss

    teacher = 3 * normal(2, 131072, seed=7).float()
    best = teacher.topk(k)
    attacked = (teacher + 3).scatter(1, best.indices, best.values)
    every = torch.ones(2)
    leaf = attacked.double().requires_grad_()
    truth = with_gradients(kl_by_hand(teacher.double(), leaf, every, 131072) / 2, (leaf,))
    assert truth[0].item() == pytest.approx(true_kl, abs=0.04)
    hidden, weight = as_head(attacked)
    kept = top_k_logits(*as_head(teacher), k=k, vocab_size=131072)
    total, _ = sparse_kl(kept, hidden, weight.requires_grad_(), every, vocab_size=131072)
    loss, gradient = with_gradients(total / 2, (weight,))
    assert loss.item() == pytest.approx(truth[0].item(), rel=0.05)
    tail = torch.ones(2, 131072, dtype=torch.bool).scatter(1, kept.indices_TK.long(), False)
    assert errors([gradient.T[tail]], [truth[1][tail]])[0] <= 0.05 and (gradient.T[tail] > 0).all()
    theirs = TopKLogitsKLLoss(types.SimpleNamespace(tensor_model_parallel_size=1), top_k=k)
    assert theirs(attacked[:, None], teacher[:, None])[0].abs().max() < 1e-5

    rows = torch.zeros(100, dtype=torch.long)
    uniform = torch.rand(100, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    head = as_head(teacher)
    drawn = sampled_logits(head[0][rows], head[1], num_samples=64, uniform_T=uniform, vocab_size=131072)
    log_r = leaf.log_softmax(-1)[0].detach()[drawn.indices_TK.long()] - drawn.log_prob_TK
    estimates = (log_r.exp() - 1 - log_r).mean(1)
    exact = kl_by_hand(teacher.double()[:1], leaf[:1], every[:1], 131072)
    found = sparse_kl(drawn, hidden[rows], weight.detach(), torch.ones(100), vocab_size=131072)[0] / 100
    assert found.item() == pytest.approx(estimates.mean().item(), rel=1e-5)
    assert abs(found - exact) < 4 * estimates.std() / 10 and estimates.std() / 10 < 0.05 * exact


def test_sampling_is_unbiased():
    """64 draws: the mean loss and gradient of 4,096 tokens within 4 standard errors, the bias within 2 % in norm."""
    models, tokens = heads(1, 507), 4096
    uniform = torch.rand(tokens, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grid = (torch.arange(tokens, dtype=torch.float64) + 0.5) / tokens
    whole = with_gradients(linear_kl(*models.inputs, vocab_size=507)[0], models.leaves)
    many = models.student_hidden_TD.detach().repeat(tokens, 1).requires_grad_()
    for points, bias in ((uniform, 0.02), (grid, 0.002)):  # a grid of uniforms leaves little but the bias
        head = models.teacher_hidden_TD.expand(tokens, -1), models.teacher_weight_WD
        drawn = sampled_logits(*head, num_samples=64, uniform_T=points, vocab_size=507)
        total, count = sparse_kl(drawn, many, models.student_weight_WD, torch.ones(tokens), vocab_size=507)
        loss, of_hidden, of_weight = with_gradients(total / count, (many, models.student_weight_WD))
        per_token = of_hidden * tokens
        found = [loss, per_token.mean(0, keepdim=True), of_weight]
        assert max(errors(found, whole)) <= bias
        log_r = models.logits()[1].log_softmax(-1)[0].detach()[drawn.indices_TK.long()] - drawn.log_prob_TK
        assert abs(loss - whole[0]) <= 4 * (log_r.exp() - 1 - log_r).mean(1).std() / math.sqrt(tokens)
        assert ((found[1] - whole[1]).abs() <= 4 * per_token.std(0) / math.sqrt(tokens)).all()
    assert errors([per_token[:1]], [whole[1]])[0] > 0.02  # one draw alone is noisy: the test sees an average
