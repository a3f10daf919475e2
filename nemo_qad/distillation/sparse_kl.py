"""kl(teacher || student) where only K values a token are known of the teacher; the student is whole.

For a teacher that does not fit beside the student: its K values a token are kept, on disk for instance. The
student's logits are needed in full for their normaliser, and are made and dropped a chunk at a time (`fused`).

Legend: T tokens, C tokens of a chunk, K values a token, W columns of logits, B columns of a block, V vocabulary.

top-k: the K largest probabilities p_j, and the rest of the vocabulary as one bucket of probability r. With q_j
of the student and its own rest s = 1 - sum_j q_j, this is the divergence of the two coarser distributions:

    loss = tau^2 * [ sum_j p_j (log p_j - log q_j) + r (log r - log s) ]
    d loss / d logit_v = tau * (q_v - p_v) for the K values,  tau * q_v (1 - r / s) elsewhere

It never exceeds the true divergence, and equals it where both models share out the rest in the same way. The
rest is kept, so a student that moves probability into it is told so.

sampled: K draws j from p, and the ratio r_j = q_j / p_j of each:

    loss = tau^2 / K * sum_j (r_j - 1 - log r_j)
    d loss / d logit_v = tau / K * sum_j (r_j - 1) ([v = j] - q_v)

Both are unbiased: the mean of r over p is 1, so r - 1 adds nothing to the mean of -log r, which is kl(p || q). It
takes away most of the noise (Schulman 2020, "Approximating KL divergence", estimator k3): each term, and its
gradient, vanishes as q_j comes near p_j, as a quantised student's is from the start. The plain gradient
q - (draws / K) would keep the noise of the draws however near the student is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_qad.distillation.fused import MEMORY_BUDGET, fused_loss, not_finite
from nemo_qad.distillation.kl import Columns, Divergence, Work, exponentiate, gather_parts, local_columns
from nemo_qad.distillation.tokens import Chunk, Tokens


@dataclass(frozen=True)
class SparseLogits:
    """What is known of a teacher's distribution at temperature tau over the true vocabulary.

    indices_TK: integers below V. log_prob_TK: log p of those, FP32. log_tail_T: log of the probability outside
    the K values, FP32, -inf if there is none; None says that the K values are draws, with repetition, each of
    weight 1/K.
    """

    indices_TK: Tensor
    log_prob_TK: Tensor
    log_tail_T: Tensor | None

    def check(self, num_tokens: int, vocab_size: int) -> None:
        """Raises ValueError when the shapes do not fit each other, or an index is outside the vocabulary."""
        shape = tuple(self.log_prob_TK.shape)
        if self.indices_TK.shape != self.log_prob_TK.shape or len(shape) != 2 or shape[0] != num_tokens:
            raise ValueError(
                f"teacher: indices {tuple(self.indices_TK.shape)} and log_prob {shape} must both be "
                f"[T, K] with T={num_tokens}"
            )
        if self.log_tail_T is not None and self.log_tail_T.shape != shape[:1]:
            raise ValueError(f"teacher: log_tail {tuple(self.log_tail_T.shape)} must be [T] with T={num_tokens}")
        if self.indices_TK.numel() and not 0 <= int(self.indices_TK.min()) <= int(self.indices_TK.max()) < vocab_size:
            raise ValueError(f"teacher: an index is outside 0..{vocab_size - 1}, the true vocabulary")


def reference_sparse_kl(
    teacher: SparseLogits, student_TW: Tensor, mask_T: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The oracle: plain PyTorch on the student's logits on one rank. Returns (sum, count)."""
    log_q_TV = (student_TW[:, :vocab_size] / temperature).log_softmax(-1)
    index_TK, log_p_TK = teacher.indices_TK.long(), teacher.log_prob_TK.to(log_q_TV.dtype)
    difference_TK = log_p_TK - log_q_TV.gather(1, index_TK)
    if teacher.log_tail_T is None:
        per_token_T = (torch.expm1(-difference_TK) + difference_TK).mean(1)
    else:
        per_token_T = torch.where(log_p_TK.isneginf(), 0, log_p_TK.exp() * difference_TK).sum(1)
        log_s_T = log_q_TV.scatter(1, index_TK, -torch.inf).logsumexp(1)
        log_r_T = teacher.log_tail_T.to(log_q_TV.dtype)
        rest_T = log_r_T.exp() * (log_r_T - log_s_T)
        per_token_T = per_token_T + torch.where(log_r_T.isneginf(), 0, rest_T)
    keep_T = mask_T > 0
    return temperature**2 * per_token_T[keep_T].sum(), keep_T.sum()


