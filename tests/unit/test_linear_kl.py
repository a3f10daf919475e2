"""The fused loss equals the loss on logits, for any chunks, in bounded memory (A3, A7, A10, B4, B17, B18, C1, C4)."""

from __future__ import annotations

import pytest
import torch
from loss_cases import Heads, allocated, errors, heads, kl_by_hand, normal, with_gradients
from torch.utils.checkpoint import checkpoint

from nemo_qad.distillation import fused, kl
from nemo_qad.distillation.kl import NonFiniteError, local_columns
from nemo_qad.distillation.linear_kl import linear_kl

NAN, INF = float("nan"), float("inf")


def run(models: Heads, **settings) -> list[torch.Tensor]:
    """[loss, gradient of the hidden states, gradient of the output weight]."""
    return with_gradients(linear_kl(*models.inputs, **settings)[0], models.leaves)


def truth_of(models: Heads, vocab: int, tau: float = 1.0, reverse: bool = False) -> list[torch.Tensor]:
    """The same by hand in FP64."""
    exact = models.to(torch.float64)
    return with_gradients(kl_by_hand(*exact.logits(), exact.mask_T, vocab, tau, reverse), exact.leaves)


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("block_bytes", [1, 2**20])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("tokens", "vocab", "width"), [(1, 100, 100), (7, 100, 128), (255, 507, 512), (257, 507, 507), (3, 131072, 131072)]
)
def test_every_chunk_size_gives_the_truth(tokens, vocab, width, reverse, block_bytes, monkeypatch):
    """Chunks of 1, 7, T and T + 1 tokens, budgets of one token and of everything, blocks of 64 columns or one."""
    monkeypatch.setattr(kl, "CPU_BLOCK_BYTES", max(block_bytes, 8 * width if width > 1000 else 1))
    models = heads(tokens, width)
    truth = truth_of(models, vocab, 1.7, reverse)
    one_token = 8 * (2 * width + 4 * 16)
    choices = [{"chunk_size": size} for size in (1, 7, tokens, tokens + 1, None)]
    for choice in [*choices, {"memory_budget": one_token}, {"memory_budget": 2**34}]:
        found = run(models, vocab_size=vocab, temperature=1.7, reverse=reverse, **choice)
        assert max(errors(found, truth)) <= 1e-12, choice
        assert not found[1][models.mask_T == 0].any() and not found[2][vocab:].any()


@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck(reverse):
    models = heads(6, 11, 4)
    hidden, weight, settings = *models.leaves, {"vocab_size": 9, "temperature": 1.4, "reverse": reverse}

    def loss(hidden_TD, weight_WD):
        changed = models.with_(student_hidden_TD=hidden_TD, student_weight_WD=weight_WD)
        return linear_kl(*changed.inputs, chunk_size=2, repeat_backward=True, **settings)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_temperature_and_equal_models():
    """B4, B17."""
    models = heads(20, 60)
    norms = [run(models, vocab_size=60, temperature=tau)[1].norm() for tau in (1.0, 2.0, 4.0, 64.0, 128.0)]
    assert max(norms[:3]) < 2 * min(norms[:3]) and abs(norms[4] / norms[3] - 1) < 0.05
    hidden, weight = models.inputs[:2]
    same = models.with_(student_hidden_TD=hidden.clone().requires_grad_(), student_weight_WD=weight)
    total, _ = linear_kl(*same.inputs, vocab_size=60)
    assert total == 0 and torch.autograd.grad(total, same.student_hidden_TD)[0].abs().max() <= 1e-15


