"""Properties of NVFP4 over generated blocks: idempotence, symmetry, powers of two, order of the errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_qad.quantization import nvfp4, nvfp4_fast, nvfp4_search

# Derandomised: a run says the same on any day, and needs no database.
examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)

Search = Callable[[Tensor, Tensor], Tensor]
SEARCHES: dict[str, tuple[Search, float]] = {
    "max_448": (lambda tensor, outer: nvfp4.block_amax(tensor), 448.0),
    "max_256": (lambda tensor, outer: nvfp4.block_amax(tensor), 256.0),
    "four_over_six": (nvfp4.four_over_six_amax, 256.0),
    "bounded_448": (partial(nvfp4_search.bounded_sweep_amax, scale_max=448.0), 448.0),
    "bounded_256": (nvfp4_search.bounded_sweep_amax, 256.0),
    "sweep_448": (nvfp4_search.sweep_amax, 448.0),
    "sweep_256": (partial(nvfp4_search.sweep_amax, scale_max=256.0), 256.0),
}
every_search = pytest.mark.parametrize("name", SEARCHES)

# Magnitudes for which squares of errors, 2^-24 of an element and all, stay normal FP32 numbers under 2^20.
ordinary = st.one_of(
    st.just(0.0),
    st.floats(2.0**-10, 2.0**10, width=32),
    st.floats(-(2.0**10), -(2.0**-10), width=32),
    st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.5, -4.0, 448.0]),
)
anything = st.floats(allow_nan=False, allow_infinity=False, width=32)


def tensors(elements: st.SearchStrategy[float], num_blocks: int = 3) -> st.SearchStrategy[Tensor]:
    """FP32 [num_blocks, 16], sometimes one value throughout a block."""
    block = st.one_of(st.lists(elements, min_size=16, max_size=16), elements.map(lambda value: [value] * 16))
    return st.lists(block, min_size=num_blocks, max_size=num_blocks).map(torch.tensor)


def quantised(tensor: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Values, block amax and global amax."""
    search, scale_max = SEARCHES[name]
    outer = tensor.abs().amax()
    amax = search(tensor, outer)
    return nvfp4.fake_quantize(tensor, amax, outer, scale_max), amax, outer


@every_search
@examples
@given(tensor=tensors(anything))
def test_packed_bytes_decode_to_the_values_of_training(name: str, tensor: Tensor) -> None:
    values, amax, outer = quantised(tensor, name)
    packed = nvfp4.pack(tensor, amax, outer, SEARCHES[name][1])
    assert torch.equal(nvfp4.decode(packed).view(torch.int32), values.view(torch.int32))
    scales = packed.block_scale.view(torch.uint8)
    assert (scales >= 1).all() and (scales <= 126).all() and packed.global_scale > 0


@every_search
@examples
@given(tensor=tensors(anything))
def test_values_stay_as_they_are_when_quantised_again_with_frozen_scales(name: str, tensor: Tensor) -> None:
    values, amax, outer = quantised(tensor, name)
    assert torch.equal(nvfp4.fake_quantize(values, amax, outer, SEARCHES[name][1]), values)


@pytest.mark.parametrize("name", ["sweep_448", "sweep_256"])
@examples
@given(tensor=tensors(ordinary))
def test_a_new_sweep_of_quantised_values_finds_them_exact(name: str, tensor: Tensor) -> None:
    """Under the same global amax. It need not hold of the other searches, which may lack the old scale."""
    values, _, outer = quantised(tensor, name)
    search, scale_max = SEARCHES[name]
    assert torch.equal(nvfp4.fake_quantize(values, search(values, outer), outer, scale_max), values)


@every_search
@examples
@given(tensor=tensors(anything))
def test_sign_symmetry(name: str, tensor: Tensor) -> None:
    values, amax, _ = quantised(tensor, name)
    negated, amax_of_negated, _ = quantised(-tensor, name)
    assert torch.equal(amax, amax_of_negated) and torch.equal(negated, -values)


@every_search
@examples
@given(tensor=tensors(ordinary), exponent=st.integers(-20, 20))
def test_equivariance_under_powers_of_two(name: str, tensor: Tensor, exponent: int) -> None:
    factor = 2.0**exponent
    values, amax, outer = quantised(tensor, name)
    scaled, scaled_amax, scaled_outer = quantised(tensor * factor, name)
    assert torch.equal(scaled, values * factor)
    if outer > 0:  # of zeros the amax of a sweep comes from the floor of the global amax
        assert torch.equal(scaled_amax, amax * factor)
        scale_max = SEARCHES[name][1]
        one, other = nvfp4.pack(tensor, amax, outer, scale_max), nvfp4.pack(tensor * factor, scaled_amax, scaled_outer,
                                                                           scale_max)  # fmt: skip
        assert torch.equal(one.codes, other.codes) and torch.equal(one.global_scale * factor, other.global_scale)
        assert torch.equal(one.block_scale.view(torch.uint8), other.block_scale.view(torch.uint8))


@examples
@given(tensor=tensors(anything))
def test_order_of_the_errors_of_every_block(tensor: Tensor) -> None:
    """More candidates on one grid never err more. Between grids nothing holds: test_nvfp4_search.py shows it."""
    outer = tensor.abs().amax()

    def errors(name: str) -> Tensor:
        search, scale_max = SEARCHES[name]
        return nvfp4_search.block_errors(tensor, search(tensor, outer), outer, scale_max)

    assert (errors("sweep_448") <= errors("bounded_448")).all()
    assert (errors("bounded_448") <= errors("max_448")).all()
    assert (errors("sweep_256") <= errors("bounded_256")).all()
    assert (errors("bounded_256") <= errors("four_over_six")).all()
    assert (errors("four_over_six") <= errors("max_256")).all()


@examples
@given(tensor=tensors(anything), permutation=st.permutations(range(3)))
def test_blocks_do_not_see_one_another(tensor: Tensor, permutation: list[int]) -> None:
    """Apart from the global amax."""
    outer = tensor.abs().amax()
    moved = nvfp4_fast.four_over_six(tensor[permutation], outer).amax
    assert torch.equal(moved, nvfp4_fast.four_over_six(tensor, outer).amax[permutation])
