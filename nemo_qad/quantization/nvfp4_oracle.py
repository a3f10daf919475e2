"""NVFP4 as its definition reads, slowly: what nvfp4.py, nvfp4_fast.py and nvfp4_search.py must equal bit for bit.

Nothing here is clever and nothing here is shared with them: numbers are rounded by comparison with the midpoints
between the values of a table, sums are written out, and all of it holds several copies of the tensor.

    value = e2m1 * (block_scale * global_scale)             every product and quotient rounded to FP32
    global_scale = max(global_amax, 2^-100) / (6 * scale_max)
    block_scale  = e4m3(min(max(block_amax * scale_max / max(global_amax, 2^-100), 2^-9), 448))

Shapes: N blocks of K = 16 elements. All tensors are FP32 unless said otherwise. Imports torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # index = code without its sign bit
# Index = byte of a positive E4M3 number: exponent in bits 3..6 (bias 7), fraction in bits 0..2; 127 would be NaN.
E4M3 = torch.tensor(
    [byte / 8 * 2.0**-6 if byte < 8 else (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 7) for byte in range(127)]
)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """int64 index of the entry of an ascending `table` that is nearest to each value; of two, the even index."""
    index = torch.zeros(values.shape, dtype=torch.int64)
    for lower in range(len(table) - 1):
        midpoint = (table[lower] + table[lower + 1]) / 2  # exact in FP32 for both tables
        passed = values > midpoint if lower % 2 == 0 else values >= midpoint
        index += passed
    return index


def block_amax(values_NK: Tensor) -> Tensor:
    return values_NK.abs().max(dim=1).values


def scale_bytes(amax_N: Tensor, global_amax: Tensor, scale_max: float) -> Tensor:
    """int64 E4M3 byte of each block's scale, 1..126."""
    shrink = 2.0**-20 if global_amax > 2.0**100 else 1.0  # exact; keeps amax * scale_max from overflowing
    scale = amax_N * shrink * scale_max / (global_amax.clamp(min=2.0**-100) * shrink)
    return nearest(scale.clamp(2.0**-9, 448.0), E4M3)


def steps(bytes_N: Tensor, global_amax: Tensor, scale_max: float) -> Tensor:
    """Value of a block's code for one: block scale times global scale."""
    return E4M3[bytes_N] * (global_amax.clamp(min=2.0**-100) / (6.0 * scale_max))


def encode(values_NK: Tensor, step_N: Tensor) -> Tensor:
    """int64 codes [N, K], 0..15: sign in bit 3. What rounds to zero is +0."""
    quotient = values_NK / step_N[:, None]
    magnitude = nearest(quotient.abs(), E2M1)
    return torch.where((quotient < 0) & (magnitude > 0), magnitude + 8, magnitude)


def decode(codes_NK: Tensor, step_N: Tensor) -> Tensor:
    magnitude = E2M1[codes_NK % 8]
    return torch.where(codes_NK >= 8, -magnitude, magnitude) * step_N[:, None]


def pack(codes_NK: Tensor) -> Tensor:
    """uint8 [N, K/2]: the even column in the low nibble."""
    return (codes_NK[:, 0::2] + 16 * codes_NK[:, 1::2]).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """int64 codes [N, K] of packed bytes [N, K/2]."""
    codes = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.int64)
    codes[:, 0::2] = packed.long() % 16
    codes[:, 1::2] = packed.long() // 16
    return codes


def errors(values_NK: Tensor, bytes_N: Tensor, global_amax: Tensor, scale_max: float) -> Tensor:
    """Squared error of each block [N] with the scales `bytes_N`.

    FP32 sums depend on their order, and a choice between two near errors with them. The order is part of the
    definition: elements k and k + 8 first, then these eight pairs from left to right.
    """
    step_N = steps(bytes_N, global_amax, scale_max)
    square = (decode(encode(values_NK, step_N), step_N) - values_NK) ** 2
    pair = [square[:, k] + square[:, k + 8] for k in range(8)]
    total = pair[0]
    for k in range(1, 8):
        total = total + pair[k]
    return total


def four_over_six(values_NK: Tensor, global_amax: Tensor) -> Tensor:
    """int64 scale bytes [N]: the largest element at 6, or at 4 where that errs less."""
    amax = block_amax(values_NK)
    at_6 = scale_bytes(amax, global_amax, 256.0)
    at_4 = scale_bytes((amax * 1.5).clamp(max=torch.finfo(torch.float32).max), global_amax, 256.0)
    lower = errors(values_NK, at_4, global_amax, 256.0) < errors(values_NK, at_6, global_amax, 256.0)
    return torch.where(lower, at_4, at_6)


def sweep(values_NK: Tensor, global_amax: Tensor, scale_max: float) -> Tensor:
    """int64 scale bytes [N]: of all 126, the one with the lowest error; of several, the smallest."""
    best = torch.ones(len(values_NK), dtype=torch.int64)
    best_error = errors(values_NK, best, global_amax, scale_max)
    for byte in range(2, 127):
        error = errors(values_NK, torch.full_like(best, byte), global_amax, scale_max)
        best = torch.where(error < best_error, byte, best)
        best_error = torch.minimum(error, best_error)
    return best
