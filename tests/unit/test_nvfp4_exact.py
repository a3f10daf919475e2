"""The fast NVFP4 path equals the oracle bit for bit, also where numbers are zero, tiny, huge or no numbers."""

from __future__ import annotations

import pytest
import torch
from nvfp4_cases import DISTRIBUTIONS, adversarial, bits, blocks
from torch import Tensor

from nemo_qad.quantization import nvfp4, nvfp4_fast, nvfp4_oracle, nvfp4_search

INF, NAN = float("inf"), float("nan")


def neighbours(points: Tensor) -> Tensor:
    return torch.cat([points, torch.nextafter(points, points + 1), torch.nextafter(points, points - 1)])


def bf16_numbers() -> Tensor:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    return numbers[numbers.isfinite()]


def scale_bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).flatten().long()


def test_tables_of_the_oracle_are_the_formats() -> None:
    assert torch.equal(nvfp4_oracle.E4M3, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    assert nvfp4_oracle.E4M3[126] == nvfp4.E4M3_MAX and nvfp4_oracle.E4M3[1] == nvfp4.MIN_BLOCK_SCALE
    codes = torch.arange(16)[None]
    values = nvfp4_oracle.decode(codes, torch.ones(1))
    assert values[0, 1:8].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6] and torch.equal(values[0, 9:], -values[0, 1:8])


