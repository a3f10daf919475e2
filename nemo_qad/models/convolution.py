"""Causal depthwise convolution of Mamba-2 over packed documents, in memory linear in the sequence.

Shapes: L sequence, B batch, D channels, W kernel width. A token meets the W - 1 tokens before it, of its document.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

SEGMENT = 4096  # tokens; of a longer sequence the backward pass makes what it needs anew, so many at a time


def causal_conv(x_LBD: Tensor, weight: Tensor, bias: Tensor, positions_LB: Tensor | None = None) -> Tensor:
    """silu(depthwise causal convolution) over the first dimension.

    Args:
        x_LBD: [L, B, D], any float dtype.
        weight: [D, W]; the last column meets the current token.
        bias: [D].
        positions_LB: [L, B] position of each token in its document; None: each column is one document.

    Returns:
        [L, B, D] in the dtype of `x_LBD`.
    """
    found: Tensor = _CausalConv.apply(x_LBD, weight, bias, positions_LB)
    return found


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution followed by SiLU, as shifted multiplies.

    The sequence is the first dimension, so each shift is a contiguous slice; oneDNN's depthwise
    convolution needs a transposed copy and is several times slower at kernel width 4.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, positions: Tensor | None) -> Tensor:
        if len(x) <= SEGMENT:
            y = _convolve(x, weight, bias, positions, slice(0, len(x)))
            ctx.save_for_backward(x, weight, bias, positions, y)  # type: ignore[arg-type]
            return F.silu(y)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for part in _segments(len(x)):
            torch.ops.aten.silu.out(_convolve(x, weight, bias, positions, part), out=out[part])
        ctx.save_for_backward(x, weight, bias, positions, None)  # type: ignore[arg-type]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, positions, kept = ctx.saved_tensors  # type: ignore[attr-defined]
        taps, d_bias = weight.t().contiguous(), torch.zeros_like(bias)
        d_taps, dx = torch.zeros_like(taps), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for part in _segments(len(x)):
            y = _convolve(x, weight, bias, positions, part) if kept is None else kept
            dy = torch.ops.aten.silu_backward(grads[0][part], y)
            d_bias += dy.flatten(0, -2).sum(0)
            torch.mul(dy, taps[-1], out=dx[part])
            for shift in range(min(len(taps), part.stop)):
                first = max(part.start, shift)
                before, dy_here = slice(first - shift, part.stop - shift), dy[first - part.start :]
                if shift and positions is not None:
                    dy_here = dy_here * _reaches(positions[first : part.stop], shift, dy.dtype)
                d_taps[-1 - shift] += (dy_here * x[before]).flatten(0, -2).sum(0)
                if shift:
                    dx[before].addcmul_(dy_here, taps[-1 - shift])
        return dx, d_taps.t(), d_bias, None


def _segments(length: int) -> list[slice]:
    return [slice(start, min(start + SEGMENT, length)) for start in range(0, length, SEGMENT)]


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, positions: Tensor | None, part: slice) -> Tensor:
    """Convolution at the tokens of `part`, before SiLU."""
    taps = weight.t().contiguous()
    y = x[part] * taps[-1] + bias
    for shift in range(1, min(len(taps), part.stop)):
        first = max(part.start, shift)
        before = x[first - shift : part.stop - shift]
        if positions is not None:
            before = before * _reaches(positions[first : part.stop], shift, x.dtype)
        y[first - part.start :].addcmul_(before, taps[-1 - shift])
    return y


def _reaches(positions_LB: Tensor, shift: int, dtype: torch.dtype) -> Tensor:
    """1 where a token's document has a token `shift` before it, else 0: [L, B, 1]."""
    return (positions_LB >= shift).to(dtype).unsqueeze(-1)
