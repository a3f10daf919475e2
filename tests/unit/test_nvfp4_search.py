"""Searches for block scales: what holds of every block, what only measurements say, and weighted errors."""

from __future__ import annotations

import pytest
import torch
from nvfp4_cases import DISTRIBUTIONS, blocks
from torch import Tensor

from nemo_qad.quantization import nvfp4, nvfp4_fast, nvfp4_oracle, nvfp4_search


def errors(tensor: Tensor, amax: Tensor, scale_max: float, weights: Tensor | None = None) -> Tensor:
    return nvfp4_search.block_errors(tensor, amax, tensor.abs().amax().float(), scale_max, weights).flatten()


def mean_error(tensor: Tensor, amax: Tensor, scale_max: float) -> float:
    """From what a decoder reads, in FP64."""
    decoded = nvfp4.decode(nvfp4.pack(tensor, amax, tensor.abs().amax().float(), scale_max)).double()
    return (decoded - tensor.double()).square().mean().item()


@pytest.mark.parametrize("scale_max", [448.0, 256.0])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sweep_equals_the_oracle(name: str, scale_max: float) -> None:
    tensor = blocks(name, 800)
    outer = tensor.abs().amax().float()
    amax = nvfp4_search.sweep_amax(tensor, outer, scale_max)
    got = nvfp4.block_scale(amax, outer, scale_max).view(torch.uint8).flatten().long()
    assert torch.equal(got, nvfp4_oracle.sweep(tensor.float().view(-1, 16), outer, scale_max))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_order_of_the_searches_in_every_block(name: str) -> None:
    tensor = blocks(name, 4000, seed=1)
    outer = tensor.abs().amax().float()
    largest = nvfp4.block_amax(tensor)
    for scale_max in (448.0, 256.0):
        sweep = errors(tensor, nvfp4_search.sweep_amax(tensor, outer, scale_max), scale_max)
        bounded = errors(tensor, nvfp4_search.bounded_sweep_amax(tensor, outer, scale_max), scale_max)
        plain = errors(tensor, largest, scale_max)
        assert (sweep <= bounded).all() and (bounded <= plain).all() and (sweep < plain).any()
        if scale_max == 256.0:
            four = errors(tensor, nvfp4_search.four_over_six_amax(tensor, outer), scale_max)
            assert (bounded <= four).all() and (four <= plain).all()


def test_nothing_holds_between_the_grids_of_448_and_256() -> None:
    tensor = blocks("uniform", 4000, seed=2)
    outer = tensor.abs().amax()
    sweep_448 = errors(tensor, nvfp4_search.sweep_amax(tensor, outer, 448.0), 448.0)
    sweep_256 = errors(tensor, nvfp4_search.sweep_amax(tensor, outer, 256.0), 256.0)
    four = errors(tensor, nvfp4.four_over_six_amax(tensor, outer), 256.0)
    largest = errors(tensor, nvfp4.block_amax(tensor), 448.0)
    for one, other in ((sweep_448, sweep_256), (sweep_448, four), (four, largest)):
        assert (one < other).any() and (one > other).any()
    assert four.sum() < sweep_448.sum()  # on 448 a uniform tensor leaves no room for larger scales


@pytest.mark.parametrize("name", ["normal", "bf16", "uniform", "student_t"])
def test_bounded_sweep_is_within_half_a_percent_with_twelve_candidates(name: str) -> None:
    assert len(nvfp4_search.OFFSETS) <= 12
    tensor = blocks(name, 4000, seed=3)
    outer = tensor.abs().amax().float()
    for scale_max in (448.0, 256.0):
        bounded = mean_error(tensor, nvfp4_search.bounded_sweep_amax(tensor, outer, scale_max), scale_max)
        sweep = mean_error(tensor, nvfp4_search.sweep_amax(tensor, outer, scale_max), scale_max)
        assert bounded <= 1.005 * sweep


@pytest.mark.parametrize("name", ["normal", "bf16", "uniform", "student_t"])
def test_sweep_on_256_beats_four_over_six_and_max(name: str) -> None:
    tensor = blocks(name, 4000, seed=4)
    outer = tensor.abs().amax().float()
    sweep = mean_error(tensor, nvfp4_search.bounded_sweep_amax(tensor, outer), 256.0)
    four = mean_error(tensor, nvfp4.four_over_six_amax(tensor, outer), 256.0)
    largest = mean_error(tensor, nvfp4.block_amax(tensor), 448.0)
    assert sweep < 0.93 * four and four < 0.95 * largest


