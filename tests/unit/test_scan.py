"""The chunked scan and the convolution against the recurrence itself, in FP64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_qad.models.convolution import causal_conv
from nemo_qad.models.scan import chunked_scan

BATCH, HEADS, HEAD_DIM, GROUPS, STATE = 2, 4, 6, 2, 5


def scan_inputs(length: int, *, largest_decay: float = 4.0) -> list[Tensor]:
    random = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    dt = torch.rand(length, BATCH, HEADS, dtype=torch.float64, generator=random) * 0.5 + 1e-3
    decay = -torch.rand(HEADS, dtype=torch.float64, generator=random) * largest_decay - 0.1
    return [
        normal(length, BATCH, HEADS, HEAD_DIM),
        dt,
        decay,
        normal(length, BATCH, GROUPS, STATE),
        normal(length, BATCH, GROUPS, STATE),
        normal(HEADS),
    ]


def recurrence(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """One token after another, from the definition."""
    heads_per_group = x.shape[2] // b.shape[2]
    b, c = (tensor.repeat_interleave(heads_per_group, dim=2) for tensor in (b, c))
    state = x.new_zeros(x.shape[1], x.shape[2], x.shape[3], b.shape[3])
    outputs = []
    for t in range(x.shape[0]):
        kept = torch.exp(dt[t] * decay)[..., None, None] * state
        state = kept + torch.einsum("bh,bhp,bhn->bhpn", dt[t], x[t], b[t])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[t]) + d[:, None] * x[t])
    return torch.stack(outputs)


def relative_error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 75])
@pytest.mark.parametrize("chunk_size", [4, 16, 128])
def test_scan_equals_the_recurrence(length: int, chunk_size: int) -> None:
    exact = [tensor.requires_grad_() for tensor in scan_inputs(length)]
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    truth = recurrence(*exact)
    found = chunked_scan(*single, chunk_size=chunk_size)
    assert found.dtype == torch.float32
    assert relative_error(found, truth) < 1e-6
    weights = torch.randn(truth.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((truth * weights).sum(), exact, allow_unused=True)
    found_gradients = torch.autograd.grad((found * weights.float()).sum(), single, allow_unused=True)
    for name, gradient, found_gradient in zip(
        ["x", "dt", "decay", "b", "c", "d"], gradients, found_gradients, strict=True
    ):
        if length == 1 and name == "decay":  # the first token reads an empty state
            assert found_gradient is None or found_gradient.abs().max() == 0
        else:
            # The decay's gradient is a sum of differences of sums over a chunk: cancellation costs a digit.
            assert relative_error(found_gradient, gradient) < (1e-5 if name == "decay" else 1e-6), name


def test_scan_in_fp64_passes_the_numerical_gradient_check() -> None:
    inputs = [tensor.requires_grad_() for tensor in scan_inputs(7)]
    assert torch.autograd.gradcheck(lambda *tensors: chunked_scan(*tensors, chunk_size=3), inputs)


def test_strong_decay_neither_overflows_nor_hides_the_past() -> None:
    """exp of the reversed sum would be inf in FP32 here: the sum over a chunk is near -500."""
    exact = scan_inputs(64, largest_decay=40.0)
    single = [tensor.float().requires_grad_() for tensor in exact]
    found = chunked_scan(*single, chunk_size=64)
    assert relative_error(found, recurrence(*exact)) < 2e-6
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), single))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 19])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_equals_torch_conv1d(length: int, width: int) -> None:
    random = torch.Generator().manual_seed(width)
    x = torch.randn(length, 3, 6, dtype=torch.float64, generator=random).requires_grad_()
    weight = torch.randn(6, width, dtype=torch.float64, generator=random).requires_grad_()
    bias = torch.randn(6, dtype=torch.float64, generator=random).requires_grad_()
    padded = F.conv1d(x.permute(1, 2, 0), weight[:, None], bias, padding=width - 1, groups=6)
    truth = F.silu(padded[..., :length]).permute(2, 0, 1)
    found = causal_conv(x, weight, bias)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(truth.shape, dtype=torch.float64, generator=random)
    for gradient, found_gradient in zip(
        torch.autograd.grad(truth, [x, weight, bias], upstream),
        torch.autograd.grad(found, [x, weight, bias], upstream),
        strict=True,
    ):
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)


def test_convolution_of_bf16_stays_bf16() -> None:
    x = torch.randn(9, 2, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert causal_conv(x, torch.ones(6, 4).bfloat16(), torch.zeros(6).bfloat16()).dtype == torch.bfloat16
