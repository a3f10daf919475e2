"""Causal attention over context-parallel ranks and packed documents, in memory linear in the sequence.

Shapes: S sequence on the whole, L = S / CP local tokens, B batch, H query heads, G groups of keys and values,
R = H / G query heads a group, P head dimension.

A query attends the tokens of its document up to itself. Local queries are cut into blocks, each within one document and
one chunk of the zigzag: a block attends the keys of its document that come before it in full, and its own causally.
Each such part is one call of torch's flash kernel, without a mask. The kernel returns o = softmax(s) v over the part's
keys and l = log sum exp(s); two parts of the same queries are merged (Milakov and Gimelshein 2018, arXiv:1805.02867) by
    l = log(exp l1 + exp l2),    o = exp(l1 - l) o1 + exp(l2 - l) o2.
In the backward pass, the kernel's own backward, given the merged o and l, makes the part's share of the gradients.

Keys and values are sent out by one rank after another, and their gradients are summed back to it, so that a rank holds
those of two ranks at most. In the zigzag, all ranks have the same work with the keys of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

BLOCK = 2048  # tokens; what one call of the kernel needs for itself grows with this, not with the sequence

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Piece:
    """Local queries begin .. end - 1 of `rows`, all of one document and one chunk.

    In the whole sequence, the first query has index `start`, and the first token of its document index `document`.
    """

    rows: slice
    begin: int
    end: int
    start: int
    document: int


@dataclass(frozen=True)
class Part:
    """Queries, counted in this rank's tokens, that attend keys, counted in their owner's: in full or causally."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Layout:
    """What this rank's queries attend. `group` is None where one rank holds the whole sequence."""

    pieces: list[Piece]
    length: int
    group: dist.ProcessGroup | None
    scale: float | None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def owns(self, owner: int) -> bool:
        return self.group is None or self.group.rank() == owner

    def parts(self, owner: int) -> Iterator[Part]:
        """What this rank's queries attend among the keys of rank `owner`."""
        starts = chunk_starts(self.length, owner, self.ranks)
        return find_parts(self.pieces, starts, self.length, own=self.owns(owner))


