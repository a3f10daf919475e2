"""Sums and counts of shards add up to the whole, however the tokens are cut (cases B9, B10, B11, B14)."""

from __future__ import annotations

import pytest
import torch
from loss_cases import heads
from test_build import ONE_RANK, small_model

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.distillation.kl import kl_per_token
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.models.build import build_model
from nemo_qad.schema import Precision
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Trainer

TOKENS, VOCAB = 16, 40
MASKS = {
    "one token": torch.zeros(TOKENS).index_fill(0, torch.tensor(5), 1),
    "3 in the first half, 8 in the second": torch.cat([torch.zeros(5), torch.ones(3), torch.ones(8)]),
    "all": torch.ones(TOKENS),
}


def zigzag(ranks: int) -> list[torch.Tensor]:
    """The tokens of each context-parallel rank: piece r and piece 2R - 1 - r of 2R pieces."""
    pieces = torch.arange(TOKENS).chunk(2 * ranks)
    return [torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_add_up_to_the_whole(mask: str, ranks: int) -> None:
    """The mean of the shards' means would be wrong here: every reduction adds sums and counts, and divides once."""
    models = heads(TOKENS, VOCAB).with_(mask_T=MASKS[mask])
    teacher_hidden, teacher_weight, hidden, weight = models.inputs[:4]
    total, count = linear_kl(*models.inputs, vocab_size=VOCAB)
    whole = torch.autograd.grad(total / count, (hidden, weight))
    sums, counts, gradients = [], [], []
    for tokens in zigzag(ranks):
        shard = hidden.detach()[tokens].requires_grad_()
        part, number = linear_kl(
            teacher_hidden[tokens], teacher_weight, shard, weight, models.mask_T[tokens], vocab_size=VOCAB
        )
        found = torch.autograd.grad(part, (shard, weight))
        gradients.append((torch.zeros_like(hidden).index_copy(0, tokens, found[0]), found[1]))
        sums.append(part.detach())
        counts.append(number)
    assert sum(counts) == count
    torch.testing.assert_close(sum(sums) / sum(counts), (total / count).detach(), rtol=1e-12, atol=0)
    for got, expected in zip(map(sum, zip(*gradients, strict=True)), whole, strict=True):
        torch.testing.assert_close(got / count, expected, rtol=1e-10, atol=1e-14)
    assert all(part == 0 for part, number in zip(sums, counts, strict=True) if number == 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_of_single_tokens_do_not_depend_on_the_cut(ranks: int) -> None:
    """B11: the vector put together from the shards equals the whole one, at the cuts too."""
    teacher, student = heads(TOKENS, VOCAB).logits()
    whole = kl_per_token(teacher, student, torch.ones(TOKENS), vocab_size=VOCAB)
    again = torch.full_like(whole, torch.nan)
    for tokens in zigzag(ranks):
        again[tokens] = kl_per_token(teacher[tokens], student[tokens], torch.ones(len(tokens)), vocab_size=VOCAB)
    torch.testing.assert_close(again, whole, rtol=1e-12, atol=0)


def test_ddp_adds_gradients_and_never_averages_them() -> None:
    """B14: the one division is by the number of counted tokens; an average in a collective would be another."""
    qad = compose(["+recipe=max"]).qad
    with runtime.process_groups(ONE_RANK, seed=1, threads=1):
        teacher, student = (build_model(small_model(), ONE_RANK, sequence_length=16) for _ in range(2))
        loss = distillation_loss(qad, vocab_size=100, teacher=teacher)
        trainer = Trainer(student, qad_settings(qad), loss, precision=Precision.fp32)
        assert trainer.module.config.calculate_per_token_loss
        assert not trainer._ddp.ddp_config.average_in_collective
