"""Four-over-six of whole weights at the speed of memory, equal to nvfp4_oracle.py bit for bit.

A chunk of n blocks is turned into 16 rows of n elements that stay in a core's second-level cache: what a block
shares (its amax, two scales, two errors, the choice) is then a row as well, and every step is elementwise on long
rows. Signs are set aside first, as rounding and error do not depend on them.

What may be rearranged without changing a code, and what may not:
  - the largest of a block may be sought in any order, |x| taken first or last: no rounding happens;
  - codes follow from one division and one rounding an element, so x / step stays a division: a reciprocal or
    another order of the factors of `step` moves quotients across ties;
  - a sum of squares decides between two scales, so its order is fixed (k and k + 8 first, then the eight pairs from
    left to right), and a product and a sum are never fused into one rounding.
torch.compile keeps all of this on CPU as long as its compiler may not contract products and sums, which is its
default and is set here again; the tests compare its codes with the oracle's.

Where squares leave the range of FP32 (weights below 1e-19 or beyond 1e19) both errors are 0 or infinite: 6 stays.

Shapes: N blocks of the tensor, n of a chunk, K = 16. Imports torch alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nemo_qad.quantization.nvfp4 import (
    BLOCK_SIZE,
    CPU_CHUNK_BLOCKS,
    E2M1_MAX,
    FOUR_OVER_SIX_SCALE_MAX,
    GPU_CHUNK_BLOCKS,
    PackedTensor,
    block_scale,
    blocks,
    check_finite,
    global_scale,
    magnitude_index,
    rounder,
)

FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FourOverSix:
    """amax FP32 [..., I/16], the choice folded in; packed, where it was asked for."""

    amax: Tensor
    packed: PackedTensor | None


def four_over_six(
    tensor: Tensor, global_amax: Tensor | None = None, *, packed: bool = False, compiled: bool = False
) -> FourOverSix:
    """Chooses 4 or 6 for each block, by the lower sum of squared errors; equal errors keep 6.

    Args:
        tensor: [..., I], any floating type.
        global_amax: FP32 scalar; by default the largest magnitude of `tensor`.
        packed: return codes and scales too, those of `nvfp4.pack(tensor, amax, global_amax, 256)`.
        compiled: on CPU, use torch.compile, which needs a C++ compiler (`can_compile`) and some seconds once a
            process. The result is the same to the bit. On CUDA it has no effect: Triton's division is not exact.

    Raises:
        ValueError: NaN or infinity in the tensor, or a last dimension that blocks do not divide.
    """
    blocks_NK = blocks(tensor.detach())
    if global_amax is None:
        global_amax = torch.stack([edge.float().abs() for edge in blocks_NK.aminmax()]).amax()
    amax_N = torch.empty(len(blocks_NK), dtype=torch.float32, device=tensor.device)
    codes_NJ = torch.empty(len(blocks_NK) if packed else 0, BLOCK_SIZE // 2, dtype=torch.uint8, device=tensor.device)
    size = chunk_blocks(tensor)
    for start in range(0, len(blocks_NK), size):
        chunk = slice(start, start + size)
        rows_Kn = rows(blocks_NK[chunk])
        whole = rows_Kn.shape[1] == size  # the last chunk is not worth a compilation
        choose = _compiled() if compiled and whole and not tensor.is_cuda else _choose
        amax_N[chunk], codes_Jn = _choose_amax(rows_Kn, global_amax, choose, packed)
        if codes_Jn is not None:
            codes_NJ[chunk] = codes_Jn.T
    _check(tensor, amax_N, global_amax)
    amax = amax_N.view(*tensor.shape[:-1], tensor.shape[-1] // BLOCK_SIZE)
    if not packed:
        return FourOverSix(amax, None)
    scale = block_scale(amax, global_amax, FOUR_OVER_SIX_SCALE_MAX)
    outer = global_scale(global_amax, FOUR_OVER_SIX_SCALE_MAX).reshape(())
    codes = codes_NJ.view(*tensor.shape[:-1], tensor.shape[-1] // 2)
    return FourOverSix(amax, PackedTensor(codes, scale, outer))


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler for the CPU on this machine."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def chunk_blocks(tensor: Tensor) -> int:
    """Blocks that are worked on at a time."""
    return GPU_CHUNK_BLOCKS if tensor.is_cuda else CPU_CHUNK_BLOCKS


def rows(blocks_nK: Tensor) -> Tensor:
    """New contiguous FP32 [K, n] of blocks [n, K]."""
    rows_Kn = torch.empty(BLOCK_SIZE, len(blocks_nK), dtype=torch.float32, device=blocks_nK.device)
    return rows_Kn.copy_(blocks_nK.T)


def round_rows(magnitude_Kn: Tensor, step_n: Tensor) -> Tensor:
    """E2M1 values of magnitudes in units of their blocks' steps: new FP32 [K, n]."""
    q = (magnitude_Kn / step_n).clamp_(max=E2M1_MAX)
    if torch.compiler.is_compiling():  # two comparisons stay in registers; a view as integers goes through memory
        unit = 1.5 * 2.0**22
        constant = torch.where(q < 2, unit, torch.where(q < 4, 2 * unit, 4 * unit))
    else:
        constant = rounder(q)
    return q.add_(constant).sub_(constant)


