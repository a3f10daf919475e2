"""The distillation loss: kl(teacher || student) on logits, exact over the true vocabulary.

Legend: T tokens, C tokens of a chunk, V true vocabulary, W columns that this rank holds (padding included), B
columns of a block, N parts of the vocabulary (blocks of a rank, or ranks).

    p = softmax(teacher / tau),  q = softmax(student / tau)
    loss_t = tau^2 * sum_v p_v * (log p_v - log q_v)          (Hinton et al. 2015, eq. 2..4: the factor
    d loss_t / d student_v = tau * (q_v - p_v)                 tau^2 keeps the gradient's size at any tau)

and for kl(student || teacher), `reverse`:

    loss_t = tau^2 * sum_v q_v * (log q_v - log p_v)
    d loss_t / d student_v = tau * q_v * (log q_v - log p_v - loss_t / tau^2)

The vocabulary is walked in blocks, each with its own maximum, and the blocks of a rank are put together as
the ranks are: by three numbers a token (`combine`). So one gather a chunk of tokens is all that tensor
parallelism costs, and none in backward, where the gradient is already there.

Losses are returned as (sum, count), so that every reduction over micro-batches and ranks divides once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CPU_BLOCK_BYTES = 2**20  # a block of logits stays in a core's second-level cache
CPU_BLOCK_COLUMNS = 2048  # products over more of them, of very few tokens, lose FP32 digits in MKL
GPU_BLOCK_BYTES = 64 * 2**20
LOGITS_SCRATCH_BYTES = 16 * 2**20


class NonFiniteError(ValueError):
    """A loss is NaN or infinite. `token`: its index in the mask; `source`: what is to blame."""

    def __init__(self, token: int, source: str) -> None:
        super().__init__(f"token {token}: {source}")
        self.token = token
        self.source = source


def reference_kl(
    teacher_TW: Tensor,
    student_TW: Tensor,
    mask_T: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The oracle: plain PyTorch in the dtype of its inputs on one rank, differentiable by autograd.

    Returns (sum of tau^2 * kl over tokens with mask > 0, number of those tokens as int64).
    """
    log_p = (teacher_TW[:, :vocab_size] / temperature).log_softmax(-1)
    log_q = (student_TW[:, :vocab_size] / temperature).log_softmax(-1)
    first, second = (log_q, log_p) if reverse else (log_p, log_q)
    # Where the first distribution is 0 its term is 0, and -inf - x must not reach the product.
    terms = first.exp() * torch.where(first.isneginf(), 0, first - second)
    per_token_T = temperature**2 * terms.sum(-1)
    keep_T = mask_T > 0
    return per_token_T[keep_T].sum(), keep_T.sum()


@dataclass(frozen=True)
class Divergence:
    """Which divergence: kl(teacher || student), or with `reverse` kl(student || teacher), at a temperature."""

    temperature: float = 1.0
    reverse: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number above 0")


