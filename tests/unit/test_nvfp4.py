"""NVFP4 numerics against FP64 truth and by-hand values; fake quantisation equals the decoded bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_qad.quantization import nvfp4

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def nearest_even(value: float) -> float:
    """E2M1 value nearest to `value`, ties to the even code, in FP64 by comparing all magnitudes."""
    magnitude = min(abs(value), 6.0)
    best = min(range(8), key=lambda code: (abs(GRID[code] - magnitude), code % 2))
    return GRID[best] if value >= 0 else -GRID[best]


def unit_step(values: Tensor) -> Tensor:
    """Fake quantisation with a step of exactly one."""
    return nvfp4.fake_quantize(values, torch.full((values.numel() // 16,), 6.0), torch.tensor(6.0 * 448))


def weights(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(48, 64, generator=generator) * 0.02
    if name == "bf16":
        return weight.bfloat16()
    if name == "zero blocks":
        weight[3:9, 16:48] = 0
    if name == "underflow":
        weight[::2] *= 1e-6
    if name == "outlier":
        weight[5, 5] = 3e4
    if name == "zeros":
        weight.zero_()
    if name == "tiny":
        weight *= 1e-36
    if name == "huge":
        weight *= 1e34
    return weight


NAMES = ("normal", "bf16", "zero blocks", "underflow", "outlier", "zeros", "tiny", "huge")


def test_rounds_to_nearest_even_everywhere() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    around = torch.cat([ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    values = torch.cat([torch.linspace(-8, 8, 4096 - 64), around, -around, torch.zeros(22)])
    expected = torch.tensor([nearest_even(v) for v in values.double().tolist()])
    assert torch.equal(unit_step(values), expected)


def test_what_rounds_to_zero_is_positive_zero() -> None:
    rounded = unit_step(torch.full((16,), -0.1))
    assert not torch.signbit(rounded).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale_max", [448.0, 256.0])
def test_decoded_bytes_are_the_fake_quantised_values(name: str, scale_max: float) -> None:
    weight = weights(name)
    amax = nvfp4.block_amax(weight)
    for moved in (weight, weight * 1.7, -weight):
        packed = nvfp4.pack(moved, amax, amax.amax(), scale_max)
        decoded = nvfp4.decode(packed)
        assert torch.equal(bits(decoded), bits(nvfp4.fake_quantize(moved, amax, amax.amax(), scale_max)))
        scales = packed.block_scale.view(torch.uint8)
        assert (scales > 0).all() and (scales < 0x7F).all()
        assert packed.global_scale > 0 and packed.global_scale.isfinite()
        assert packed.codes.dtype == torch.uint8 and packed.codes.shape == (48, 32)


@pytest.mark.parametrize("name", ["normal", "bf16", "outlier"])
def test_each_element_takes_the_nearest_representable_value(name: str) -> None:
    weight = weights(name)
    amax = nvfp4.block_amax(weight)
    packed = nvfp4.pack(weight, amax, amax.amax())
    step = (packed.block_scale.double() * packed.global_scale.double()).repeat_interleave(16, dim=1)
    grid = torch.tensor([*GRID, *(-g for g in GRID)], dtype=torch.float64)
    distances = (weight.double()[..., None] - grid * step[..., None]).abs().amin(-1)
    error = (weight.double() - nvfp4.decode(packed).double()).abs()
    assert (error <= distances + 1e-6 * step).all()


def test_scales_follow_the_formula() -> None:
    weight = weights("normal")
    amax = weight.abs().view(48, 4, 16).amax(-1)
    exact = amax.double() * 448 / amax.amax().double()
    scale = nvfp4.block_scale(nvfp4.block_amax(weight), amax.amax())
    assert torch.equal(scale.float(), exact.to(torch.float8_e4m3fn).float())
    assert scale.float().max() == 448
    assert nvfp4.global_scale(amax.amax()).item() == pytest.approx(amax.max().item() / 2688, rel=1e-6)


def test_underflowing_block_keeps_the_smallest_scale_in_training_and_export() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16:] = 1.0, 1e-6
    amax = nvfp4.block_amax(weight)
    packed = nvfp4.pack(weight, amax, amax.amax())
    assert packed.block_scale.float()[0, 1] == 2.0**-9
    step = 2.0**-9 / 2688
    assert nvfp4.fake_quantize_dynamic(weight)[0, 20].item() == pytest.approx(1.5 * step)  # 1.376 steps


def test_frozen_scale_saturates_and_dynamic_does_not() -> None:
    weight = weights("normal")
    amax = nvfp4.block_amax(weight)
    frozen = nvfp4.fake_quantize(3 * weight, amax, amax.amax())
    assert frozen.abs().max() <= amax.max() * 1.001
    dynamic = nvfp4.fake_quantize_dynamic(3 * weight)
    assert torch.allclose(dynamic, 3 * nvfp4.fake_quantize_dynamic(weight), rtol=1e-6)


def test_packing_order_by_hand() -> None:
    values = torch.zeros(1, 16)
    values[0, :4] = torch.tensor([0.5, -6.0, 3.0, -1.5])
    packed = nvfp4.pack(values, torch.tensor([[6.0]]), torch.tensor(6.0 * 448))
    assert packed.codes[0].tolist() == [0xF1, 0xB5, 0, 0, 0, 0, 0, 0]  # even column in the low nibble
    assert packed.block_scale.float().item() == 1 and packed.global_scale.item() == 1


def test_four_over_six_by_hand() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([10.0, 20.0, 30.0, 40.0])
    weight[0, 16] = 600.0
    amax = nvfp4.four_over_six_amax(weight, torch.tensor(600.0))
    assert amax.tolist() == [[60.0, 600.0]]
    got = nvfp4.fake_quantize(weight, amax, torch.tensor(600.0), 256.0)[0, :4]
    assert torch.allclose(got, torch.tensor([10.15625, 20.3125, 30.46875, 40.625]))
    assert nvfp4.block_scale(amax, torch.tensor(600.0), 256.0).float().tolist() == [[26.0, 256.0]]


def test_four_over_six_takes_the_lower_error_of_each_block() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    amax, outer = nvfp4.block_amax(weight), weight.abs().max()
    errors = []
    for factor in (1.0, 1.5):
        values = nvfp4.decode(nvfp4.pack(weight, amax * factor, outer, 256.0)).double()
        errors.append((values - weight.double()).square().view(64, 8, 16).sum(-1))
    at_four = nvfp4.four_over_six_amax(weight, outer) > amax
    clear = (errors[0] - errors[1]).abs() > 1e-6 * errors[0]
    assert clear.float().mean() > 0.9
    assert torch.equal(at_four[clear], (errors[1] < errors[0])[clear])
    assert 0.1 < at_four.float().mean() < 0.9


def test_leading_dimensions_are_kept_and_odd_widths_refused() -> None:
    tensor = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    flat = nvfp4.fake_quantize_dynamic(tensor.view(6, 32))
    assert torch.equal(nvfp4.fake_quantize_dynamic(tensor), flat.view(2, 3, 32))
    with pytest.raises(ValueError, match=r"multiples of 16, not 24"):
        nvfp4.fake_quantize_dynamic(torch.zeros(2, 24))


def test_nan_weights_are_not_hidden() -> None:
    weight = weights("normal")
    weight[0, 0] = float("nan")
    assert nvfp4.fake_quantize_dynamic(weight).isnan().any()