def row_errors(magnitude_Kn: Tensor, value_Kn: Tensor, step_n: Tensor) -> Tensor:
    """Sum of squared errors of each block [n], in the order that the oracle fixes."""
    square_Kn = (value_Kn * step_n).sub_(magnitude_Kn).square_()
    half = BLOCK_SIZE // 2
    pairs = square_Kn[:half] + square_Kn[half:]
    total = pairs[0] + pairs[1]
    for pair in pairs[2:]:
        total = total + pair
    return total


def _choose_amax(
    rows_Kn: Tensor, global_amax: Tensor, choose: Callable[..., tuple[Tensor, Tensor | None]], packed: bool
) -> tuple[Tensor, Tensor | None]:
    """Block amax [n] with the choice folded in and, if `packed`, codes uint8 [K/2, n]."""
    at_6 = rows_Kn.abs().amax(0)
    at_4 = (at_6 * 1.5).clamp_(max=FP32_MAX)
    outer = global_scale(global_amax, FOUR_OVER_SIX_SCALE_MAX)
    step_6, step_4 = (block_scale(a, global_amax, FOUR_OVER_SIX_SCALE_MAX).float() * outer for a in (at_6, at_4))
    four, codes_Jn = choose(rows_Kn, step_6, step_4, packed)
    return torch.where(four, at_4, at_6), codes_Jn


def _choose(rows_Kn: Tensor, step_6: Tensor, step_4: Tensor, packed: bool) -> tuple[Tensor, Tensor | None]:
    """Whether 4 errs less [n] and, if `packed`, two codes a byte: uint8 [K/2, n]."""
    magnitude_Kn = rows_Kn.abs()
    steps = (step_6, step_4)
    values = [round_rows(magnitude_Kn, step) for step in steps]
    errors = [row_errors(magnitude_Kn, value, step) for value, step in zip(values, steps, strict=True)]
    four = errors[1] < errors[0]
    if not packed:
        return four, None
    value_Kn = torch.where(four, values[1], values[0])
    code_Kn = magnitude_index(value_Kn).add_((rows_Kn < 0) & (value_Kn > 0), alpha=8)
    return four, code_Kn[1::2].mul(16).add_(code_Kn[0::2]).to(torch.uint8)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    options: dict[str, Any] = {
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
    }
    return torch.compile(_choose, fullgraph=True, dynamic=False, options=options)


def _check(tensor: Tensor, amax: Tensor, global_amax: Tensor) -> None:
    """Refuses NaN and infinity. A block's amax shows them: the tensor itself is searched only to say where."""
    if not bool(torch.isfinite(amax).all()):
        check_finite(tensor)
    check_finite(global_amax, "a global amax")
