"""Selective state-space scan of Mamba-2 in plain torch: causal convolution, chunked scan.

Shapes: L sequence, B batch, H heads, P head dimension, G groups (H % G == 0), N state, C chunks of Q tokens.
The recurrence for each head (Dao and Gu 2024, arXiv:2405.21060, section 6) is
    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T,    y_t = state_t C_t + D x_t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution followed by SiLU, as shifted multiplies.

    The sequence is the first dimension, so each shift is a contiguous slice; oneDNN's depthwise
    convolution needs a transposed copy and is several times slower at kernel width 4.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        length, width = x.shape[0], weight.shape[1]
        taps = weight.t().contiguous()
        y = x * taps[-1] + bias
        for shift in range(1, min(width, length)):
            y[shift:].addcmul_(x[: length - shift], taps[-1 - shift])
        ctx.save_for_backward(x, weight, y)
        return F.silu(y)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    return _CausalConv.apply(x_LBD, weight, bias)  # type: ignore[no-any-return]


def chunked_scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, d: Tensor, chunk_size: int) -> Tensor:
    """Scan with quadratic work inside chunks and a recurrence between them, in FP32 (FP64 stays FP64).

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
    length, batch, heads, head_dim = x.shape
    groups, state_dim = b.shape[2:]
    size = min(chunk_size, length)
    padding = -length % size
    u = x * dt.unsqueeze(-1)
    a = dt * decay
    if padding:  # a zero time step neither moves the state nor reads it
        u, b, c = (F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, padding)) for tensor in (u, b, c))
        a = F.pad(a, (0, 0, 0, 0, 0, padding))
    chunks = (length + padding) // size
    per_group = heads // groups

    def split(tensor: Tensor, inner: int) -> Tensor:
        """[L, B, n, inner] -> [C, B, n, Q, inner], contiguous for the batched products."""
        return tensor.view(chunks, size, batch, -1, inner).permute(0, 2, 3, 1, 4)

    u_heads = split(u, head_dim).reshape(-1, size, head_dim)
    b_groups, c_groups = (split(tensor, state_dim).reshape(-1, size, state_dim) for tensor in (b, c))
    log_decay = a.view(chunks, size, batch, heads).permute(0, 2, 3, 1).cumsum(-1)  # C B H Q
    weights = _decay_matrix(log_decay) * _per_head(torch.bmm(c_groups, b_groups.mT), per_group, log_decay)
    y = torch.bmm(weights.view(-1, size, size), u_heads)
    if chunks > 1:
        y = y + _carried(u_heads, b_groups, c_groups, log_decay, per_group)
    y = y.view(chunks, batch, heads, size, head_dim).permute(0, 3, 1, 2, 4).reshape(-1, batch, heads, head_dim)
    return y[:length] + x * d.unsqueeze(-1)


def _decay_matrix(log_decay: Tensor) -> Tensor:
    """exp(sum of a over (j, i]) for i >= j, else 0: [..., Q] -> [..., Q, Q].

    The upper triangle is cut before exp, where its positive exponents would overflow.
    """
    size = log_decay.shape[-1]
    difference = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
    future = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    return difference.masked_fill_(future, float("-inf")).exp_()


def _per_head(product: Tensor, per_group: int, like: Tensor) -> Tensor:
    """[C B G, Q, Q] of the groups -> [C, B, H, Q, Q], each group's matrix seen by its heads."""
    chunks, batch, heads, size = like.shape
    grouped = product.view(chunks, batch, heads // per_group, 1, size, size)
    return grouped.expand(-1, -1, -1, per_group, -1, -1).reshape(chunks, batch, heads, size, size)


def _carried(u_heads: Tensor, b_groups: Tensor, c_groups: Tensor, log_decay: Tensor, per_group: int) -> Tensor:
    """What earlier chunks add to each token: [C B H, Q, P].

    The state is kept transposed, [P, N] -> [N, P], so that both products are plain batched products.
    """
    chunks, batch, heads, size = log_decay.shape
    head_dim, state_dim = u_heads.shape[-1], b_groups.shape[-1]
    groups = heads // per_group

    def stack_heads(tensor: Tensor) -> Tensor:
        """[C B H, Q, P] -> [C B G, Q, heads of the group x P]: the heads of a group share B and C."""
        return tensor.view(-1, per_group, size, head_dim).transpose(1, 2).reshape(-1, size, per_group * head_dim)

    to_end = (log_decay[..., -1:] - log_decay).exp().view(-1, size, 1)
    added = torch.bmm(b_groups.mT, stack_heads(u_heads * to_end))
    added = added.view(chunks, batch, groups, state_dim, per_group, head_dim)
    whole = log_decay[..., -1].exp().view(chunks, batch, groups, 1, per_group, 1)
    states = [torch.zeros_like(added[0])]
    for chunk in range(chunks - 1):
        states.append(states[-1] * whole[chunk] + added[chunk])
    entering = torch.stack(states).view(-1, state_dim, per_group * head_dim)
    read = torch.bmm(c_groups, entering).view(-1, size, per_group, head_dim).transpose(1, 2)
    return read.reshape(-1, size, head_dim) * log_decay.exp().view(-1, size, 1)