def attention(
    query_LBHP: Tensor,
    key_LBGP: Tensor,
    value_LBGP: Tensor,
    *,
    positions_BL: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the tokens of each query's document up to itself, on the CPU.

    A collective call of the ranks of `group`, as is its backward. Sums over keys are taken in FP32 (FP64 for FP64).

    Args:
        query_LBHP: [L, B, H, P], FP32, BF16 or FP64; the two chunks that the rank holds of the zigzag, joined.
        key_LBGP: [L, B, G, P] in the same dtype; G divides H.
        value_LBGP: the same.
        positions_BL: [B, L] integers, the position of each local token in its document; None: each row is a document.
        group: the context-parallel ranks; None: one rank.
        scale: None is 1 / sqrt(P).

    Returns:
        [L, B, H, P] in the dtype of `query_LBHP`.

    Raises:
        ValueError: positions that do not count from 0 in each document, a local sequence of odd length on several
            ranks, or heads that do not divide into the groups.
    """
    length, batch, heads = query_LBHP.shape[:3]
    if heads % key_LBGP.shape[2]:
        raise ValueError(f"{heads} query heads do not divide into {key_LBGP.shape[2]} groups of keys and values")
    group = None if group is None or group.size() == 1 else group
    starts = chunk_starts(length, 0, 1) if group is None else chunk_starts(length, group.rank(), group.size())
    operands = [t if t.stride(-1) == 1 else t.contiguous() for t in (query_LBHP, key_LBGP, value_LBGP)]
    layout = Layout(find_pieces(positions_BL, starts, length, batch), length, group, scale)
    return _Attention.apply(*operands, layout)


class _Attention(torch.autograd.Function):
    """Keeps its operands, its output and the log-sum-exp; other ranks' keys and values are sent anew in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        # Contiguous, so that the views that parts write to are views.
        out = torch.zeros(query.shape, dtype=_sum_dtype(query), device=query.device)
        lse = torch.full(query.shape[:3], -math.inf, dtype=out.dtype, device=query.device)
        groups = key.shape[2]
        for owner in range(layout.ranks):
            sent_key, sent_value = _send(key, value, owner, layout)
            for part in layout.parts(owner):
                operands = _queries(query, part, groups), *_keys(sent_key, sent_value, part, query.shape[2])
                added, added_lse = _flash(*operands, 0.0, part.causal, scale=layout.scale)
                _merge(_queries(out, part, groups), _queries(lse, part, groups), added, added_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout = layout  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        layout: Layout = ctx.layout  # type: ignore[attr-defined]
        d_out = grads[0].contiguous()
        d_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        d_own = torch.empty(0)
        groups = key.shape[2]
        for owner in range(layout.ranks):
            sent_key, sent_value = _send(key, value, owner, layout)
            d_sent = torch.zeros((2, *key.shape), dtype=lse.dtype, device=key.device)
            for part in layout.parts(owner):
                operands = _queries(query, part, groups), *_keys(sent_key, sent_value, part, query.shape[2])
                results = [_queries(tensor, part, groups) for tensor in (out, lse)]
                d_out_part = _queries(d_out, part, groups)
                added = _flash_backward(d_out_part, *operands, *results, 0.0, part.causal, scale=layout.scale)
                _queries(d_query, part, groups).add_(added[0])
                for total, d_heads in zip(d_sent, added[1:], strict=True):
                    _per_group(total, part).add_(d_heads.sum(1))
            if layout.group is not None:
                dist.reduce(d_sent, group_dst=owner, group=layout.group)
            if layout.owns(owner):
                d_own = d_sent
        return d_query.to(query.dtype), d_own[0].to(key.dtype), d_own[1].to(value.dtype), None


def chunk_starts(length: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Where the chunks that `rank` holds of the zigzag begin in the whole sequence, of `length` tokens a rank."""
    if ranks == 1:
        return (0,)
    if length % 2:
        raise ValueError(f"{length} tokens on each of {ranks} context-parallel ranks are not two chunks of one length")
    return rank * length // 2, (2 * ranks - 1 - rank) * length // 2


def find_pieces(positions_BL: Tensor | None, starts: tuple[int, ...], length: int, batch: int) -> list[Piece]:
    """The pieces of this rank's chunks, which begin at `starts`. Rows that are cut alike go together.

    Raises:
        ValueError: positions that cannot be.
    """
    chunk, every_row = length // len(starts), slice(0, batch)
    if positions_BL is None:
        return [Piece(every_row, i * chunk, (i + 1) * chunk, start, 0) for i, start in enumerate(starts)]
    if positions_BL.shape != (batch, length) or positions_BL.is_floating_point():
        found = f"{list(positions_BL.shape)} {positions_BL.dtype}"
        raise ValueError(f"positions are {found}; expected [{batch}, {length}] integers, one for each local token")
    chunks = positions_BL.unflatten(1, (len(starts), chunk))
    _check(chunks, starts)
    whole = torch.cat([torch.arange(start, start + chunk) for start in starts])
    begins = positions_BL == 0
    begins[:, ::chunk] = True
    rows = []
    for row in range(batch):
        begin = begins[row].nonzero().flatten()
        numbers = begin, whole[begin], whole[begin] - positions_BL[row, begin]
        firsts, first_indices, documents = (tensor.tolist() for tensor in numbers)
        rows.append(list(zip(firsts, [*firsts[1:], length], first_indices, documents, strict=True)))
    if all(pieces == rows[0] for pieces in rows):
        return [Piece(every_row, *piece) for piece in rows[0]]
    return [Piece(slice(row, row + 1), *piece) for row, pieces in enumerate(rows) for piece in pieces]


def _check(chunks: Tensor, starts: tuple[int, ...]) -> None:
    """Refuses positions [B, chunks, tokens] that no documents have, as far as one rank can tell."""
    before = torch.tensor(starts)
    wrong = torch.zeros_like(chunks, dtype=torch.bool)
    wrong[:, :, 0] = (chunks[:, :, 0] < 0) | (chunks[:, :, 0] > before)
    wrong[:, :, 1:] = (chunks[:, :, 1:] != chunks[:, :, :-1] + 1) & (chunks[:, :, 1:] != 0)
    if not wrong.any():
        return
    row, number, offset = wrong.nonzero()[0].tolist()
    index = starts[number] + offset
    if offset:
        after = int(chunks[row, number, offset - 1])
        allowed = f"after {after} it must be {after + 1}, or 0 where a document begins"
    else:
        allowed = f"it must lie between 0 and {index}, the number of tokens before it"
    value = int(chunks[row, number, offset])
    raise ValueError(f"the position of token {index} in row {row} is {value}: {allowed}")


def find_parts(pieces: list[Piece], key_starts: tuple[int, ...], length: int, *, own: bool) -> Iterator[Part]:
    """What `pieces` attend among keys of chunks that begin at `key_starts`, in blocks of `BLOCK` tokens at most.

    `own`: the keys are those of the queries' rank. `length`: the tokens of a rank.
    """
    chunk = length // len(key_starts)
    for piece in pieces:
        for begin in range(piece.begin, piece.end, BLOCK):
            queries = slice(begin, min(begin + BLOCK, piece.end))
            start = piece.start + begin - piece.begin
            for number, key_start in enumerate(key_starts):
                shift = number * chunk - key_start
                last = min(start, key_start + chunk)
                for first in range(max(piece.document, key_start), last, BLOCK):
                    keys = slice(first + shift, min(first + BLOCK, last) + shift)
                    yield Part(piece.rows, queries, keys, causal=False)
            if own:
                yield Part(piece.rows, queries, queries, causal=True)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _send(key: Tensor, value: Tensor, owner: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """The keys and values of rank `owner`."""
    if layout.group is None:
        return key, value
    both = torch.stack((key, value)) if layout.owns(owner) else key.new_empty((2, *key.shape))
    dist.broadcast(both, group_src=owner, group=layout.group)
    return both[0], both[1]


def _queries(tensor: Tensor, part: Part, groups: int) -> Tensor:
    """[L, B, H, ...] -> [B G, R, queries, ...]: the groups join the batch. A view of a contiguous tensor."""
    heads_last = tensor[part.queries, part.rows].unflatten(2, (groups, -1)).flatten(1, 2)
    return heads_last.movedim(0, 2)


def _per_group(tensor: Tensor, part: Part) -> Tensor:
    """[L, B, G, P] -> [B G, keys, P], a view of a contiguous tensor."""
    return tensor[part.keys, part.rows].flatten(1, 2).movedim(0, 1)


def _keys(key: Tensor, value: Tensor, part: Part, heads: int) -> tuple[Tensor, Tensor]:
    """[B G, R, keys, P] of each. The R heads of a group see the same memory: their stride is 0."""
    repeats = heads // key.shape[2]
    key, value = (_per_group(tensor, part).unsqueeze(1).expand(-1, repeats, -1, -1) for tensor in (key, value))
    return key, value


def _merge(out: Tensor, lse: Tensor, added: Tensor, added_lse: Tensor) -> None:
    """Merges a part into `out` and `lse`, which begin as 0 and -inf, in place."""
    share = torch.sigmoid(added_lse - lse)  # exp(l2 - l), where l is the merged one
    out.lerp_(added.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, added_lse, out=lse)