def test_rounding_equals_the_oracle_at_every_tie_and_every_bf16_number() -> None:
    """Both are monotone steps between the ties, so agreement at ties and their neighbours is agreement everywhere."""
    ties = (nvfp4_oracle.E2M1[1:] + nvfp4_oracle.E2M1[:-1]) / 2
    magnitudes = torch.cat([neighbours(ties), neighbours(nvfp4_oracle.E2M1[1:]), bf16_numbers().abs(), torch.zeros(1)])
    expected = nvfp4_oracle.E2M1[nvfp4_oracle.nearest(magnitudes, nvfp4_oracle.E2M1)]
    clamped = magnitudes.clamp(max=6)
    constant = nvfp4.rounder(clamped)
    assert torch.equal((clamped + constant) - constant, expected)
    rows = magnitudes[: len(magnitudes) // 16 * 16].view(16, -1)
    assert torch.equal(nvfp4_fast.round_rows(rows, torch.ones(rows.shape[1])).flatten(), expected[: rows.numel()])
    assert torch.equal(nvfp4.encode(nvfp4_oracle.E2M1).long(), torch.arange(8))


def test_scale_equals_the_oracle_at_every_tie_and_every_bf16_number() -> None:
    table = nvfp4_oracle.E4M3
    amax = torch.cat([neighbours((table[1:] + table[:-1]) / 2), neighbours(table[1:]), bf16_numbers().abs()])
    for global_amax, scale_max in ((448.0, 448.0), (256.0, 256.0), (0.3, 448.0), (3e38, 256.0), (0.0, 448.0)):
        got = nvfp4.block_scale(amax, torch.tensor(global_amax), scale_max)
        assert torch.equal(scale_bytes(got), nvfp4_oracle.scale_bytes(amax, torch.tensor(global_amax), scale_max))


@pytest.mark.parametrize("scale_max", [448.0, 256.0])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_codes_scales_and_values_equal_the_oracle(name: str, scale_max: float) -> None:
    """E14: what is packed, what is decoded and what training sees come from the same rounded scale."""
    tensor = blocks(name, 20_000)
    values_NK = tensor.float().view(-1, 16)
    amax, outer = nvfp4.block_amax(tensor), nvfp4.block_amax(tensor).amax()
    packed = nvfp4.pack(tensor, amax, outer, scale_max)
    scales_N = nvfp4_oracle.scale_bytes(nvfp4_oracle.block_amax(values_NK), outer, scale_max)
    step_N = nvfp4_oracle.steps(scales_N, outer, scale_max)
    codes_NK = nvfp4_oracle.encode(values_NK, step_N)
    assert torch.equal(scale_bytes(packed.block_scale), scales_N)
    assert torch.equal(packed.codes.view(-1, 8), nvfp4_oracle.pack(codes_NK))
    assert torch.equal(nvfp4_oracle.unpack(packed.codes.view(-1, 8)), codes_NK)
    decoded = nvfp4_oracle.decode(codes_NK, step_N).view(tensor.shape)
    assert torch.equal(bits(nvfp4.decode(packed)), bits(decoded))
    assert torch.equal(bits(nvfp4.fake_quantize(tensor, amax, outer, scale_max)), bits(decoded))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_four_over_six_equals_the_oracle(name: str) -> None:
    """E15: chosen scales and codes, bytes up to 448, read right by a plain decoder."""
    tensor = blocks(name, 40_000, seed=1)
    found = nvfp4_fast.four_over_six(tensor, packed=True)
    outer = tensor.abs().amax().float()
    values_NK = tensor.float().view(-1, 16)
    scales_N = nvfp4_oracle.four_over_six(values_NK, outer)
    step_N = nvfp4_oracle.steps(scales_N, outer, 256.0)
    codes_NK = nvfp4_oracle.encode(values_NK, step_N)
    assert found.packed is not None
    assert torch.equal(scale_bytes(found.packed.block_scale), scales_N)
    assert torch.equal(found.packed.codes.view(-1, 8), nvfp4_oracle.pack(codes_NK))
    assert torch.equal(found.amax, nvfp4.four_over_six_amax(tensor, outer))
    packed = nvfp4.pack(tensor, found.amax, outer, 256.0)
    assert torch.equal(found.packed.codes, packed.codes)
    assert torch.equal(nvfp4.decode(found.packed), nvfp4.decode(packed))
    four = found.amax > nvfp4.block_amax(tensor)
    assert 0.02 < four.float().mean() < 0.9


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_four_over_six_errs_no_more_than_either_choice(name: str) -> None:
    """Brute force in FP64; where the two errors are equal to FP32, either may be taken."""
    tensor = blocks(name, 40_000, seed=2)
    outer = tensor.abs().amax().float()
    amax = nvfp4.block_amax(tensor)

    def error(amax: Tensor) -> Tensor:
        decoded = nvfp4.decode(nvfp4.pack(tensor, amax, outer, 256.0)).double()
        return (decoded - tensor.double()).square().view(-1, 16).sum(-1)

    lower = torch.minimum(error(amax), error(amax * 1.5))
    assert (error(nvfp4.four_over_six_amax(tensor, outer)) <= lower * (1 + 2.0**-20)).all()


@pytest.mark.skipif(not nvfp4_fast.can_compile(), reason="no C++ compiler")
def test_compiled_four_over_six_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_fast, "CPU_CHUNK_BLOCKS", 4096)
    for name in DISTRIBUTIONS:
        tensor = blocks(name, 3 * 4096 + 400, seed=3)
        plain = nvfp4_fast.four_over_six(tensor, packed=True)
        compiled = nvfp4_fast.four_over_six(tensor, packed=True, compiled=True)
        assert plain.packed is not None and compiled.packed is not None
        assert torch.equal(bits(plain.amax), bits(compiled.amax))
        assert torch.equal(plain.packed.codes, compiled.packed.codes)


def test_a_missing_compiler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not nvfp4_fast.can_compile()


def test_order_of_a_sum_of_errors_is_the_one_stated() -> None:
    """A choice depends on it in the last bit; torch's own sum has another order for few blocks, and on a GPU."""
    values_NK = torch.randn(5000, 16, generator=torch.Generator().manual_seed(4))
    scales_N = nvfp4_oracle.scale_bytes(nvfp4_oracle.block_amax(values_NK), values_NK.abs().amax(), 256.0)
    step_N = nvfp4_oracle.steps(scales_N, values_NK.abs().amax(), 256.0)
    magnitude_Kn = nvfp4_fast.rows(values_NK).abs()
    got = nvfp4_fast.row_errors(magnitude_Kn, nvfp4_fast.round_rows(magnitude_Kn, step_N), step_N)
    assert torch.equal(bits(got), bits(nvfp4_oracle.errors(values_NK, scales_N, values_NK.abs().amax(), 256.0)))


