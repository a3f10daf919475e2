"""The distillation loss: kl(teacher || student) on logits, exact over the true vocabulary.

Legend: T tokens, V true vocabulary, W >= V columns of a logits tensor (the rest is padding).

    p = softmax(teacher / tau),  q = softmax(student / tau)
    loss_t = tau^2 * sum_v p_v * (log p_v - log q_v)          (Hinton et al. 2015, eq. 2..4: the factor
    d loss_t / d student_v = tau * (q_v - p_v)                 tau^2 keeps the gradient's size at any tau)

Losses are returned as (sum, count), so that every reduction over micro-batches and ranks divides once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_kl(
    teacher_TW: Tensor, student_TW: Tensor, mask_T: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The oracle: plain PyTorch in the dtype of its inputs, one expression, differentiable by autograd.

    Returns (sum of tau^2 * kl over tokens with mask > 0, number of those tokens as int64).
    """
    log_p = (teacher_TW[:, :vocab_size] / temperature).log_softmax(-1)
    log_q = (student_TW[:, :vocab_size] / temperature).log_softmax(-1)
    per_token_T = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    keep_T = mask_T > 0
    return per_token_T[keep_T].sum(), keep_T.sum()


class _KlDivergence(torch.autograd.Function):
    """Computes the gradient in the forward pass, so that neither set of log-probabilities is kept."""

    @staticmethod
    def forward(ctx, teacher_TV, student_TV, mask_T, temperature):  # type: ignore[no-untyped-def]
        # FP64 stays FP64 (gradcheck); everything narrower is computed in FP32.
        dtype = torch.promote_types(student_TV.dtype, torch.float32)
        log_p = (teacher_TV.to(dtype) / temperature).log_softmax(-1)
        log_q = (student_TV.to(dtype) / temperature).log_softmax(-1)
        p = log_p.exp()
        per_token_T = (p * log_p.sub_(log_q)).sum(-1) * temperature**2
        # `where` instead of a product: a masked token with NaN logits must still count as zero.
        keep_T = mask_T > 0
        gradient_TV = log_q.exp_().sub_(p).mul_(temperature)
        gradient_TV[~keep_T] = 0
        ctx.save_for_backward(gradient_TV)
        ctx.student_dtype = student_TV.dtype
        return torch.where(keep_T, per_token_T, 0).sum()

    @staticmethod
    def backward(ctx, grad_sum):  # type: ignore[no-untyped-def]
        (gradient_TV,) = ctx.saved_tensors
        return None, (gradient_TV * grad_sum).to(ctx.student_dtype), None, None


def kl_divergence(
    teacher_TW: Tensor, student_TW: Tensor, mask_T: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """kl(teacher || student), equal to `reference_kl` in loss and gradient, with one saved tensor.

    Args:
        teacher_TW: teacher logits [T, W], any floating dtype, no gradient.
        student_TW: student logits [T, W], any floating dtype; not changed in place.
        mask_T: [T]; tokens with a value above 0 count.
        vocab_size: true vocabulary V; columns from V on take no probability and get zero gradient.
        temperature: tau > 0.

    Returns:
        (sum of the loss over counted tokens, FP32 scalar; number of counted tokens, int64 scalar).
        Without a counted token both are 0 and so is the gradient.

    Raises:
        ValueError: shapes differ, or vocab_size is not in 1..W.
    """
    if teacher_TW.shape != student_TW.shape or teacher_TW.shape[:1] != mask_T.shape:
        raise ValueError(
            f"teacher {tuple(teacher_TW.shape)}, student {tuple(student_TW.shape)} and mask "
            f"{tuple(mask_T.shape)} must be [T, W], [T, W] and [T]"
        )
    if not 1 <= vocab_size <= student_TW.shape[-1]:
        raise ValueError(f"vocab_size={vocab_size} must be in 1..{student_TW.shape[-1]}")
    total = _KlDivergence.apply(
        teacher_TW[:, :vocab_size], student_TW[:, :vocab_size], mask_T, temperature
    )
    return total, (mask_T > 0).sum()
