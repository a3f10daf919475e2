"""Block scales of NVFP4 by search: which E4M3 scale makes a block's error smallest.

A search returns block amax, FP32 [..., I/16], so that `nvfp4.block_scale` of it, with the same global amax and
scale_max, is the scale found: the rest of the package, the checkpoint and any plain decoder know nothing of searches.

    max             the block's largest element becomes 6
    four-over-six   6 or 4 (scale_max 256)
    bounded sweep   NUM_CANDIDATES scales around that of max, in E4M3 numbers
    sweep           all 126 positive E4M3 scales

The error of a block is the sum of its squared errors e, or, with error weights H, e^T H e. With H = X^T X, X the
inputs that the 16 columns of the block meet in calibration, that is what the block adds to the squared error of the
layer's output when the other blocks are exact.

What holds of every single block, as candidates are subsets of one another: sweep <= bounded <= max on any one grid,
and sweep <= bounded <= four-over-six <= max on the grid of 256. Nothing holds between the grids of 448 and 256: their
scales are different numbers. A sum over blocks follows, block by block.

Candidates are tried in ascending order and equal errors keep the smallest scale.
Shapes: B = I / 16 blocks a row, n blocks of a chunk, K = 16. Imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nemo_qad.quantization.nvfp4 import (
    BLOCK_SIZE,
    E4M3_MAX,
    FOUR_OVER_SIX_SCALE_MAX,
    MIN_GLOBAL_AMAX,
    block_scale,
    blocks,
    check_finite,
    global_scale,
)
from nemo_qad.quantization.nvfp4_fast import FP32_MAX, chunk_blocks, four_over_six, round_rows, row_errors, rows

NUM_SCALES = 126  # positive E4M3 numbers are the bytes 1..126
OFFSETS = range(-3, 9)

_Candidates = Callable[[Tensor], Iterator[Tensor]]  # amax [n] -> amax [n] of each candidate


def sweep_amax(
    tensor: Tensor, global_amax: Tensor, scale_max: float = E4M3_MAX, error_weights: Tensor | None = None
) -> Tensor:
    """Block amax of the best of all 126 scales: FP32 [..., I/16].

    Args:
        tensor: [..., I], any floating type.
        global_amax: FP32 scalar.
        scale_max: 448, or 256, which leaves the largest blocks room for a larger scale.
        error_weights: [B, K, K] of the I / 16 blocks of a row, the same for every row; None weighs all alike.

    Raises:
        ValueError: NaN or infinity, a last dimension that blocks do not divide, or weights that do not fit.
    """

    def candidates(amax_n: Tensor) -> Iterator[Tensor]:
        for byte in range(1, NUM_SCALES + 1):
            yield _amax_of(torch.full_like(amax_n, byte, dtype=torch.uint8), global_amax, scale_max)

    return _lowest(tensor, global_amax, scale_max, candidates, error_weights)


def bounded_sweep_amax(
    tensor: Tensor,
    global_amax: Tensor,
    scale_max: float = FOUR_OVER_SIX_SCALE_MAX,
    error_weights: Tensor | None = None,
) -> Tensor:
    """As `sweep_amax`, of the 12 scales from 3 E4M3 numbers below that of max to 8 above (twice as large)."""

    def candidates(amax_n: Tensor) -> Iterator[Tensor]:
        byte = block_scale(amax_n, global_amax, scale_max).view(torch.uint8).short()
        for offset in OFFSETS:
            yield _amax_of((byte + offset).clamp_(1, NUM_SCALES).to(torch.uint8), global_amax, scale_max)

    return _lowest(tensor, global_amax, scale_max, candidates, error_weights)


def four_over_six_amax(tensor: Tensor, global_amax: Tensor, error_weights: Tensor | None = None) -> Tensor:
    """As `nvfp4.four_over_six_amax`, and by weighted error where there are weights; for scale_max 256."""
    if error_weights is None:
        return four_over_six(tensor, global_amax).amax

    def candidates(amax_n: Tensor) -> Iterator[Tensor]:
        yield amax_n
        yield (amax_n * 1.5).clamp_(max=FP32_MAX)

    return _lowest(tensor, global_amax, FOUR_OVER_SIX_SCALE_MAX, candidates, error_weights)


def block_errors(
    tensor: Tensor, amax: Tensor, global_amax: Tensor, scale_max: float, error_weights: Tensor | None = None
) -> Tensor:
    """Error of each block under given block amax, FP32 in its shape: what the searches make smallest."""
    errors = torch.empty(amax.numel(), dtype=torch.float32, device=tensor.device)
    for chunk, rows_Kn in _chunks(tensor, error_weights):
        step = _step(amax.reshape(-1)[chunk], global_amax, scale_max)
        errors[chunk] = _errors(rows_Kn, rows_Kn.abs(), step, error_weights)
    return errors.view(amax.shape)


def _lowest(
    tensor: Tensor, global_amax: Tensor, scale_max: float, candidates: _Candidates, error_weights: Tensor | None
) -> Tensor:
    """Amax of the candidate with the lowest error, the first of equal ones: FP32 [..., I/16]."""
    check_finite(global_amax, "a global amax")
    check_finite(tensor)
    _check_weights(tensor, error_weights)
    found = torch.empty(tensor.numel() // BLOCK_SIZE, dtype=torch.float32, device=tensor.device)
    for chunk, rows_Kn in _chunks(tensor, error_weights):
        magnitude_Kn = rows_Kn.abs()
        amaxes = candidates(magnitude_Kn.amax(0))
        best = next(amaxes)
        lowest = _errors(rows_Kn, magnitude_Kn, _step(best, global_amax, scale_max), error_weights)
        for amax in amaxes:
            error = _errors(rows_Kn, magnitude_Kn, _step(amax, global_amax, scale_max), error_weights)
            best = torch.where(error < lowest, amax, best)
            lowest = torch.minimum(error, lowest)
        found[chunk] = best
    return found.view(*tensor.shape[:-1], tensor.shape[-1] // BLOCK_SIZE)


def _chunks(tensor: Tensor, error_weights: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Parts of the tensor as rows [K, n]; with weights, of whole rows of the tensor, so that n = rows * B."""
    blocks_NK = blocks(tensor.detach())
    size = chunk_blocks(tensor)
    if error_weights is not None:
        num_blocks = tensor.shape[-1] // BLOCK_SIZE
        size = max(1, size // num_blocks) * num_blocks
    for start in range(0, len(blocks_NK), size):
        chunk = slice(start, start + size)
        yield chunk, rows(blocks_NK[chunk])


def _step(amax: Tensor, global_amax: Tensor, scale_max: float) -> Tensor:
    return block_scale(amax, global_amax, scale_max).float() * global_scale(global_amax, scale_max)


def _amax_of(byte: Tensor, global_amax: Tensor, scale_max: float) -> Tensor:
    """Block amax that `nvfp4.block_scale` turns into these E4M3 bytes: 3 roundings of FP32 never leave E4M3's."""
    outer = global_amax.float().clamp(min=MIN_GLOBAL_AMAX)
    return (byte.view(torch.float8_e4m3fn).float() * (outer / scale_max)).clamp_(max=FP32_MAX)


def _errors(rows_Kn: Tensor, magnitude_Kn: Tensor, step_n: Tensor, error_weights: Tensor | None) -> Tensor:
    value_Kn = round_rows(magnitude_Kn, step_n)
    if error_weights is None:
        return row_errors(magnitude_Kn, value_Kn, step_n)
    error_Kn = (value_Kn * step_n).sub_(magnitude_Kn).mul_(rows_Kn.sign())
    num_blocks = len(error_weights)
    error_BrK = error_Kn.view(BLOCK_SIZE, -1, num_blocks).permute(2, 1, 0).contiguous()
    weighted = torch.bmm(error_BrK, error_weights.to(error_BrK)).mul_(error_BrK).sum(-1)
    return weighted.T.reshape(-1)


def _check_weights(tensor: Tensor, error_weights: Tensor | None) -> None:
    if error_weights is None:
        return
    expected = (tensor.shape[-1] // BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
    if error_weights.shape != expected:
        raise ValueError(
            f"Error weights of shape {list(error_weights.shape)} do not fit a tensor of shape {list(tensor.shape)}: "
            f"{list(expected)} is needed, a matrix of {BLOCK_SIZE} x {BLOCK_SIZE} for each block of a row"
        )
    check_finite(error_weights, "error weights")