@pytest.mark.parametrize("rubbish", [1e4, NAN, "noise"])
@pytest.mark.parametrize(("width", "teacher_width"), [(100, 128), (128, 100), (128, 128), (256, 256), (1024, 112)])
def test_padding_rows_change_nothing(width, teacher_width, rubbish):
    """C4, C1: also where the two models are padded differently."""
    models = heads(9, 100)
    truth = run(models, vocab_size=100, chunk_size=4)

    def padded(weight: torch.Tensor, size: int) -> torch.Tensor:
        rows = torch.full((size - 100, 16), 0.0 if rubbish == "noise" else rubbish, dtype=weight.dtype)
        rows = 50 * normal(size - 100, 16, seed=9) if rubbish == "noise" else rows
        return torch.cat([weight.detach(), rows])

    student, teacher = padded(models.student_weight_WD, width), padded(models.teacher_weight_WD, teacher_width)
    changed = models.with_(teacher_weight_WD=teacher, student_weight_WD=student.requires_grad_())
    loss, of_hidden, of_weight = run(changed, vocab_size=100, chunk_size=4)
    assert equal([loss, of_hidden, of_weight[:100]], truth) and not of_weight[100:].any()
    for name, narrow in (
        ("student", {"student_weight_WD": student[:99]}),
        ("vocab", {"teacher_weight_WD": teacher[:99]}),
    ):
        with pytest.raises(ValueError, match="vocab_size=100"):
            linear_kl(*changed.with_(**narrow).inputs, vocab_size=100), name


@pytest.mark.parametrize("kept", [[], [0], [3, 7]])
def test_masked_tokens_count_for_nothing(kept):
    """B18: NaN and Inf there too; without any token 0, 0 and zero gradients; masks of any kind."""
    models = heads(9, 30)
    mask = torch.zeros(9).index_fill(0, torch.tensor(kept, dtype=torch.long), 1)
    alone = Heads(*(x if i in (1, 3) else x[kept] for i, x in enumerate(models.inputs[:4])), torch.ones(len(kept)))
    expected = with_gradients(linear_kl(*alone.inputs, vocab_size=30)[0], models.leaves)
    hidden = [
        x.detach().masked_fill((mask == 0)[:, None], value)
        for x, value in zip(models.inputs[0:3:2], (NAN, INF), strict=True)
    ]
    hidden[1].requires_grad_()
    for kind in (mask, mask.bool(), mask.int(), 0.2 * mask):
        changed = models.with_(teacher_hidden_TD=hidden[0], student_hidden_TD=hidden[1], mask_T=kind)
        total, count = linear_kl(*changed.inputs, vocab_size=30, chunk_size=1)
        assert count == len(kept) and count.dtype == torch.int64
        found = with_gradients(total, changed.leaves)
        assert all(torch.allclose(x, y, rtol=1e-13, atol=1e-15) for x, y in zip(found, expected, strict=True))
        assert (found[0] > 0) == bool(kept) and not found[1][mask == 0].any()


NAMES = [f"the {model}'s {part}" for model in ("teacher", "student") for part in ("hidden state", "output weight")]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("reverse", [True, False])
def test_what_is_not_finite_is_named(place, value, reverse):
    """The token and the tensor, and no other; a row of a weight touches the first counted token."""
    models = heads(40, 30)
    broken = [x.detach().clone() for x in models.inputs]
    broken[4][:3], broken[4][17] = torch.tensor([0, 0, 1]), 1
    broken[place][17] = value
    token = 17 if place in (0, 2) else 2
    with pytest.raises(NonFiniteError) as raised:
        linear_kl(*broken, vocab_size=30, chunk_size=5 if reverse else None, reverse=reverse)
    assert raised.value.token == token and raised.value.source == f"{NAMES[place]} hold NaN or Inf"


def test_padding_rows_are_not_blamed():
    models = heads(5, 30)
    hidden, weight = (x.detach().clone() for x in models.leaves)
    hidden[2:], weight[25:] = NAN, NAN
    with pytest.raises(NonFiniteError) as raised:
        linear_kl(*models.with_(student_hidden_TD=hidden, student_weight_WD=weight).inputs, vocab_size=25)
    assert raised.value.source == "the student's hidden state hold NaN or Inf"


