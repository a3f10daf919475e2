"""FP8 numerics against a table of all E4M3 values in FP64."""

from __future__ import annotations

import pytest
import torch

from nemo_qad.quantization import fp8


def e4m3_values() -> torch.Tensor:
    """All 127 finite non-negative E4M3 values from the definition of the format."""
    values = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        values.append(2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8))
    return torch.tensor(values, dtype=torch.float64)


def test_every_element_takes_the_nearest_value() -> None:
    tensor = torch.randn(31, 17, generator=torch.Generator().manual_seed(0)) * 0.1
    amax = tensor.abs().max()
    got = fp8.fake_quantize(tensor, amax)
    grid = e4m3_values() * fp8.scale_of(amax).double()
    best = (tensor.double().abs()[..., None] - grid).abs().amin(-1)
    error = (got.double() - tensor.double()).abs()
    assert (error <= best + 2e-7 * tensor.double().abs()).all()  # one FP32 rounding
    assert got.abs().max().item() == pytest.approx(amax.item(), rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 3.0, 1e-30, 0.0])
def test_decoded_bytes_are_the_fake_quantised_values(factor: float) -> None:
    tensor = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    amax = tensor.abs().max()
    scale = fp8.scale_of(amax)
    codes = fp8.encode(tensor * factor, scale)
    decoded = fp8.decode(codes, scale)
    assert torch.equal(decoded.view(torch.int32), fp8.fake_quantize(tensor * factor, amax).view(torch.int32))
    assert not decoded.isnan().any() and decoded.abs().max() <= amax * 1.000001


def test_zero_amax_gives_a_positive_normal_scale() -> None:
    scale = fp8.scale_of(torch.tensor(0.0))
    assert scale > torch.finfo(torch.float32).tiny
    assert torch.equal(fp8.fake_quantize(torch.zeros(4), torch.tensor(0.0)), torch.zeros(4))


def test_scale_is_not_clamped_to_one() -> None:
    assert fp8.scale_of(torch.tensor(3.0464)).item() == pytest.approx(0.0068, rel=1e-6)
