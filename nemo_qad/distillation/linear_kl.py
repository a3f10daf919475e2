"""kl(teacher || student) from hidden states and output weights: exact, and no logits are ever held.

The same loss as `kl.kl_divergence(teacher_hidden @ teacher_weight.T, student_hidden @ student_weight.T, ...)`,
in loss and in gradients, for any size of the chunks.

Legend: T tokens, C tokens of a chunk, E and D hidden sizes of teacher and student, V true vocabulary, v columns
of this rank, B columns of a block.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_qad.distillation.fused import MEMORY_BUDGET, block_of, fused_loss, not_finite, operand, project
from nemo_qad.distillation.kl import (
    Columns,
    Divergence,
    Work,
    compare_block,
    gradient_block,
    local_columns,
    loss_per_token,
    whole_vocabulary,
)
from nemo_qad.distillation.tokens import Chunk, Tokens


class _DenseTeacher:
    """A teacher known by its hidden states and its output weight."""

    num_buffers = 1

    def __init__(self, hidden_TE: Tensor, weight_vE: Tensor, columns: Columns, divergence: Divergence) -> None:
        self.hidden_TE, self.weight_vE = hidden_TE, weight_vE
        self.columns, self.divergence = columns, divergence
        self.tokens: Tokens
        self.scratch, self.work = hidden_TE.new_empty(0), Work()

    def begin(self, chunk: Chunk, dtype: torch.dtype) -> None:
        taken_CE = self.tokens.take(self.hidden_TE, chunk)
        self.num_tokens = len(taken_CE)
        if len(self.scratch) < self.num_tokens * self.columns.valid:  # the first chunk is the largest
            self.scratch = torch.empty(self.num_tokens * self.columns.valid, dtype=dtype, device=taken_CE.device)
        self.hidden_CE = operand(taken_CE, dtype)
        self.parts: list[Tensor] = []
        self.maxima: dict[int, Tensor] = {}

    def compare(self, block: slice, student_CB: Tensor) -> None:
        teacher_CB = block_of(self.scratch, self.num_tokens, block)
        project(self.hidden_CE, self.weight_vE[block], teacher_CB, self.divergence.temperature)
        part_C3, self.maxima[block.start] = compare_block(teacher_CB, student_CB, self.divergence, self.work)
        self.parts.append(part_C3)

    def loss(self) -> Tensor:
        self.whole_C3 = whole_vocabulary(
            self.parts, self.num_tokens, self.hidden_CE, self.divergence, self.tokens.group
        )
        return loss_per_token(self.whole_C3, self.divergence)

    def gradient(self, block: slice, student_CB: Tensor) -> Tensor:
        teacher_CB = block_of(self.scratch, self.num_tokens, block)
        return gradient_block(teacher_CB, student_CB, self.maxima[block.start], self.whole_C3, self.divergence)

    def weak_points(self, token: int, row: int | None) -> list[tuple[str, bool]]:
        del token
        return [
            ("the teacher's hidden state", row is not None and not_finite(self.hidden_TE, row)),
            ("the teacher's output weight", not_finite(self.weight_vE[: self.columns.valid])),
        ]


def linear_kl(
    teacher_hidden_TE: Tensor,
    teacher_weight_vE: Tensor,
    student_hidden_TD: Tensor,
    student_weight_vD: Tensor,
    mask_T: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    reverse: bool = False,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    memory_budget: int = MEMORY_BUDGET,
    chunk_size: int | None = None,
    repeat_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """tau^2 * kl(teacher || student) summed over the counted tokens, with gradients for the student.

    Masked tokens are dropped before anything is computed from them. Logits are compared in FP32 (FP64 for FP64
    inputs) whatever the inputs' dtype, and the weight's gradient is added up over the chunks in FP32.

    Args:
        teacher_hidden_TE, teacher_weight_vE: [T, E] and [v, E]; no gradient.
        student_hidden_TD, student_weight_vD: [T, D] and [v, D], of one floating dtype.
        mask_T: [T]; tokens with a value above 0 count. The same on all ranks of `group`.
        vocab_size: true vocabulary V; rows of the weights from V on take no probability and get zero gradient.
        temperature: tau > 0; the factor tau^2 is part of the loss (see `kl`).
        reverse: kl(student || teacher) instead.
        group: tensor-parallel group. Rank r holds rows r*v..(r+1)*v-1 of the padded output weights. Every rank
            gets the whole loss, the whole gradient of the hidden states, and that of its own rows of the weight.
        sequence_parallel: hidden states are [T / ranks, ...], rank r holding the r-th part of the mask's tokens,
            and so is their gradient.
        memory_budget: bytes of logits that may exist at a time; the chunks are as large as it allows.
        chunk_size: tokens of a chunk, instead of the budget.
        repeat_backward: allow backward more than once, at the price of a copy of the gradients.

    Returns:
        (sum, FP32 or FP64 scalar; number of counted tokens, int64 scalar). Without a counted token both are 0
        and so are the gradients.

    Raises:
        ValueError: shapes, sizes or the budget do not fit; `NonFiniteError`: naming the token and what is NaN
            or Inf.
    """
    divergence = Divergence(temperature, reverse)
    columns = local_columns(len(student_weight_vD), vocab_size, group)
    _check_teacher(
        teacher_hidden_TE, teacher_weight_vE, student_hidden_TD, student_weight_vD, columns, vocab_size, group
    )
    teacher = _DenseTeacher(teacher_hidden_TE.detach(), teacher_weight_vE.detach(), columns, divergence)
    return fused_loss(
        teacher,
        student_hidden_TD,
        student_weight_vD,
        mask_T,
        columns,
        temperature=temperature,
        group=group,
        sequence_parallel=sequence_parallel,
        memory_budget=memory_budget,
        chunk_size=chunk_size,
        repeat_backward=repeat_backward,
    )


def _check_teacher(
    teacher_hidden_TE: Tensor,
    teacher_weight_vE: Tensor,
    student_hidden_TD: Tensor,
    student_weight_vD: Tensor,
    columns: Columns,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> None:
    if teacher_hidden_TE.ndim != 2 or teacher_weight_vE.ndim != 2:
        raise ValueError("the teacher's hidden states and output weight must be [T, E] and [v, E]")
    if teacher_hidden_TE.shape[1] != teacher_weight_vE.shape[1]:
        raise ValueError(
            f"teacher: hidden states have {teacher_hidden_TE.shape[1]} values a token and the output weight has "
            f"{teacher_weight_vE.shape[1]} a word"
        )
    if len(teacher_hidden_TE) != len(student_hidden_TD):
        raise ValueError(f"{len(teacher_hidden_TE)} teacher and {len(student_hidden_TD)} student tokens differ")
    ranks = 1 if group is None else group.size()
    rows = len(teacher_weight_vE), len(student_weight_vD)
    if local_columns(rows[0], vocab_size, group).valid != columns.valid or (ranks > 1 and rows[0] != rows[1]):
        raise ValueError(
            f"a rank holds {rows[0]} words of the teacher and {rows[1]} of the student: under tensor parallelism both "
            "output weights must be padded alike, or a rank compares different words"
        )