def test_two_culprits_and_none():
    models = heads(5, 30)
    hidden, weight = torch.full_like(models.teacher_hidden_TD, NAN), torch.full_like(models.student_weight_WD, INF)
    with pytest.raises(NonFiniteError, match=f"{NAMES[0]} and {NAMES[3]} hold"):
        linear_kl(*models.with_(teacher_hidden_TD=hidden, student_weight_WD=weight).inputs, vocab_size=30)
    large = models.to(torch.float32)
    changed = large.with_(
        student_hidden_TD=large.student_hidden_TD * 1e20, student_weight_WD=weight.fill_(1e20).float()
    )
    with pytest.raises(NonFiniteError, match="token 0: the logits are too large for FP32"):
        linear_kl(*changed.inputs, vocab_size=30)


@pytest.mark.parametrize("reverse", [False, True])
def test_huge_logits_do_not_overflow(reverse):
    models = heads(5, 300).to(torch.float32)
    hidden = (1e4 * models.student_hidden_TD.detach()).requires_grad_()
    changed = models.with_(teacher_hidden_TD=-1e4 * models.teacher_hidden_TD, student_hidden_TD=hidden)
    loss, *found = run(changed, vocab_size=300, reverse=reverse)
    assert 1e4 < loss < 1e6 and all(x.isfinite().all() for x in found)


def test_sizes_do_not_wrap_around():
    """A10: 522,240 tokens by 131,072 words are 68,451,041,280 logits; sizes are chosen without making them."""

    def chunk(budget: int, tokens: int = 522_240, width: int = 131_072, hidden: int = 64) -> int:
        shapes = (tokens, hidden), (width, hidden), (tokens,)
        hidden_TD, weight_vD, _ = (torch.empty(shape, device="meta") for shape in shapes)
        return fused._chunk_size(hidden_TD, local_columns(len(weight_vD), width, None), 2, budget)

    one = 4 * 2 * 131_072
    assert chunk(2**26) == 2**26 // one == 64 and chunk(one) == 1
    assert chunk(2**62) == fused.MOST_TOKENS_CPU
    assert chunk(2**40, tokens=2**40, width=2**31 + 1) == 2**40 // (4 * 2 * (2**31 + 1)) == 63
    with pytest.raises(ValueError, match=rf"memory_budget={one - 1} .* at least {one}"):
        chunk(one - 1)
    with pytest.raises(ValueError, match=r"memory_budget=0 .* at least 80"):
        linear_kl(*heads(4, 10, 4).to(torch.float32).inputs, vocab_size=10, memory_budget=0)


def test_peak_memory_is_that_of_a_chunk():
    """A7: peak bytes rise with the chunk and not with T; no tensor of T x V, and the budget holds."""

    def used(tokens: int, **settings) -> tuple[int, int]:
        models = heads(tokens, 20_000).to(torch.float32)
        models = models.with_(mask_T=torch.ones(tokens))
        of_call = allocated(lambda: run(models, vocab_size=20_000, **settings))
        return of_call.peak - sum(leaf.nbytes for leaf in models.leaves) - 16 * tokens, of_call.largest  # less mask

    by_tokens = [used(tokens, chunk_size=16) for tokens in (32, 128, 512)]
    assert by_tokens[2][0] <= 1.01 * by_tokens[0][0] and by_tokens[2][1] < 32 * 20_000 * 4
    by_chunk = [used(128, chunk_size=size)[0] for size in (1, 4, 16, 64)]
    assert by_chunk == sorted(by_chunk) and by_chunk[3] > 8 * by_chunk[0]
    assert used(128, memory_budget=2**24)[0] <= 1.25 * 2**24


def test_only_what_is_asked_for_is_computed(monkeypatch):
    models, products = heads(20, 60), []
    monkeypatch.setattr(fused, "accumulate", lambda total, a, b: products.append(total.shape) or total.addmm_(a, b))
    expected = run(models, vocab_size=60)
    assert products == [(int(models.mask_T.sum()), 16), (60, 16)]
    hidden, weight = models.leaves
    for index, changed in [(1, {"student_weight_WD": weight.detach()}), (2, {"student_hidden_TD": hidden.detach()})]:
        products.clear()
        total, _ = linear_kl(*models.with_(**changed).inputs, vocab_size=60)
        (found,) = torch.autograd.grad(total, models.leaves[index - 1])
        assert torch.equal(found, expected[index]) and len(products) == 1
    products.clear()
    with torch.no_grad():
        assert linear_kl(*models.inputs, vocab_size=60)[0] == expected[0]
    assert not linear_kl(*(x.detach() for x in models.inputs), vocab_size=60)[0].requires_grad and not products


