"""The mathematics of Mamba-2's scan over the chunks of one segment: forward, and the gradient written out.

Shapes: L tokens of the segment, B batch, H heads, P head dimension, G groups of R = H / G heads, N state, C chunks of
Q tokens. Names: s = sum of dt A within the chunk up to a token (inclusive), u = dt x. See `nemo_qad.models.scan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decay:
    """Decay of the state between tokens of a chunk: exp of differences of s, and 0 over the borders of documents.

    borders_CBQ: how many documents have begun in the chunk up to each token (inclusive); None where none does.
    """

    s_CBHQ: Tensor
    borders_CBQ: Tensor | None

    def between(self, groups: int) -> Tensor:
        """From token j to token i of each chunk, for j <= i: [C, B, G, R, Q, Q].

        Above the diagonal, where the exponent is positive and exp could overflow, it is cut to exp(0); what this is
        multiplied with is zero there.
        """
        decays = (self.s_CBHQ.unsqueeze(-1) - self.s_CBHQ.unsqueeze(-2)).clamp_(max=0).exp_()
        if self.borders_CBQ is not None:
            decays *= (self.borders_CBQ.unsqueeze(-1) == self.borders_CBQ.unsqueeze(-2)).unsqueeze(2)
        return decays.unflatten(2, (groups, -1))

    def from_start(self) -> Tensor:
        """From the start of its chunk to each token: [C, B, H, Q, 1]."""
        return self._kept(self.s_CBHQ.exp(), None if self.borders_CBQ is None else self.borders_CBQ == 0)

    def to_end(self) -> Tensor:
        """From each token to the end of its chunk: [C, B, H, Q, 1]."""
        borders = self.borders_CBQ
        decays = (self.s_CBHQ[..., -1:] - self.s_CBHQ).exp()
        return self._kept(decays, None if borders is None else borders == borders[..., -1:])

    def whole(self, groups: int) -> Tensor:
        """Over each whole chunk: [C, B, G, 1, R, 1], to multiply states seen as [B, G, N, R, P]."""
        decays = self.s_CBHQ[..., -1].exp()
        if self.borders_CBQ is not None:
            decays *= (self.borders_CBQ[..., -1] == 0).unsqueeze(-1)
        return decays.unflatten(2, (groups, -1))[:, :, :, None, :, None]

    @staticmethod
    def _kept(decays_CBHQ: Tensor, kept_CBQ: Tensor | None) -> Tensor:
        if kept_CBQ is not None:
            decays_CBHQ *= kept_CBQ.unsqueeze(2)
        return decays_CBHQ.unsqueeze(-1)


class Segment(NamedTuple):
    """What the gradient needs of a segment. `states`, `carried`: None where no state enters a chunk."""

    x: Tensor  # [C, B, H, Q, P]
    dt: Tensor  # [C, B, H, Q, 1]
    u: Tensor  # [C, B, H, Q, P]
    b: Tensor  # [C, B, G, Q, N]
    c: Tensor  # [C, B, G, Q, N]
    s: Tensor  # [C, B, H, Q]
    borders: Tensor | None  # [C, B, Q]
    decays: Tensor  # [C, B, G, R, Q, Q]
    scores: Tensor  # [C, B, G, 1, Q, Q]
    states: Tensor | None  # that enter each chunk [C, B, G, N, R P]
    carried: Tensor | None  # what they add to each token [C, B, H, Q, P]

    @property
    def decay(self) -> Decay:
        return Decay(self.s, self.borders)


class Operands(NamedTuple):
    """x [L, B, H, P], dt [L, B, H], b and c [L, B, G, N], starts [L, B] bool (a document begins) or None."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    starts: Tensor | None


class Gradients(NamedTuple):
    """Of x, dt, decay, b, c, d, and of the state that enters the segment [B, G, N, R P]."""

    x: Tensor
    dt: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    state: Tensor | None


def forward(
    given: Operands, decay: Tensor, d: Tensor, size: int, state: Tensor | None, *, hands_on: bool
) -> tuple[Tensor, Segment, Tensor | None]:
    """y [L, B, H, P], what the gradient needs, and the state at the end if another segment takes it.

    Args:
        size: tokens a chunk, which divides L.
        state: [B, G, N, R P] that enters; None: zero.
    """
    x, dt, borders = _chunk(given.x, size), _chunk(given.dt.unsqueeze(-1), size), None
    if given.starts is not None:
        borders = given.starts.view(-1, size, given.starts.shape[1]).transpose(1, 2).cumsum(-1)
    s = (dt.squeeze(-1) * decay[:, None]).cumsum(-1)
    decays_of = Decay(s, borders)
    u, b, c = x * dt, _chunk(given.b, size), _chunk(given.c, size)
    decays, scores = decays_of.between(b.shape[2]), _causal_product(c, b)
    y = _matmul(decays * scores, u)
    states = carried = end = None
    if len(s) > 1 or state is not None or hands_on:
        states, end = _states(u, b, decays_of, state)
        carried = _read(states, c, decays_of)
        y += carried
    kept = Segment(x, dt, u, b, c, s, borders, decays, scores, states, carried)
    return _unchunk(y.addcmul_(x, d[:, None, None])), kept, end