class Work:
    """Memory for the passes over one block, made once: large tensors that come and go scatter the heap."""

    def __init__(self) -> None:
        self._narrow = self._wide = torch.empty(0)

    def of(self, block_CB: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors of a block's shape with any content: one of its dtype, one FP64."""
        if self._narrow.numel() < block_CB.numel():
            self._narrow = torch.empty(block_CB.numel(), dtype=block_CB.dtype, device=block_CB.device)
            self._wide = torch.empty(block_CB.numel(), dtype=torch.float64, device=block_CB.device)
        narrow, wide = self._narrow[: block_CB.numel()], self._wide[: block_CB.numel()]
        return narrow.view(block_CB.shape), wide.view(block_CB.shape)


def exponentiate(logits_CB: Tensor, wide_CB: Tensor) -> tuple[Tensor, Tensor]:
    """logits -> exp(logits - maximum), in place; returns ([C, 1] maxima, FP64 [C] sums).

    FP64, as between models that nearly agree the loss is the small difference of two such sums. A row of -inf
    keeps a finite maximum, so that its exponentials are 0 and not NaN.
    """
    maximum_C1 = logits_CB.amax(1, keepdim=True).clamp_(min=torch.finfo(logits_CB.dtype).min)
    logits_CB.sub_(maximum_C1).exp_()
    return maximum_C1, wide_CB.copy_(logits_CB).sum(1)


def compare_block(teacher_CB: Tensor, student_CB: Tensor, divergence: Divergence, work: Work) -> tuple[Tensor, Tensor]:
    """Statistics of one block of columns; overwrites both inputs with what `gradient_block` needs.

    Args:
        teacher_CB, student_CB: logits / tau, FP32 or FP64. Left behind: exp(logits - maximum of the row) of each;
            with `reverse` the teacher's becomes student - teacher instead.

    Returns:
        (FP64 [C, 3]: log-sum-exp of the teacher and of the student over the block, and the mean over the block's
        part of the first distribution of (its logit - the other's); [C, 2]: the maxima that were subtracted).
    """
    difference_CB, wide_CB = work.of(student_CB)
    first_CB, second_CB = (student_CB, teacher_CB) if divergence.reverse else (teacher_CB, student_CB)
    # 0 * -inf is NaN: a logit of -inf in the first distribution has probability 0 and must add 0.
    torch.sub(first_CB, second_CB, out=difference_CB)
    difference_CB.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=torch.finfo(difference_CB.dtype).min)
    maxima, sums = zip(*(exponentiate(logits_CB, wide_CB) for logits_CB in (teacher_CB, student_CB)), strict=True)
    if divergence.reverse:
        teacher_CB.copy_(difference_CB)
    cross_C = wide_CB.copy_(difference_CB.mul_(first_CB)).sum(1) / sums[divergence.reverse].clamp(min=1e-300)
    maxima_C2 = torch.cat(maxima, 1)
    lse_C2 = torch.stack(sums, 1).log() + maxima_C2
    return torch.cat([lse_C2, cross_C[:, None]], 1), maxima_C2


def combine(parts_NC3: Tensor, divergence: Divergence) -> Tensor:
    """The statistics of `compare_block` of a whole from those of its N parts, FP64 [C, 3]."""
    lse_C2 = parts_NC3[..., :2].logsumexp(0)
    first = int(divergence.reverse)
    floor = torch.finfo(lse_C2.dtype).min  # a part without any mass has -inf, and so may a whole rank
    share_NC = (parts_NC3[..., first] - lse_C2[:, first].clamp(min=floor)).exp()
    cross_C = (share_NC * parts_NC3[..., 2]).sum(0)
    return torch.cat([lse_C2, cross_C[:, None]], 1)