def test_backward_twice():
    models = heads(12, 40)
    total, _ = linear_kl(*models.inputs, vocab_size=40)
    with_gradients(total, models.leaves)
    total, _ = linear_kl(*models.inputs, vocab_size=40)
    torch.autograd.grad(total, models.leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="repeat_backward"):
        torch.autograd.grad(total, models.leaves)
    total, _ = linear_kl(*models.inputs, vocab_size=40, repeat_backward=True)
    first = torch.autograd.grad(3 * total, models.leaves, retain_graph=True)
    second = torch.autograd.grad(total, models.leaves)
    assert all(torch.allclose(x, 3 * y, rtol=1e-14) for x, y in zip(first, second, strict=True))




@pytest.mark.parametrize("repeat", [False, True])
def test_the_gradient_is_scaled_in_fp32(repeat):
    """0.3 is 0.3008 in BF16: the BF16 gradient times 0.3 is rounded once, to the nearest."""
    models = heads(12, 40).to(torch.bfloat16)
    plain = run(models, vocab_size=40)
    total, count = linear_kl(*models.inputs, vocab_size=40, repeat_backward=repeat)
    scaled = torch.autograd.grad(total * 0.3 / count, models.leaves)
    exact = plain[1].double() * (0.3 / int(count))
    assert torch.equal(scaled[0], exact.bfloat16())
    assert errors([scaled[1]], [plain[2].double() * (0.3 / int(count))])[0] < 3e-3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_works_with_activation_recompute(reentrant, inside):
    """Inside a checkpoint, and after a checkpointed layer."""
    models = heads(12, 40)
    layer = torch.nn.Linear(16, 16).double()
    leaves = (*models.leaves, *layer.parameters())

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        changed = models.with_(student_hidden_TD=layer(hidden).tanh(), student_weight_WD=weight)
        return linear_kl(*changed.inputs, vocab_size=40, chunk_size=5)[0] / 7

    def layer_first(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: layer(x).tanh(), hidden, use_reentrant=reentrant)
        changed = models.with_(student_hidden_TD=hidden, student_weight_WD=weight)
        return linear_kl(*changed.inputs, vocab_size=40, chunk_size=5)[0] / 7

    expected = [g.clone() for g in torch.autograd.grad(loss(*models.leaves), leaves)]
    (checkpoint(loss, *models.leaves, use_reentrant=reentrant) if inside else layer_first(*models.leaves)).backward()
    assert all(torch.allclose(leaf.grad, g, rtol=1e-12, atol=1e-14) for leaf, g in zip(leaves, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inputs_are_left_alone(dtype):
    models = heads(12, 40).to(dtype)
    before = [x.detach().clone() for x in models.inputs]
    run(models, vocab_size=38, temperature=2.0)
    assert equal([x.detach() for x in models.inputs], before)


def test_shapes_are_checked():
    models = heads(6, 12)
    hidden, mask = models.teacher_hidden_TD, models.mask_T
    for message, changes in [
        ("5 teacher and 6 student tokens", {"teacher_hidden_TD": hidden[:5]}),
        ("6 hidden states for a mask of 5", {"mask_T": mask[:5]}),
        ("teacher: hidden states have 15 values", {"teacher_hidden_TD": hidden[:, :15]}),
        ("student: hidden states have 15 values", {"student_hidden_TD": hidden[:, :15]}),
        (r"must be \[T, D\]", {"mask_T": mask[None]}),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_kl(*models.with_(**changes).inputs, vocab_size=12)
    for name, value in (("chunk_size", 0), ("temperature", 0.0), ("temperature", NAN), ("vocab_size", 0)):
        with pytest.raises(ValueError, match=f"{name}="):
            linear_kl(*models.inputs, **{"vocab_size": 12, name: value})
