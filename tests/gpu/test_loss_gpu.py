"""The fused loss on a GPU, where BF16 products come out in FP32 and blocks are large: the same as on a CPU."""

from __future__ import annotations

import pytest
import torch

from nemo_qad.distillation.kl import NonFiniteError, reference_kl
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.sparse_kl import reference_sparse_kl, sparse_kl
from nemo_qad.distillation.sparse_logits import top_k_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WORDS = 5000


def inputs(dtype: torch.dtype, tokens: int = 300, hidden: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    teacher_hidden, teacher_weight = normal(tokens, hidden), normal(5120, hidden) / 4
    student = teacher_hidden + 0.2 * normal(tokens, hidden), teacher_weight + 0.05 * normal(5120, hidden)
    moved = [t.to("cuda", dtype) for t in (teacher_hidden, teacher_weight, *student)]
    return [*moved[:2], *(t.requires_grad_() for t in moved[2:])]


# Gradients of BF16 are stored in BF16, and their factor is rounded to it before the product: 2^-8 each.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_equals_fp64_truth(dtype: torch.dtype, tolerance: float, chunk_size: int | None, reverse: bool) -> None:
    given = inputs(dtype)
    mask = (torch.arange(300, device="cuda") % 3 > 0).float()
    wide = [t.detach().double().requires_grad_() for t in given]
    settings = {"vocab_size": WORDS, "temperature": 1.5, "reverse": reverse}
    truth, count = reference_kl(wide[0] @ wide[1].T, wide[2] @ wide[3].T, mask, **settings)
    expected = torch.autograd.grad(truth, wide[2:])
    found, found_count = linear_kl(*given, mask, **settings, chunk_size=chunk_size)
    gradients = torch.autograd.grad(found, given[2:])
    assert found_count == count
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)
    for got, right in zip(gradients, expected, strict=True):
        assert float((got.double() - right).norm() / right.norm()) < tolerance


def test_top_k_equals_its_oracle() -> None:
    given, mask = inputs(torch.float32), torch.ones(300, device="cuda")
    values = top_k_logits(given[0], given[1], k=40, vocab_size=WORDS)
    truth, _ = reference_sparse_kl(values, given[2].double() @ given[3].double().T, mask, vocab_size=WORDS)
    found, _ = sparse_kl(values, *given[2:], mask, vocab_size=WORDS)
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)


def test_scratch_memory_stays_in_its_budget() -> None:
    given = inputs(torch.bfloat16, tokens=4096)
    budget = 16 * 2**20
    gradients = 4096 * 64 * 2 + 5120 * 64 * 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_kl(*given, torch.ones(4096, device="cuda"), vocab_size=WORDS, memory_budget=budget)
    # Blocks of products, and what the allocator rounds up to, come on top.
    assert torch.cuda.max_memory_allocated() - before < 2 * budget + gradients


def test_a_nan_is_named() -> None:
    given = inputs(torch.bfloat16)
    with torch.no_grad():
        given[2][5, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="student's hidden state") as caught:
        linear_kl(*given, torch.ones(300, device="cuda"), vocab_size=WORDS)
    assert caught.value.token == 5
