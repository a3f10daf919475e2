"""Inputs, FP64 truths and measures for the tests of the distillation losses.

Legend: T tokens, D hidden size, V true vocabulary, W columns (padding included), K values a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nemo_qad.distillation.sparse_kl import SparseLogits


def normal(*shape: int, seed: int = 0) -> Tensor:
    """FP64 noise, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_tokens(num_tokens: int) -> Tensor:
    """A loss mask that keeps the first token and about two of three others."""
    mask_T = (torch.rand(num_tokens, generator=torch.Generator().manual_seed(3)) > 0.35).float()
    mask_T[0] = 1
    return mask_T


def logit_pair(num_tokens: int, width: int, *, noise: float = 0.5, dtype: torch.dtype = torch.float64) -> tuple:
    """(teacher [T, W], student [T, W] with gradient, mask [T]): logits that `noise` tells apart."""
    teacher_TW = 3 * normal(num_tokens, width, seed=7)
    student_TW = teacher_TW + noise * normal(num_tokens, width, seed=8)
    return teacher_TW.to(dtype), student_TW.to(dtype).requires_grad_(), some_tokens(num_tokens)


@dataclass(frozen=True)
class Heads:
    """Hidden states and output weights of two models, and a mask: what `linear_kl` takes, in its order."""

    teacher_hidden_TD: Tensor
    teacher_weight_WD: Tensor
    student_hidden_TD: Tensor
    student_weight_WD: Tensor
    mask_T: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        fields = ("teacher_hidden_TD", "teacher_weight_WD", "student_hidden_TD", "student_weight_WD", "mask_T")
        return tuple(getattr(self, name) for name in fields)

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        """What has a gradient."""
        return self.student_hidden_TD, self.student_weight_WD

    def to(self, dtype: torch.dtype) -> Heads:
        """The same values in another dtype, with leaves of their own."""
        teacher_hidden, teacher_weight, *leaves = (x.detach().to(dtype, copy=True) for x in self.inputs[:4])
        return Heads(teacher_hidden, teacher_weight, *(x.requires_grad_() for x in leaves), self.mask_T)

    def with_(self, **changes: Tensor) -> Heads:
        return replace(self, **changes)

    def logits(self) -> tuple[Tensor, Tensor]:
        """(teacher, student) [T, W], computed in the dtype of the inputs."""
        return (
            F.linear(self.teacher_hidden_TD, self.teacher_weight_WD),
            F.linear(self.student_hidden_TD, self.student_weight_WD),
        )


def heads(num_tokens: int, width: int, hidden: int = 16, *, noise: float = 0.3, scale: float = 2.0) -> Heads:
    """FP64 models whose logits have a spread of about `scale`, the student's parts off by `noise` of themselves."""
    teacher_hidden, teacher_weight = normal(num_tokens, hidden, seed=1), normal(width, hidden, seed=2)
    teacher_weight *= scale / hidden**0.5
    student_hidden = teacher_hidden + noise * normal(num_tokens, hidden, seed=3)
    student_weight = teacher_weight + noise * scale / hidden**0.5 * normal(width, hidden, seed=4)
    return Heads(
        teacher_hidden,
        teacher_weight,
        student_hidden.requires_grad_(),
        student_weight.requires_grad_(),
        some_tokens(num_tokens),
    )


def as_head(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a weight whose product is these logits, exactly."""
    return torch.eye(len(logits_TV), dtype=logits_TV.dtype), logits_TV.detach().T.contiguous()


def kl_by_hand(
    teacher_TW: Tensor, student_TW: Tensor, mask_T: Tensor, vocab: int, tau: float = 1.0, reverse: bool = False
) -> Tensor:
    """The definition, written with nothing but exp, sum and log."""
    p = torch.exp(teacher_TW[:, :vocab] / tau)
    q = torch.exp(student_TW[:, :vocab] / tau)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if reverse:
        p, q = q, p
    return tau**2 * (p * torch.log(p / q)).sum(-1)[mask_T > 0].sum()


def sparse_kl_by_hand(teacher: SparseLogits, student_TV: Tensor, mask_T: Tensor, tau: float = 1.0) -> Tensor:
    """kl of K words and one bucket of all others, or the mean of r - 1 - log r over K draws, r = q / p; FP64."""
    index_TK, log_p_TK = teacher.indices_TK.long(), teacher.log_prob_TK.double()
    q_TV = torch.exp(student_TV / tau)
    q_TV = q_TV / q_TV.sum(-1, keepdim=True)
    q_TK, p_TK = q_TV.gather(1, index_TK), torch.exp(log_p_TK)
    if teacher.log_tail_T is None:
        per_token_T = (q_TK / p_TK - 1 - torch.log(q_TK / p_TK)).mean(1)
    else:
        r_T, s_T = teacher.log_tail_T.double().exp(), (q_TV * torch.ones_like(q_TV).scatter(1, index_TK, 0)).sum(1)
        rest_T = torch.where(r_T > 0, r_T * torch.log(r_T.clamp(min=1e-300) / s_T.clamp(min=1e-300)), 0)
        top_TK = torch.where(p_TK > 0, p_TK * torch.log(p_TK.clamp(min=1e-300) / q_TK), 0)
        per_token_T = top_TK.sum(1) + rest_T
    return tau**2 * per_token_T[mask_T > 0].sum()


def naive_kl(teacher_TW: Tensor, student_TW: Tensor, mask_T: Tensor, vocab: int) -> Tensor:
    """What most people write: log_softmax in FP32 and kl_div."""
    log_p = teacher_TW[:, :vocab].float().log_softmax(-1)
    log_q = student_TW[:, :vocab].float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)[mask_T > 0].sum()


def with_gradients(total: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """[loss, its gradient for each leaf]."""
    return [total.detach(), *torch.autograd.grad(total, leaves)]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Norm of the difference over the norm of the truth, for a loss and each gradient."""
    pairs = zip(found, truth, strict=True)
    return [((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs]


@dataclass(frozen=True)
class Allocated:
    """Bytes that PyTorch's CPU allocator gave out during a call: at most at once, and in the largest piece."""

    peak: int
    largest: int


def allocated(call: Callable[[], object]) -> Allocated:
    """Every allocation of a call as the profiler records it: exact, and the same at each run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Allocated(peak, max(event.nbytes() for event in events))
