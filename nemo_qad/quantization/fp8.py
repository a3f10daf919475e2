"""FP8 (E4M3, one FP32 scale a tensor) numerics in plain torch.

    value = e4m3(clamp(x / scale, -448, 448)) * scale        scale = max(amax, 2^-100) / 448

`fake_quantize` is encode followed by decode, so what a layer computes with is what its bytes say.
Imports torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
MIN_AMAX = 2.0**-100  # keeps the scale of an all-zero tensor positive and normal


def scale_of(amax: Tensor) -> Tensor:
    """FP32 scalar scale of a tensor whose largest magnitude is `amax` (`weight_scale`, `input_scale`)."""
    return amax.float().clamp(min=MIN_AMAX).div(E4M3_MAX).reshape(())


def encode(tensor: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn in the shape of `tensor`; what lies beyond 448 scales saturates and is never NaN."""
    return (tensor.detach().float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """FP32 values of E4M3 codes."""
    return codes.float().mul_(scale)


def fake_quantize(tensor: Tensor, amax: Tensor) -> Tensor:
    """Values that `tensor` has once stored in FP8: FP32 in its shape, `amax` an FP32 scalar."""
    scale = scale_of(amax)
    return decode(encode(tensor, scale), scale)
