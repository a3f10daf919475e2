"""The hand-written RMS norm against torch's and the numerical gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nemo_qad.models.norms import GatedRMSNorm, rms_norm


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("group_size", [3, 6])
def test_gradient_is_that_of_the_forward(group_size: int) -> None:
    x, weight = normal(4, 2, 6).requires_grad_(), normal(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, group_size=group_size, eps=1e-2), (x, weight))


def test_one_group_equals_torch() -> None:
    x, weight = normal(5, 8), normal(8)
    torch.testing.assert_close(rms_norm(x, weight, group_size=8, eps=1e-3), F.rms_norm(x, (8,), weight, 1e-3))


def test_a_zero_row_stays_finite() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    y = rms_norm(x, torch.ones(4), group_size=4, eps=1e-5)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4)) and x.grad is not None and x.grad.isfinite().all()


def test_gated_norm_gates_first_and_keeps_groups_apart() -> None:
    norm = GatedRMSNorm(6, eps=1e-5, group_size=3)
    x, gate = normal(2, 6, dtype=torch.float32), normal(2, 6, dtype=torch.float32)
    found = norm(x, gate)
    gated = x * F.silu(gate)
    for start in (0, 3):
        part = gated[:, start : start + 3]
        torch.testing.assert_close(found[:, start : start + 3], F.rms_norm(part, (3,), None, 1e-5))
