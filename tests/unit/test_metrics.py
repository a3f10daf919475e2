"""Held-out metrics against a float64 truth written with NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.evaluation.metrics import CHUNK, ProjectedLogits, held_out

VOCAB = 37


def table_model(seed: int, scale: float = 3.0) -> Callable[[Tensor], Tensor]:
    """A model whose logits depend on the token alone."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    return lambda tokens: table[tokens]


def make_batches(seed: int = 0, shapes: tuple[tuple[int, int], ...] = ((3, 301), (2, 301))) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            "tokens": torch.randint(VOCAB, shape, generator=rng),
            "labels": torch.randint(VOCAB, shape, generator=rng),
            "loss_mask": (torch.rand(shape, generator=rng) < 0.7).float(),
        }
        for shape in shapes
    ]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def truth(student, teacher, batches: list[dict[str, Tensor]]) -> tuple[float, float, float, int]:
    kl, loss, right, count = 0.0, 0.0, 0, 0
    for batch in batches:
        log_q = log_softmax(student(batch["tokens"]).double().numpy())
        log_p = log_softmax(teacher(batch["tokens"]).double().numpy())
        for position in np.argwhere(batch["loss_mask"].numpy() > 0):
            p, q = log_p[tuple(position)], log_q[tuple(position)]
            label = int(batch["labels"][tuple(position)])
            kl += float((np.exp(p) * (p - q)).sum())
            loss -= float(q[label])
            right += int(q.argmax() == label)
            count += 1
    return kl / count, loss / count, right / count, count


@pytest.mark.parametrize("closeness", [1.0, 1e-2])
def test_equal_to_float64_truth(closeness: float) -> None:
    teacher, other = table_model(1), table_model(2)

    def student(tokens: Tensor) -> Tensor:
        return teacher(tokens) + closeness * other(tokens)

    batches = make_batches()
    kl, loss, accuracy, count = truth(student, teacher, batches)
    found = held_out(student, teacher, batches)
    assert found.kl == pytest.approx(kl, rel=2e-5, abs=1e-8)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.perplexity == pytest.approx(np.exp(loss), rel=1e-5)
    assert (found.accuracy, found.num_tokens) == (accuracy, count)


def test_direction_is_teacher_to_student() -> None:
    sharp, flat = table_model(1, 6.0), table_model(1, 0.1)
    batches = make_batches()
    forward, backward = held_out(flat, sharp, batches), held_out(sharp, flat, batches)
    assert forward.kl == pytest.approx(truth(flat, sharp, batches)[0], rel=1e-5)
    assert backward.kl is not None and forward.kl is not None
    assert backward.kl > 1.5 * forward.kl


def test_masked_tokens_do_not_count() -> None:
    student, teacher, batches = table_model(1), table_model(2), make_batches()
    before = held_out(student, teacher, batches)
    for batch in batches:
        masked = batch["loss_mask"] == 0
        batch["tokens"][masked] = 0
        batch["labels"][masked] = 1
    padding = {"tokens": torch.zeros(2, 9, dtype=torch.int64), "labels": torch.zeros(2, 9, dtype=torch.int64)}
    batches.append({**padding, "loss_mask": torch.zeros(2, 9)})
    assert held_out(student, teacher, batches) == before


def test_masked_logits_that_are_not_numbers_do_not_count() -> None:
    batches = make_batches(shapes=((2, 50),))
    mask = batches[0]["loss_mask"]
    plain = table_model(1)

    def broken(tokens: Tensor) -> Tensor:
        return torch.where(mask[..., None] > 0, plain(tokens), torch.nan)

    assert held_out(broken, broken, batches) == held_out(plain, plain, batches)


def test_a_model_has_no_distance_to_itself() -> None:
    model = table_model(4)
    assert held_out(model, model, make_batches()).kl == 0.0
    assert held_out(model, None, make_batches()).kl is None


def test_token_that_the_teacher_excludes_adds_nothing() -> None:
    plain = table_model(1)

    def excluding(tokens: Tensor) -> Tensor:
        return plain(tokens).index_fill(-1, torch.tensor([5]), -torch.inf)

    batches = make_batches(shapes=((2, 20),))
    assert held_out(plain, excluding, batches).kl == pytest.approx(
        held_out(plain, lambda tokens: plain(tokens).index_fill(-1, torch.tensor([5]), -1e4), batches).kl
    )


def test_no_valid_token_is_refused() -> None:
    batches = make_batches()
    for batch in batches:
        batch["loss_mask"].zero_()
    with pytest.raises(UserError, match="loss_mask is 0 everywhere"):
        held_out(table_model(1), None, batches)
    with pytest.raises(UserError, match="No held-out token"):
        held_out(table_model(1), None, [])


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match="not finite"):
        held_out(lambda tokens: torch.full((*tokens.shape, VOCAB), torch.nan), None, make_batches())


def test_logits_made_on_demand_are_those_of_the_whole_batch() -> None:
    """And never more than a chunk of them: the hidden states of masked tokens are not projected at all."""
    sizes = []

    class Watched(ProjectedLogits):
        def float(self) -> Tensor:
            sizes.append(self.hidden.shape[0])
            return super().float()

    tables = [table_model(seed)(torch.arange(VOCAB)) for seed in (1, 2)]
    batches = make_batches()
    watched = [
        lambda tokens, t=table: Watched(torch.nn.functional.one_hot(tokens, VOCAB).float(), t.T, VOCAB)
        for table in tables
    ]
    found = held_out(*watched, batches)
    assert found == held_out(*(lambda tokens, t=table: t[tokens] for table in tables), batches)
    assert max(sizes) == CHUNK and sum(sizes) == 2 * sum(int(batch["loss_mask"].sum()) for batch in batches)
