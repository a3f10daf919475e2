"""Selective state-space scan of Mamba-2 in plain torch, over sequences of any length and packed documents.

Shapes: L sequence, B batch, H heads, P head dimension, G groups of R = H / G heads, N state.
The recurrence for each head (Dao and Gu 2024, arXiv:2405.21060, section 6) is
    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T,    y_t = state_t C_t + D x_t,
where state_{t-1} counts as zero at the first token of a document. Work is quadratic inside chunks of tokens, and the
state is carried between them.

A long sequence is cut into segments. Of each the state that enters it is kept, and the backward pass makes the inner
tensors anew, one segment at a time: memory beyond operands and gradients does not grow with the sequence. No offset is
counted in 32 bits, so there is no length at which the result goes wrong.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from nemo_qad.models.scan_chunks import Operands, Segment, backward, forward

SEGMENT = 4096  # tokens, rounded up to whole chunks


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk_size: int,
    positions_LB: Tensor | None = None,
) -> Tensor:
    """Scan with quadratic work inside chunks and a recurrence between them, in FP32 (FP64 stays FP64).

    The result does not depend on `chunk_size` beyond rounding; the time does.

    Args:
        x: [L, B, H, P] inputs, any float dtype.
        dt: [L, B, H] positive time steps (after softplus).
        decay: [H] negative continuous-time decay, A of the recurrence.
        b, c: [L, B, G, N] input and output maps of each group.
        d: [H] skip weights.
        chunk_size: tokens a chunk; L need not be a multiple.
        positions_LB: [L, B] position of each token in its document; None: each column is one document.

    Returns:
        y: [L, B, H, P] in FP32 (FP64 for FP64 inputs).
    """
    starts = None if positions_LB is None else positions_LB == 0
    y: Tensor = _Scan.apply(x, dt, decay, b, c, d, starts, min(chunk_size, len(x)))
    return y


class _Scan(torch.autograd.Function):
    """The scan with its gradient written out, segment by segment.

    Autograd of the same operations keeps and walks several tensors of Q x Q for each chunk more and takes twice as
    long. A sequence of one segment keeps its inner tensors, which saves making them twice.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        dt: Tensor,
        decay: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        starts: Tensor | None,
        size: int,
    ) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        given, parts = Operands(x, dt, b, c, starts), _segments(len(x), size)
        y = torch.empty(x.shape, dtype=dtype, device=x.device) if len(parts) > 1 else None
        state: Tensor | None = None
        entering: list[Tensor | None] = []
        kept: Segment | None = None
        for part in parts:
            entering.append(state)
            hands_on = part.stop < len(x)
            found, kept, state = forward(
                _padded(given, part, size, dtype), decay.to(dtype), d.to(dtype), size, state, hands_on=hands_on
            )
            if y is None:
                y = found[: len(x)]
            else:
                y[part] = found[: part.stop - part.start]
        assert y is not None and kept is not None
        inner = kept if len(parts) == 1 else ()
        ctx.save_for_backward(x, dt, decay, b, c, d, starts, *entering, *inner)  # type: ignore[arg-type]
        ctx.size = size  # type: ignore[attr-defined]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, decay, b, c, d, starts, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
        size, dy = ctx.size, grads[0]  # type: ignore[attr-defined]
        parts = _segments(len(x), size)
        entering, inner = rest[: len(parts)], rest[len(parts) :]
        if len(parts) == 1 and parts[0].stop % size == 0:
            found = backward(Segment(*inner), decay.to(dy.dtype), d.to(dy.dtype), dy, None)
            gradients = (found.x, found.dt, found.decay, found.b, found.c, found.d)
            of = zip(gradients, (x, dt, decay, b, c, d), strict=True)
            return *(gradient.to(operand.dtype) for gradient, operand in of), None, None
        into = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, dt, b, c)]
        a, skip = decay.to(dy.dtype), d.to(dy.dtype)
        d_decay, d_skip, d_state = torch.zeros_like(a), torch.zeros_like(skip), None
        for part, state in reversed(list(zip(parts, entering, strict=True))):
            given = _padded(Operands(x, dt, b, c, starts), part, size, dy.dtype)
            hands_on = part.stop < len(x)
            kept = Segment(*inner) if inner else forward(given, a, skip, size, state, hands_on=hands_on)[1]
            length = part.stop - part.start
            found = backward(kept, a, skip, _pad(dy[part], given.x.shape[0] - length), d_state)
            d_state = found.state
            for whole, of_part in zip(into, (found.x, found.dt, found.b, found.c), strict=True):
                whole[part] = of_part[:length]
            d_decay += found.decay
            d_skip += found.d
        dx, d_dt, db, dc = into
        return dx, d_dt, d_decay.to(decay.dtype), db, dc, d_skip.to(d.dtype), None, None


def _segments(length: int, size: int) -> list[slice]:
    """Whole chunks but for the end of the last."""
    step = -(-SEGMENT // size) * size
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _padded(given: Operands, part: slice, size: int, dtype: torch.dtype) -> Operands:
    """The operands of a segment in whole chunks: a zero time step neither moves the state nor adds to it."""
    padding = -(part.stop - part.start) % size
    x, dt, b, c = (_pad(tensor[part].to(dtype), padding) for tensor in given[:4])
    return Operands(x, dt, b, c, None if given.starts is None else _pad(given.starts[part], padding))


def _pad(tensor: Tensor, rows: int) -> Tensor:
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, rows]) if rows else tensor