@pytest.mark.parametrize("shape", [(16, 16), (1, 16), (4, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_with_positive_finite_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """E13."""
    zeros = torch.zeros(shape, dtype=dtype)
    outer = torch.tensor(0.0)
    for amax in (
        nvfp4.block_amax(zeros),
        nvfp4.four_over_six_amax(zeros, outer),
        nvfp4_search.sweep_amax(zeros, outer),
    ):
        packed = nvfp4.pack(zeros, amax, outer)
        assert (scale_bytes(packed.block_scale) == 1).all()
        assert packed.global_scale > 0 and packed.global_scale.isfinite()
        assert (packed.codes == 0).all() and (nvfp4.decode(packed) == 0).all()


@pytest.mark.parametrize("scale_max", [448.0, 256.0])
def test_zero_block_among_small_ones_has_no_nan_byte(scale_max: float) -> None:
    """E11."""
    weight = torch.full((8, 64), 1e-4)
    weight[3, 16:32] = 0
    outer = weight.amax()
    for amax in (nvfp4.block_amax(weight), nvfp4_search.sweep_amax(weight, outer, scale_max)):
        packed = nvfp4.pack(weight, amax, outer, scale_max)
        assert ((scale_bytes(packed.block_scale) >= 1) & (scale_bytes(packed.block_scale) < 0x7F)).all()
        assert (nvfp4.decode(packed)[3, 16:32] == 0).all()
        assert torch.allclose(nvfp4.decode(packed)[0], weight[0])


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1e-45, 3e-42, 1e-39], id="subnormal"),
        pytest.param([1.0, 1e-7, 1e-9], id="underflowing blocks"),
        pytest.param([3e38, 1.0, 1e30], id="one huge value"),
        pytest.param([3.4e38, 3e38, 1e38], id="edge of FP32"),
    ],
)
def test_extreme_blocks_equal_the_oracle(values: list[float]) -> None:
    pattern = torch.randn(3, 16, generator=torch.Generator().manual_seed(5)).clamp(-1, 1)
    pattern[:, 4] = 1.0
    values_NK = pattern * torch.tensor(values)[:, None]
    outer = values_NK.abs().amax()
    for scale_max in (448.0, 256.0):
        scales_N = nvfp4_oracle.scale_bytes(nvfp4_oracle.block_amax(values_NK), outer, scale_max)
        step_N = nvfp4_oracle.steps(scales_N, outer, scale_max)
        packed = nvfp4.pack(values_NK, nvfp4.block_amax(values_NK), outer, scale_max)
        assert torch.equal(scale_bytes(packed.block_scale), scales_N)
        assert torch.equal(nvfp4_oracle.unpack(packed.codes), nvfp4_oracle.encode(values_NK, step_N))
        decoded = nvfp4.decode(packed)
        assert decoded.isfinite().all()
        if outer > 1e-30:  # below, the tensor scale is at its floor and all rounds to zero
            assert decoded[0, 4] == pytest.approx(values_NK[0, 4].item(), rel=1e-6)
    four = nvfp4_fast.four_over_six(values_NK, outer, packed=True)
    assert four.packed is not None and four.amax.isfinite().all()
    assert torch.equal(scale_bytes(four.packed.block_scale), nvfp4_oracle.four_over_six(values_NK, outer))


def test_amax_enlarged_beyond_fp32_stays_finite() -> None:
    """1.5 * 1408 * 2^117 does not exist; the largest number that does still gives the first block its best scale."""
    first, second = [1408.0, 704.0, *([-352.0] * 14)], [1536.0] * 16
    tensor = torch.tensor([first, second]) * 2.0**117
    amax = nvfp4.four_over_six_amax(tensor, tensor.amax())
    assert amax.flatten().tolist() == [nvfp4_fast.FP32_MAX, tensor.amax()]
    assert torch.equal(nvfp4.fake_quantize(tensor, amax, tensor.amax(), 256.0), tensor)
    assert nvfp4_oracle.four_over_six(tensor, tensor.amax()).tolist() == [
        scale_bytes(nvfp4.block_scale(amax, tensor.amax(), 256.0))[0].item(),
        120,
    ]