def gather_parts(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The same-shaped tensors of all ranks of `group`, stacked: the one collective of a chunk."""
    if group is None or group.size() == 1:
        return part[None]
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole.unflatten(0, (group.size(), part.shape[0]))


def loss_per_token(whole_C3: Tensor, divergence: Divergence) -> Tensor:
    """tau^2 * kl of each token, FP64 [C], from the statistics of the whole vocabulary."""
    lse_teacher_C, lse_student_C, cross_C = whole_C3.unbind(1)
    normalizer_C = lse_teacher_C - lse_student_C
    return divergence.temperature**2 * (cross_C + (normalizer_C if divergence.reverse else -normalizer_C))


def gradient_block(
    teacher_CB: Tensor, student_CB: Tensor, maxima_C2: Tensor, whole_C3: Tensor, divergence: Divergence
) -> Tensor:
    """d loss / d student logits of one block, into and returned as `student_CB`.

    Takes what `compare_block` left of both inputs, the maxima that it returned, and `combine`'s whole.
    """
    dtype = student_CB.dtype
    scale_C2 = (maxima_C2 - whole_C3[:, :2]).exp() * divergence.temperature
    to_p_C1, to_q_C1 = scale_C2.to(dtype).split(1, dim=1)
    student_CB.mul_(to_q_C1)
    if divergence.reverse:
        return student_CB.mul_(teacher_CB.sub_(whole_C3[:, 2:].to(dtype)))
    return student_CB.addcmul_(teacher_CB, to_p_C1, value=-1)


@dataclass(frozen=True)
class Columns:
    """The part of the vocabulary that a rank holds: `width` columns from `first`, `valid` of them not padding."""

    first: int
    width: int
    valid: int

    def blocks(self, size: int) -> Iterator[slice]:
        """The valid columns, `size` at a time."""
        return (slice(start, min(start + size, self.valid)) for start in range(0, self.valid, size))


def local_columns(width: int, vocab_size: int, group: dist.ProcessGroup | None) -> Columns:
    """Where a rank's columns lie: rank r of `group` holds columns r*width.. of the padded vocabulary.

    Raises:
        ValueError: all ranks together have fewer than `vocab_size` columns.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if not 1 <= vocab_size <= ranks * width:
        raise ValueError(f"vocab_size={vocab_size} must be in 1..{ranks * width}, the columns of all {ranks} ranks")
    first = rank * width
    return Columns(first, width, min(max(vocab_size - first, 0), width))


def block_size(num_tokens: int, like: Tensor, itemsize: int) -> int:
    """Columns of a block that suit the caches of the device of `like`."""
    if like.is_cuda:
        return max(64, GPU_BLOCK_BYTES // (num_tokens * itemsize))
    return min(max(64, CPU_BLOCK_BYTES // (num_tokens * itemsize)), CPU_BLOCK_COLUMNS)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What logits are compared in: FP32, or FP64 where the inputs are."""
    return torch.promote_types(dtype, torch.float32)


class _KlOnLogits(torch.autograd.Function):
    """Writes the gradient in the forward pass, chunk by chunk: one tensor of the student's size is kept."""

    @staticmethod
    def forward(ctx, student_TW, teacher_TW, mask_T, columns, divergence, group, with_gradient):  # type: ignore[no-untyped-def]
        dtype = wide(student_TW.dtype)
        per_token_T = torch.zeros(mask_T.shape, dtype=torch.float64, device=student_TW.device)
        gradient_TW = torch.zeros_like(student_TW) if with_gradient else None
        bytes_per_token = 3 * columns.width * dtype.itemsize
        work = Work()
        counted = (mask_T > 0).nonzero().squeeze(1)
        for rows in counted.split(max(1, LOGITS_SCRATCH_BYTES // bytes_per_token)) if len(counted) else ():
            teacher_CV, student_CV = (
                logits_TW[rows, : columns.valid].to(dtype).div_(divergence.temperature)
                for logits_TW in (teacher_TW, student_TW)
            )
            blocks = list(columns.blocks(block_size(len(rows), student_CV, dtype.itemsize)))
            parts = [compare_block(teacher_CV[:, b], student_CV[:, b], divergence, work) for b in blocks]
            whole_C3 = whole_vocabulary([part for part, _ in parts], len(rows), student_CV, divergence, group)
            per_token_T[rows] = loss_per_token(whole_C3, divergence)
            if gradient_TW is not None:
                for b, (_, maxima_C2) in zip(blocks, parts, strict=True):
                    gradient_block(teacher_CV[:, b], student_CV[:, b], maxima_C2, whole_C3, divergence)
                gradient_TW[rows, : columns.valid] = student_CV.to(gradient_TW.dtype)
        ctx.save_for_backward(gradient_TW)
        return per_token_T.to(dtype)

    @staticmethod
    def backward(ctx, grad_T):  # type: ignore[no-untyped-def]
        (gradient_TW,) = ctx.saved_tensors
        scaled_TW = torch.empty_like(gradient_TW)
        # By parts: narrow times FP32 is FP32, and would be another, larger tensor of all logits.
        size = max(1, LOGITS_SCRATCH_BYTES // (16 * gradient_TW.shape[1]))
        for part in (slice(start, start + size) for start in range(0, len(grad_T), size)):
            scaled_TW[part] = gradient_TW[part] * grad_T[part, None]
        return scaled_TW, None, None, None, None, None, None


def whole_vocabulary(
    parts: list[Tensor], num_tokens: int, like: Tensor, divergence: Divergence, group: dist.ProcessGroup | None
) -> Tensor:
    """Statistics [C, 3] over all blocks of all ranks; a rank whose columns are all padding has no block."""
    empty = torch.tensor([-torch.inf, -torch.inf, 0], dtype=torch.float64, device=like.device)
    rank_C3 = combine(torch.stack(parts), divergence) if parts else empty.repeat(num_tokens, 1)
    return combine(gather_parts(rank_C3, group), divergence)


def kl_per_token(
    teacher_TW: Tensor,
    student_TW: Tensor,
    mask_T: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    reverse: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """tau^2 * kl(teacher || student) of each token, equal to `reference_kl` in loss and gradient.

    Args:
        teacher_TW: teacher logits [T, W], any floating dtype, no gradient; -inf is probability 0.
        student_TW: student logits [T, W], any floating dtype; neither is changed.
        mask_T: [T]; tokens with a value above 0 count. The same on all ranks of `group`.
        vocab_size: true vocabulary V; columns from V on take no probability and get zero gradient.
        temperature: tau > 0.
        reverse: kl(student || teacher) instead.
        group: tensor-parallel group. Rank r holds columns r*W..(r+1)*W-1 of the padded vocabulary; every rank
            gets the same losses, and the gradient of its own columns.

    Returns:
        FP32 (FP64 for FP64 inputs) [T] in nats, 0 where the mask is 0.

    Raises:
        ValueError: shapes or sizes do not fit; `NonFiniteError`: the loss of a token is not finite.
    """
    divergence = Divergence(temperature, reverse)
    if teacher_TW.ndim != 2 or student_TW.ndim != 2 or mask_T.ndim != 1:
        raise ValueError("teacher, student and mask must be [T, W], [T, W] and [T]")
    if not len(teacher_TW) == len(student_TW) == len(mask_T):
        raise ValueError(
            f"teacher [T, W], student [T, W] and mask [T] have {len(teacher_TW)}, {len(student_TW)} and "
            f"{len(mask_T)} tokens"
        )
    columns = local_columns(student_TW.shape[1], vocab_size, group)
    if local_columns(teacher_TW.shape[1], vocab_size, group).valid != columns.valid or (
        group is not None and group.size() > 1 and teacher_TW.shape[1] != student_TW.shape[1]
    ):
        raise ValueError(
            f"a rank holds {teacher_TW.shape[1]} teacher and {student_TW.shape[1]} student columns: under tensor "
            "parallelism both models must be padded alike, or a rank compares different words"
        )
    with_gradient = torch.is_grad_enabled() and student_TW.requires_grad
    per_token_T = _KlOnLogits.apply(student_TW, teacher_TW.detach(), mask_T, columns, divergence, group, with_gradient)
    finite_T = per_token_T.detach().isfinite()
    if not finite_T.all():
        raise NonFiniteError(
            int((~finite_T).nonzero()[0]),
            "the loss is not finite: a model's logits hold NaN or Inf, or one gives a word probability 0 where "
            "the other does not",
        )
    return per_token_T


def kl_divergence(teacher_TW: Tensor, student_TW: Tensor, mask_T: Tensor, **settings: object) -> tuple[Tensor, Tensor]:
    """`kl_per_token` with the same arguments, summed: (sum, scalar; number of counted tokens, int64 scalar).

    Without a counted token both are 0 and so is the gradient.
    """
    return kl_per_token(teacher_TW, student_TW, mask_T, **settings).sum(), (mask_T > 0).sum()  # type: ignore[arg-type]
