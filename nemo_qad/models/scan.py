"""Selective state-space scan of Mamba-2 in plain torch: causal convolution, chunked scan.

Shapes: L sequence, B batch, H heads, P head dimension, G groups of R = H / G heads, N state, C chunks of Q tokens.
The recurrence for each head (Dao and Gu 2024, arXiv:2405.21060, section 6) is
    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T,    y_t = state_t C_t + D x_t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution followed by SiLU, as shifted multiplies.

    The sequence is the first dimension, so each shift is a contiguous slice; oneDNN's depthwise
    convolution needs a transposed copy and is several times slower at kernel width 4.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        length, width = x.shape[0], weight.shape[1]
        taps = weight.t().contiguous()
        y = x * taps[-1] + bias
        for shift in range(1, min(width, length)):
            y[shift:].addcmul_(x[: length - shift], taps[-1 - shift])
        ctx.save_for_backward(x, weight, y)
        return F.silu(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors  # type: ignore[attr-defined]
        length, width = x.shape[0], weight.shape[1]
        dy = torch.ops.aten.silu_backward(grads[0], y)
        taps = weight.t().contiguous()
        dx = dy * taps[-1]
        d_taps = torch.zeros_like(taps)
        for shift in range(min(width, length)):
            d_taps[-1 - shift] = (dy[shift:] * x[: length - shift]).flatten(0, -2).sum(0)
            if shift:
                dx[: length - shift].addcmul_(dy[shift:], taps[-1 - shift])
        return dx, d_taps.t(), dy.flatten(0, -2).sum(0)


def causal_conv(x_LBD: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """silu(depthwise causal convolution) over the first dimension.

    Args:
        x_LBD: [L, B, channels], any float dtype.
        weight: [channels, width]; the last column meets the current token.
        bias: [channels].

    Returns:
        [L, B, channels] in the dtype of `x_LBD`.
    """
    return _CausalConv.apply(x_LBD, weight, bias)


def chunked_scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk_size: int) -> Tensor:
    """Scan with quadratic work inside chunks and a recurrence between them, in FP32 (FP64 stays FP64).

    The result does not depend on `chunk_size` beyond rounding; the time does.

    Args:
        x: [L, B, H, P] inputs.
        dt: [L, B, H] positive time steps (after softplus).
        decay: [H] negative continuous-time decay, A of the recurrence.
        b, c: [L, B, G, N] input and output maps of each group.
        d: [H] skip weights.
        chunk_size: tokens a chunk; L need not be a multiple.

    Returns:
        y: [L, B, H, P] in FP32 (FP64 for FP64 inputs).
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, dt, decay, b, c, d = (tensor.to(dtype) for tensor in (x, dt, decay, b, c, d))
    length = x.shape[0]
    size = min(chunk_size, length)
    padding = -length % size
    if padding:  # a zero time step neither moves the state nor adds to it
        x, b, c = (F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, padding)) for tensor in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, 0, 0, padding))
    y: Tensor = _ChunkedScan.apply(x, dt, decay, b, c, d, size)
    return y[:length] if padding else y


class _ChunkedScan(torch.autograd.Function):
    """The scan of whole chunks with its gradient written out.

    Autograd of the same operations keeps and walks several [C, B, H, Q, Q] tensors more and takes twice as
    long. Names: s = sum of dt A within the chunk up to a token (inclusive), u = dt x.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, d: Tensor, size: int
    ) -> Tensor:
        x_CBHQP, dt_CBHQ1 = _chunk(x, size), _chunk(dt.unsqueeze(-1), size)
        s_CBHQ = (dt_CBHQ1.squeeze(-1) * decay[:, None]).cumsum(-1)
        u_CBHQP = x_CBHQP * dt_CBHQ1
        b_CBGQN, c_CBGQN = _chunk(b, size), _chunk(c, size)
        decays, scores = _decays(s_CBHQ, b.shape[2]), _causal_product(c_CBGQN, b_CBGQN)
        y_CBHQP = _matmul(decays * scores, u_CBHQP)
        states = carried = None
        if s_CBHQ.shape[0] > 1:
            states = _states(u_CBHQP, b_CBGQN, s_CBHQ)
            carried = _read(states, c_CBGQN, s_CBHQ)
            y_CBHQP += carried
        kept = (x_CBHQP, dt_CBHQ1, u_CBHQP, b_CBGQN, c_CBGQN, s_CBHQ, decays, scores, states, carried, decay, d)
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]
        return _unchunk(y_CBHQP.addcmul_(x_CBHQP, d[:, None, None]))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, u, b, c, s, decays, scores, states, carried, decay, d = ctx.saved_tensors  # type: ignore[attr-defined]
        dy = _chunk(grads[0], s.shape[-1])
        du = _matmul((decays * scores).mT, dy)
        # decays * d(loss)/d(decays * scores): its sum over a group's heads is the gradient of the scores.
        weighted = _matmul(dy, u.mT).view_as(decays) * decays
        d_scores = weighted.sum(3, keepdim=True)
        d_exponents = weighted.mul_(scores)
        ds = (d_exponents.sum(-1) - d_exponents.sum(-2)).view_as(s)
        d_product = d_scores.tril_().squeeze(3)
        db, dc = _matmul(d_product.mT, c), _matmul(d_product, b)
        if states is not None:
            ds += (dy * carried).sum(-1)
            _backpropagate_states(states, dy, u, b, c, s, into=(du, db, dc, ds))
        da = ds.flip(-1).cumsum(-1).flip(-1).unsqueeze(-1)  # s is a running sum of a
        d_dt = (du * x).sum(-1, keepdim=True).addcmul_(da, decay[:, None, None])
        d_decay = (da * dt).sum((0, 1, 3, 4))
        d_skip = (dy * x).sum((0, 1, 3, 4))
        dx = du.mul_(dt).addcmul_(dy, d[:, None, None])
        return _unchunk(dx), _unchunk(d_dt).squeeze(-1), d_decay, _unchunk(db), _unchunk(dc), d_skip, None


def _chunk(tensor: Tensor, size: int) -> Tensor:
    """[L, B, n, width] -> [C, B, n, Q, width], contiguous."""
    return tensor.view(-1, size, *tensor.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


def _unchunk(tensor: Tensor) -> Tensor:
    """The inverse of `_chunk`."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Batched product; the leading dimensions may be grouped differently, and are returned as in `right`."""
    product = torch.bmm(left.flatten(0, -3), right.flatten(0, -3))
    return product.view(*right.shape[:-2], *product.shape[-2:])