def test_amax_of_a_scale_gives_that_scale_back_at_any_global_amax() -> None:
    every = torch.arange(1, 127, dtype=torch.uint8)
    for outer in torch.logspace(-44, 37, 400, dtype=torch.float64).float():
        for scale_max in (448.0, 256.0):
            amax = nvfp4_search._amax_of(every, outer, scale_max)
            assert torch.equal(nvfp4.block_scale(amax, outer, scale_max).view(torch.uint8), every)


def hessian(num_blocks: int, seed: int = 0) -> Tensor:
    """X^T X of inputs whose channels differ in size and go together."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_blocks, 64, 16, generator=generator) @ torch.randn(num_blocks, 16, 16, generator=generator)
    return inputs.transpose(1, 2) @ inputs


def test_weighted_error_is_the_error_of_the_output() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, inputs = torch.randn(12, 64, generator=generator), torch.randn(40, 64, generator=generator)
    per_block = inputs.view(40, 4, 16).permute(1, 0, 2)  # [B, tokens, K]
    outer = weight.abs().amax()
    amax = nvfp4.four_over_six_amax(weight, outer)
    got = nvfp4_search.block_errors(weight, amax, outer, 256.0, per_block.transpose(1, 2) @ per_block)
    error = (nvfp4.fake_quantize(weight, amax, outer, 256.0) - weight).view(12, 4, 16)
    output = torch.einsum("btk,obk->obt", per_block.double(), error.double()).square().sum(-1)
    assert torch.allclose(got.double(), output, rtol=1e-4)


def test_identity_weights_choose_as_no_weights_do() -> None:
    tensor = blocks("normal", 2000, seed=6)
    outer, identity = tensor.abs().amax(), torch.eye(16).expand(4, 16, 16)
    for search in (nvfp4_search.sweep_amax, nvfp4_search.bounded_sweep_amax):
        plain, weighted = search(tensor, outer, 256.0), search(tensor, outer, 256.0, identity)
        assert (plain == weighted).float().mean() > 0.999  # sums in another order may part two equal errors
    four = nvfp4_search.four_over_six_amax(tensor, outer, identity)
    assert (four == nvfp4.four_over_six_amax(tensor, outer)).float().mean() > 0.999


def test_weighted_searches_lower_the_weighted_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_fast, "CPU_CHUNK_BLOCKS", 1001)  # cut to 250 whole rows of 4 blocks
    tensor, weights = blocks("normal", 2004, seed=7), hessian(4)
    outer = tensor.abs().amax()
    plain = errors(tensor, nvfp4_search.bounded_sweep_amax(tensor, outer), 256.0, weights)
    bounded = errors(tensor, nvfp4_search.bounded_sweep_amax(tensor, outer, 256.0, weights), 256.0, weights)
    sweep = errors(tensor, nvfp4_search.sweep_amax(tensor, outer, 256.0, weights), 256.0, weights)
    four = errors(tensor, nvfp4_search.four_over_six_amax(tensor, outer, weights), 256.0, weights)
    assert (sweep <= bounded).all() and (bounded <= plain).all() and (bounded <= four).all()
    assert bounded.sum() < 0.8 * plain.sum()


def test_weights_that_do_not_fit_are_refused() -> None:
    tensor, outer = torch.ones(2, 64), torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"shape \[3, 16, 16\] do not fit .* \[4, 16, 16\] is needed"):
        nvfp4_search.sweep_amax(tensor, outer, 448.0, torch.ones(3, 16, 16))
    spoiled = hessian(4)
    spoiled[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"1 of the 1024 elements of error weights .* \[2, 3, 4\]"):
        nvfp4_search.bounded_sweep_amax(tensor, outer, 448.0, spoiled)


def test_leading_dimensions_and_dtypes_are_kept_apart_from_the_result() -> None:
    tensor = blocks("bf16", 800, seed=8).view(5, 40, 64)
    outer = tensor.abs().amax().float()
    flat = nvfp4_search.bounded_sweep_amax(tensor.view(-1, 64), outer)
    assert torch.equal(nvfp4_search.bounded_sweep_amax(tensor, outer), flat.view(5, 40, 4))
    assert torch.equal(nvfp4_search.bounded_sweep_amax(tensor.float(), outer), flat.view(5, 40, 4))
    weighted = nvfp4_search.bounded_sweep_amax(tensor, outer, 256.0, hessian(4))
    assert weighted.shape == (5, 40, 4) and weighted.dtype == torch.float32