class _SparseTeacher:
    """Compares a chunk of student logits with the K values of each of its tokens."""

    num_buffers = 0

    def __init__(self, teacher: SparseLogits, columns: Columns, temperature: float) -> None:
        self.teacher, self.columns, self.temperature = teacher, columns, Divergence(temperature).temperature
        self.has_tail = teacher.log_tail_T is not None
        self.tokens: Tokens
        self.tail_C: Tensor | None = None
        self.work = Work()

    def begin(self, chunk: Chunk, dtype: torch.dtype) -> None:
        self.index_CK = self.teacher.indices_TK[chunk.tokens].long() - self.columns.first
        self.log_p_CK = self.teacher.log_prob_TK[chunk.tokens].double()
        if self.teacher.log_tail_T is not None:
            self.log_tail_C = self.teacher.log_tail_T[chunk.tokens].double()
        # The student's logits at the K values; those of other ranks stay -inf here.
        self.chosen_CK = torch.full(self.log_p_CK.shape, -torch.inf, dtype=dtype, device=self.log_p_CK.device)
        self.rest_parts: list[Tensor] = []
        self.maxima: dict[int, Tensor] = {}

    def _inside(self, block: slice) -> tuple[Tensor, Tensor]:
        """(which of the K values lie in the block, their columns in it; 0 where they do not)."""
        inside_CK = (self.index_CK >= block.start) & (self.index_CK < block.stop)
        return inside_CK, torch.where(inside_CK, self.index_CK - block.start, 0)

    def compare(self, block: slice, student_CB: Tensor) -> None:
        inside_CK, column_CK = self._inside(block)
        self.chosen_CK = torch.where(inside_CK, student_CB.gather(1, column_CK), self.chosen_CK)
        if self.has_tail:
            # Out of the rest: set to -inf. A minimum with +inf leaves a column alone that is only a stand-in.
            out_CK = torch.where(inside_CK, -torch.inf, torch.inf).to(student_CB.dtype)
            student_CB.scatter_reduce_(1, column_CK, out_CK, "amin")
        maximum_C1, sum_C = exponentiate(student_CB, self.work.of(student_CB)[1])
        self.maxima[block.start] = maximum_C1
        self.rest_parts.append(sum_C.log() + maximum_C1[:, 0])

    def loss(self) -> Tensor:
        nothing_C = self.log_p_CK.new_full(self.log_p_CK.shape[:1], -torch.inf)
        rest_C = torch.stack(self.rest_parts).logsumexp(0) if self.rest_parts else nothing_C
        # One rank holds the student's logit of a value, the others -inf: their maximum is the logit.
        parts_RCK = gather_parts(torch.cat([self.chosen_CK.double(), rest_C[:, None]], 1), self.tokens.group)
        rest_C = parts_RCK[..., -1].logsumexp(0)
        chosen_CK = parts_RCK[..., :-1].amax(0)
        loss_C = self._top_k_loss(chosen_CK, rest_C) if self.has_tail else self._sampled_loss(chosen_CK, rest_C)
        return self.temperature**2 * loss_C

    def _top_k_loss(self, chosen_CK: Tensor, rest_C: Tensor) -> Tensor:
        self.lse_C = torch.logaddexp(rest_C, chosen_CK.logsumexp(1))
        p_CK, log_q_CK = self.log_p_CK.exp(), chosen_CK - self.lse_C[:, None]
        # A value of probability 0 has log p = -inf and adds 0.
        top_C = torch.where(self.log_p_CK.isneginf(), 0, p_CK * (self.log_p_CK - log_q_CK)).sum(1)
        log_ratio_C = self.log_tail_C - (rest_C - self.lse_C)  # log (r / s)
        # Outside the K values d loss / d logit = q - r * (q / s); q / s is taken from `rest`, as s may underflow.
        self.of_q_C, self.tail_C, self.rest_C = torch.ones_like(rest_C), self.log_tail_C.exp(), rest_C
        self.at_values_CK = log_q_CK.exp() - p_CK
        return top_C + torch.where(self.log_tail_C.isneginf(), 0, self.tail_C * log_ratio_C)

    def _sampled_loss(self, chosen_CK: Tensor, rest_C: Tensor) -> Tensor:
        self.lse_C = rest_C  # nothing was taken out of the rest
        log_r_CK = chosen_CK - self.lse_C[:, None] - self.log_p_CK
        excess_CK = torch.expm1(log_r_CK)  # r - 1
        self.of_q_C = -excess_CK.mean(1)
        self.at_values_CK = excess_CK / excess_CK.shape[1]
        return (excess_CK - log_r_CK).mean(1)

    def gradient(self, block: slice, student_CB: Tensor) -> Tensor:
        dtype = student_CB.dtype
        maximum_C = self.maxima[block.start][:, 0].double()
        scale_C = (maximum_C - self.lse_C).exp() * self.of_q_C
        if self.tail_C is not None:
            share_C = (maximum_C - self.rest_C).exp()
            scale_C = scale_C - torch.where(self.tail_C > 0, self.tail_C * share_C, 0)
        student_CB.mul_((scale_C * self.temperature).to(dtype)[:, None])
        inside_CK, column_CK = self._inside(block)
        at_values_CK = torch.where(inside_CK, self.at_values_CK * self.temperature, 0)
        return student_CB.scatter_add_(1, column_CK, at_values_CK.to(dtype))

    def weak_points(self, token: int, row: int | None) -> list[tuple[str, bool]]:
        del row  # K values of every token are on every rank
        values_K, tail_T = self.teacher.log_prob_TK[token], self.teacher.log_tail_T
        # log 0 is in order among the top k, and as a tail; a word of probability 0 is never drawn.
        if tail_T is None:
            bad = not_finite(values_K)
        else:
            bad = not bool((values_K < torch.inf).all() and tail_T[token] < torch.inf)
        return [("the teacher's log-probabilities", bad)]


def sparse_kl(
    teacher: SparseLogits,
    student_hidden_TD: Tensor,
    student_weight_vD: Tensor,
    mask_T: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    memory_budget: int = MEMORY_BUDGET,
    chunk_size: int | None = None,
    repeat_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """The loss above summed over the counted tokens, with gradients for the student.

    Args:
        teacher: [T, K] values at the same temperature, the same on all ranks of `group`, for all T tokens of the
            mask under sequence parallelism too.
        Others: as `linear_kl.linear_kl` has them.

    Returns:
        (sum, FP32 or FP64 scalar; number of counted tokens, int64 scalar). Without a counted token both are 0.

    Raises:
        ValueError: shapes, sizes, indices or the budget do not fit; `NonFiniteError`: naming the token and what
            is NaN or Inf.
    """
    teacher.check(len(mask_T), vocab_size)
    columns = local_columns(len(student_weight_vD), vocab_size, group)
    comparison = _SparseTeacher(teacher, columns, temperature)
    return fused_loss(
        comparison,
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