def _causal_product(c_CBGQN: Tensor, b_CBGQN: Tensor) -> Tensor:
    """C_i . B_j for j <= i, else 0: [C, B, G, 1, Q, Q]."""
    return _matmul(c_CBGQN, b_CBGQN.mT).tril_().unsqueeze(3)


def _decays(s_CBHQ: Tensor, groups: int) -> Tensor:
    """exp(s_i - s_j) for j <= i: [C, B, G, R, Q, Q].

    Above the diagonal, where the exponent is positive and exp could overflow, it is cut to exp(0); the
    causal product is zero there.
    """
    exponents = s_CBHQ.unsqueeze(-1) - s_CBHQ.unsqueeze(-2)
    return exponents.clamp_(max=0).exp_().unflatten(2, (groups, -1))


def _stack(tensor_CBHQP: Tensor, groups: int) -> Tensor:
    """[C, B, H, Q, P] -> [C, B, G, Q, R P]: the heads of a group share B and C, so they share a product."""
    return tensor_CBHQP.unflatten(2, (groups, -1)).transpose(3, 4).flatten(4)


def _unstack(tensor: Tensor, head_dim: int) -> Tensor:
    """The inverse of `_stack`."""
    return tensor.unflatten(-1, (-1, head_dim)).transpose(3, 4).flatten(2, 3)


def _to_end(s_CBHQ: Tensor) -> Tensor:
    """Decay from each token to the end of its chunk: [C, B, H, Q, 1]."""
    return (s_CBHQ[..., -1:] - s_CBHQ).exp().unsqueeze(-1)


def _whole(s_CBHQ: Tensor, groups: int) -> Tensor:
    """Decay over each whole chunk: [C, B, G, 1, R, 1], to multiply states seen as [B, G, N, R, P]."""
    return s_CBHQ[..., -1].exp().unflatten(2, (groups, -1))[:, :, :, None, :, None]


def _states(u_CBHQP: Tensor, b_CBGQN: Tensor, s_CBHQ: Tensor) -> Tensor:
    """The state that enters each chunk: [C, B, G, N, R P]."""
    groups, head_dim = b_CBGQN.shape[2], u_CBHQP.shape[-1]
    added = _matmul(b_CBGQN.mT, _stack(u_CBHQP * _to_end(s_CBHQ), groups)).unflatten(-1, (-1, head_dim))
    whole = _whole(s_CBHQ, groups)
    states = torch.empty_like(added)
    states[0] = 0
    for chunk in range(len(states) - 1):
        torch.addcmul(added[chunk], states[chunk], whole[chunk], out=states[chunk + 1])
    return states.flatten(4)


def _read(states: Tensor, c_CBGQN: Tensor, s_CBHQ: Tensor) -> Tensor:
    """What the entering states add to each token: [C, B, H, Q, P]."""
    head_dim = states.shape[-1] * states.shape[2] // s_CBHQ.shape[2]
    return _unstack(_matmul(c_CBGQN, states), head_dim).mul_(s_CBHQ.exp().unsqueeze(-1))


def _backpropagate_states(
    states: Tensor,
    dy: Tensor,
    u: Tensor,
    b: Tensor,
    c: Tensor,
    s: Tensor,
    *,
    into: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Add to du, db, dc and ds what flows through the states, beyond the decay of what is read."""
    du, db, dc, ds = into
    groups, head_dim = b.shape[2], u.shape[-1]
    d_read = _stack(dy * s.exp().unsqueeze(-1), groups)
    dc += _matmul(d_read, states.mT)
    # From the last chunk back: the gradient of what each chunk adds, and of its decay.
    d_entering = _matmul(c.mT, d_read).unflatten(-1, (-1, head_dim))
    whole, entering = _whole(s, groups), states.unflatten(-1, (-1, head_dim))
    d_added = torch.zeros_like(d_entering)
    for chunk in range(len(states) - 1, 0, -1):
        torch.addcmul(d_entering[chunk], d_added[chunk], whole[chunk], out=d_added[chunk - 1])
    d_whole = (d_added * entering * whole).sum((3, 5)).flatten(2)
    to_end, d_stacked = _to_end(s), d_added.flatten(4)
    db += _matmul(_stack(u * to_end, groups), d_stacked.mT)
    d_ended = _unstack(_matmul(b, d_stacked), head_dim).mul_(to_end)
    du += d_ended
    moved = (d_ended * u).sum(-1)
    ds -= moved
    ds[..., -1] += moved.sum(-1) + d_whole
