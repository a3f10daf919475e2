"""A sequence over context-parallel ranks, and the documents packed in it.

Megatron-Core cuts a sequence of S tokens into 2 x CP chunks; CP rank r holds chunks r and 2 CP - 1 - r, in this order,
so that causal attention costs every rank the same ("zigzag"). L = S / CP tokens are local.

Documents are told by positions [B, S], which count from 0 in each document. Attention sees the tokens of a document
alone, and Mamba's convolution and state start anew at position 0. Positions travel as Megatron-Core's
`packed_seq_params`, which every layer passes on and activation recompute keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class Documents(PackedSeqParams):
    """Positions of the local tokens [B, L] in their documents, int64, zigzag like the tokens.

    `qkv_format` is sbhd: our layers keep [L, B, ...] and look at positions, while Megatron's packed format (thd) would
    flatten them.
    """

    positions_BL: Tensor | None = None

    def __post_init__(self) -> None:
        self.qkv_format = "sbhd"


def chunk_numbers(group: dist.ProcessGroup) -> tuple[int, int]:
    """The two chunks of 2 x CP that this rank holds."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def split_sequence(whole: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's part of a tensor over the whole sequence. On one rank it is the tensor itself.

    Raises:
        ValueError: the sequence does not divide into 2 x CP chunks.
    """
    if group.size() == 1:
        return whole
    chunks = 2 * group.size()
    if whole.shape[dim] % chunks:
        raise ValueError(f"a sequence of {whole.shape[dim]} tokens does not divide into {chunks} chunks")
    pieces = whole.chunk(chunks, dim)
    return torch.cat([pieces[number] for number in chunk_numbers(group)], dim)


def join_sequence(local: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """The tensor over the whole sequence, without gradients; a collective call of the context-parallel ranks."""
    if group.size() == 1:
        return local
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local.detach().contiguous(), group=group)
    first, second = zip(*(part.chunk(2, dim) for part in gathered), strict=True)
    return torch.cat([*first, *reversed(second)], dim)


def local_starts(length: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Where this rank's chunks begin in the whole sequence, of `length` local tokens in all."""
    if group.size() == 1:
        return (0,)
    size = length // 2
    return tuple(number * size for number in chunk_numbers(group))