@pytest.mark.parametrize("width", [1, 15, 17, 60, 232])
def test_widths_that_blocks_do_not_divide_are_named(width: int) -> None:
    """E8, E13 and G6: 232 is 1,856 over 8 tensor-parallel ranks."""
    tensor, outer = torch.ones(4, width), torch.tensor(1.0)
    message = rf"multiples of 16, not {width} \(shape \[4, {width}\]\)"
    amax = torch.ones(4, max(1, width // 16))
    calls = (
        lambda: nvfp4.block_amax(tensor),
        lambda: nvfp4.pack(tensor, amax, outer),
        lambda: nvfp4.fake_quantize(tensor, amax, outer),
        lambda: nvfp4_fast.four_over_six(tensor),
        lambda: nvfp4.four_over_six_amax(tensor, outer),
        lambda: nvfp4_search.sweep_amax(tensor, outer),
        lambda: nvfp4_search.bounded_sweep_amax(tensor, outer),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert nvfp4.fake_quantize_dynamic(torch.ones(4, 1856)).shape == (4, 1856)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_counted_and_located(dtype: torch.dtype) -> None:
    tensor = torch.ones(4, 64, dtype=dtype)
    tensor[1, 5], tensor[3, 63] = NAN, -INF
    amax, outer = torch.ones(4, 4), torch.tensor(1.0)
    message = r"2 of the 256 elements of a tensor of shape \[4, 64\] .* \[1, 5\], \[3, 63\]$"
    calls = (
        lambda: nvfp4.pack(tensor, amax, outer),
        lambda: nvfp4_fast.four_over_six(tensor),
        lambda: nvfp4.four_over_six_amax(tensor, outer),
        lambda: nvfp4_search.sweep_amax(tensor, outer),
        lambda: nvfp4_search.bounded_sweep_amax(tensor, outer),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    tensor[:] = NAN
    with pytest.raises(ValueError, match=r"256 of the 256 .* \[0, 0\], \[0, 1\], \[0, 2\] \.\.\.$"):
        nvfp4_fast.four_over_six(tensor)


def test_default_dtype_of_torch_changes_nothing() -> None:
    """Model loaders set it to BF16 for a while."""
    tensor = blocks("bf16", 400)
    outer = tensor.abs().amax().float()
    searches = (nvfp4.four_over_six_amax, nvfp4_search.sweep_amax, nvfp4_search.bounded_sweep_amax)
    before = [search(tensor, outer) for search in searches]
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = [search(tensor, outer) for search in searches]
        scale = nvfp4.block_scale(before[0], outer, 256.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(before, after, strict=True))
    assert torch.equal(scale_bytes(scale), scale_bytes(nvfp4.block_scale(before[0], outer, 256.0)))


def test_scales_that_are_no_numbers_are_named() -> None:
    tensor, amax, outer = torch.ones(1, 16), torch.ones(1, 1), torch.tensor(1.0)
    with pytest.raises(ValueError, match="of a block amax"):
        nvfp4.pack(tensor, amax * NAN, outer)
    for call in (nvfp4_fast.four_over_six, nvfp4_search.sweep_amax, lambda t, g: nvfp4.pack(t, amax, g)):
        with pytest.raises(ValueError, match="of a global amax"):
            call(tensor, outer * INF)


def test_adversarial_blocks_do_hold_ties() -> None:
    """The data above would prove little if no quotient met a tie."""
    values_NK = adversarial(4000, torch.Generator().manual_seed(6)).view(-1, 16)
    outer = values_NK.abs().amax()
    scales_N = nvfp4_oracle.four_over_six(values_NK, outer)
    quotient = (values_NK / nvfp4_oracle.steps(scales_N, outer, 256.0)[:, None]).abs()
    ties = (nvfp4_oracle.E2M1[1:] + nvfp4_oracle.E2M1[:-1]) / 2
    assert torch.isin(quotient, ties).float().mean() > 0.02
