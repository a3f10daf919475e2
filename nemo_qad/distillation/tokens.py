"""Which tokens count, a chunk at a time, and how their hidden states and gradients travel between ranks.

Legend: T tokens of the mask, n = T / R tokens that one of R ranks holds under sequence parallelism, C tokens of a
chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """`tokens`: indices into the mask, int64 [C]. The rest is used under sequence parallelism alone.

    `own`: indices into this rank's hidden states, at most `sent` of them; `places`: where each of `tokens` lies
    among the R * `sent` rows that the ranks send.
    """

    tokens: Tensor
    own: Tensor
    sent: int
    places: Tensor


class Tokens:
    """The counted tokens (mask above 0) of hidden states [T, D] that every rank of `group` holds whole."""

    def __init__(self, mask_T: Tensor, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = 1 if group is None else group.size()
        self.num_tokens = len(mask_T)
        self.counted = (mask_T > 0).nonzero().squeeze(1)

    @property
    def count(self) -> int:
        return len(self.counted)

    @property
    def local_tokens(self) -> int:
        """Rows that this rank's hidden states must have."""
        return self.num_tokens

    def chunks(self, size: int) -> Iterator[Chunk]:
        """At most `size` counted tokens at a time, the same on all ranks."""
        for start in range(0, self.count, size):
            tokens = self.counted[start : start + size]
            yield Chunk(tokens, tokens, len(tokens), tokens)

    def take(self, hidden_TD: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's hidden states [C, D]."""
        return hidden_TD.index_select(0, chunk.own)

    def put(self, gradient_TD: Tensor, chunk: Chunk, gradient_CD: Tensor) -> None:
        """Adds up what the ranks have of the chunk's gradient, in its dtype, and stores it."""
        if self.ranks > 1:
            dist.all_reduce(gradient_CD, group=self.group)
        gradient_TD.index_copy_(0, chunk.own, gradient_CD.to(gradient_TD.dtype))

    def owner(self, token: int) -> int | None:
        """The row of this rank's hidden states that holds a token, None where another rank has it."""
        return token


class SequenceShards(Tokens):
    """The counted tokens where rank r holds hidden states of tokens r*n..(r+1)*n-1 alone.

    A chunk takes the same number of counted tokens from each rank as long as it has some, so neither the
    gathered hidden states nor their gradients ever exist for the whole sequence.
    """

    def __init__(self, mask_T: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(mask_T, group)
        if self.num_tokens % self.ranks:
            raise ValueError(f"{self.num_tokens} tokens do not divide over {self.ranks} ranks")
        self.rank = group.rank()
        self._of_rank = [(part > 0).nonzero().squeeze(1) for part in mask_T.chunk(self.ranks)]

    @property
    def local_tokens(self) -> int:
        return self.num_tokens // self.ranks

    def chunks(self, size: int) -> Iterator[Chunk]:
        each = max(1, size // self.ranks)
        for start in range(0, max(map(len, self._of_rank), default=0), each):
            parts = [rows[start : start + each] for rows in self._of_rank]
            sent = max(map(len, parts))
            tokens = [part + rank * self.local_tokens for rank, part in enumerate(parts)]
            places = [torch.arange(len(part), device=part.device) + rank * sent for rank, part in enumerate(parts)]
            yield Chunk(torch.cat(tokens), parts[self.rank], sent, torch.cat(places))

    def take(self, hidden_TD: Tensor, chunk: Chunk) -> Tensor:
        sent_SD = hidden_TD.new_zeros(chunk.sent, hidden_TD.shape[1])
        sent_SD[: len(chunk.own)] = hidden_TD.index_select(0, chunk.own)
        gathered = hidden_TD.new_empty(self.ranks * chunk.sent, hidden_TD.shape[1])
        dist.all_gather_into_tensor(gathered, sent_SD, group=self.group)
        return gathered.index_select(0, chunk.places)

    def put(self, gradient_TD: Tensor, chunk: Chunk, gradient_CD: Tensor) -> None:
        spread = gradient_CD.new_zeros(self.ranks * chunk.sent, gradient_CD.shape[1])
        spread.index_copy_(0, chunk.places, gradient_CD)
        own_SD = spread.new_empty(chunk.sent, spread.shape[1])
        dist.reduce_scatter_tensor(own_SD, spread, group=self.group)
        gradient_TD.index_copy_(0, chunk.own, own_SD[: len(chunk.own)].to(gradient_TD.dtype))

    def owner(self, token: int) -> int | None:
        rank, row = divmod(token, self.local_tokens)
        return row if rank == self.rank else None