def backward(kept: Segment, decay: Tensor, d: Tensor, dy_LBHP: Tensor, d_end: Tensor | None) -> Gradients:
    """`d_end`: gradient of the state at the end, [B, G, N, R P]; None: zero."""
    x, dt, u, b, c = kept.x, kept.dt, kept.u, kept.b, kept.c
    dy = _chunk(dy_LBHP, kept.s.shape[-1])
    du = _matmul((kept.decays * kept.scores).mT, dy)
    # decays * d(loss)/d(decays * scores): its sum over a group's heads is the gradient of the scores.
    weighted = _matmul(dy, u.mT).view_as(kept.decays) * kept.decays
    d_scores = weighted.sum(3, keepdim=True)
    d_exponents = weighted.mul_(kept.scores)
    ds = (d_exponents.sum(-1) - d_exponents.sum(-2)).view_as(kept.s)
    d_product = d_scores.tril_().squeeze(3)
    db, dc, d_state = _matmul(d_product.mT, c), _matmul(d_product, b), None
    if kept.states is not None and kept.carried is not None:
        ds += (dy * kept.carried).sum(-1)
        d_state = _backpropagate_states(kept, dy, d_end, into=(du, db, dc, ds))
    da = ds.flip(-1).cumsum(-1).flip(-1).unsqueeze(-1)  # s is a running sum of a
    d_dt = (du * x).sum(-1, keepdim=True).addcmul_(da, decay[:, None, None])
    d_decay = (da * dt).sum((0, 1, 3, 4))
    d_skip = (dy * x).sum((0, 1, 3, 4))
    dx = du.mul_(dt).addcmul_(dy, d[:, None, None])
    return Gradients(_unchunk(dx), _unchunk(d_dt).squeeze(-1), d_decay, _unchunk(db), _unchunk(dc), d_skip, d_state)


def _chunk(tensor: Tensor, size: int) -> Tensor:
    """[L, B, n, width] -> [C, B, n, Q, width], contiguous."""
    return tensor.reshape(-1, size, *tensor.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


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


def _stack(tensor_CBHQP: Tensor, groups: int) -> Tensor:
    """[C, B, H, Q, P] -> [C, B, G, Q, R P]: the heads of a group share B and C, so they share a product."""
    return tensor_CBHQP.unflatten(2, (groups, -1)).transpose(3, 4).flatten(4)


def _unstack(tensor: Tensor, head_dim: int) -> Tensor:
    """The inverse of `_stack`."""
    return tensor.unflatten(-1, (-1, head_dim)).transpose(3, 4).flatten(2, 3)


def _states(u_CBHQP: Tensor, b_CBGQN: Tensor, decay: Decay, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk [C, B, G, N, R P], and the one at the end."""
    groups, head_dim = b_CBGQN.shape[2], u_CBHQP.shape[-1]
    added = _matmul(b_CBGQN.mT, _stack(u_CBHQP * decay.to_end(), groups)).unflatten(-1, (-1, head_dim))
    whole = decay.whole(groups)
    states = torch.empty_like(added)
    states[0] = 0 if first is None else first.view_as(states[0])
    for chunk in range(len(states) - 1):
        torch.addcmul(added[chunk], states[chunk], whole[chunk], out=states[chunk + 1])
    end = torch.addcmul(added[-1], states[-1], whole[-1])
    return states.flatten(4), end.flatten(3)


def _read(states: Tensor, c_CBGQN: Tensor, decay: Decay) -> Tensor:
    """What the entering states add to each token: [C, B, H, Q, P]."""
    head_dim = states.shape[-1] * states.shape[2] // decay.s_CBHQ.shape[2]
    return _unstack(_matmul(c_CBGQN, states), head_dim).mul_(decay.from_start())


def _backpropagate_states(
    kept: Segment, dy: Tensor, d_end: Tensor | None, *, into: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Adds to du, db, dc and ds what flows through the states, beyond the decay of what is read.

    Returns:
        the gradient of the state that enters the segment.
    """
    du, db, dc, ds = into
    states, u, b, c, decay = kept.states, kept.u, kept.b, kept.c, kept.decay
    assert states is not None
    groups, head_dim = b.shape[2], u.shape[-1]
    d_read = _stack(dy * decay.from_start(), groups)
    dc += _matmul(d_read, states.mT)
    # From the last chunk back: the gradient of what each chunk adds, and of its decay.
    d_entering = _matmul(c.mT, d_read).unflatten(-1, (-1, head_dim))
    whole, entering = decay.whole(groups), states.unflatten(-1, (-1, head_dim))
    d_added = torch.zeros_like(d_entering)
    if d_end is not None:
        d_added[-1] = d_end.view_as(d_added[-1])
    for chunk in range(len(states) - 1, 0, -1):
        torch.addcmul(d_entering[chunk], d_added[chunk], whole[chunk], out=d_added[chunk - 1])
    d_state = torch.addcmul(d_entering[0], d_added[0], whole[0])
    d_whole = (d_added * entering * whole).sum((3, 5)).flatten(2)
    to_end, d_stacked = decay.to_end(), d_added.flatten(4)
    db += _matmul(_stack(u * to_end, groups), d_stacked.mT)
    d_ended = _unstack(_matmul(b, d_stacked), head_dim).mul_(to_end)
    du += d_ended
    moved = (d_ended * u).sum(-1)
    ds -= moved
    ds[..., -1] += moved.sum(-1) + d_whole
    return d_state.flatten(3)
