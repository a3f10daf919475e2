"""How close a student is to its teacher, and how well either predicts held-out text.

N valid tokens (loss_mask > 0), S sequence, B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_qad.errors import UserError

CHUNK = 512  # tokens whose logits and log-probabilities exist at one time


@dataclass(frozen=True)
class ProjectedLogits:
    """Logits that are computed where they are looked at: hidden [..., D] times the output weight [v, D].

    Indexing takes tokens, `float` makes their logits FP32. A batch of these is D values a token, not V. Over
    tensor-parallel ranks each has v columns, and `float` is a collective call of `group` for the same tokens.
    """

    hidden: Tensor
    weight: Tensor
    vocab_size: int
    group: dist.ProcessGroup | None = None

    def __getitem__(self, tokens: slice | Tensor) -> ProjectedLogits:
        return replace(self, hidden=self.hidden[tokens])

    def float(self) -> Tensor:
        logits = torch.nn.functional.linear(self.hidden, self.weight)
        if self.group is not None and self.group.size() > 1:
            parts = [torch.empty_like(logits) for _ in range(self.group.size())]
            dist.all_gather(parts, logits, group=self.group)
            logits = torch.cat(parts, dim=-1)
        return logits[..., : self.vocab_size].float()

    @property
    def device(self) -> torch.device:
        return self.hidden.device


# tokens int64 [B, S] -> logits float32 [B, S, V], or what makes them; None on a pipeline stage that has none
LogitsFn = Callable[[Tensor], Tensor | ProjectedLogits | None]
Total = Callable[[Sequence[float]], list[float]]  # of what each rank measured, the same on all of them


@dataclass(frozen=True)
class HeldOut:
    """Means over the valid tokens. `kl`: KL(teacher || student) in nats, None where there is no teacher.

    `loss`: the student's cross-entropy in nats. `accuracy`: share of tokens whose most likely guess is right.
    """

    kl: float | None
    loss: float
    perplexity: float
    accuracy: float
    num_tokens: int


@torch.no_grad()
def held_out(
    student: LogitsFn, teacher: LogitsFn | None, batches: Iterable[dict[str, Tensor]], total: Total = list
) -> HeldOut:
    """Measures on held-out batches; at most one batch of logits of each model exists at a time, of a model that
    returns `ProjectedLogits` those of `CHUNK` tokens.

    Log-probabilities are taken in float32 over the true vocabulary, sums over tokens in float64.

    Args:
        batches: "tokens" and "labels" int64 [B, S], "loss_mask" [B, S]; tokens with mask 0 do not count.
        total: adds up what ranks measured, each on batches of its own; a collective call.
    Raises:
        UserError: no token is valid, or a model's logits are not finite.
    """
    kl = loss = num_right = num_tokens = 0.0
    for batch in batches:
        valid_BS = batch["loss_mask"] > 0
        student_NV = _valid_logits(student, batch["tokens"], valid_BS)
        teacher_NV = None if teacher is None else _valid_logits(teacher, batch["tokens"], valid_BS)
        if student_NV is None:
            continue
        labels_N = batch["labels"][valid_BS].to(student_NV.device)
        for start in range(0, labels_N.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            log_q_NV = student_NV[part].float().log_softmax(dim=-1)
            chosen_N = log_q_NV.gather(-1, labels_N[part, None])
            loss -= float(chosen_N.sum(dtype=torch.float64))
            num_right += float((log_q_NV.argmax(dim=-1) == labels_N[part]).sum())
            if teacher_NV is not None:
                kl += _kl_sum(teacher_NV[part].float().log_softmax(dim=-1), log_q_NV)
        num_tokens += labels_N.numel()
    kl, loss, num_right, num_tokens = total((kl, loss, num_right, num_tokens))
    if num_tokens == 0:
        raise UserError("No held-out token is valid (loss_mask is 0 everywhere): give held-out text that counts.")
    if not math.isfinite(loss) or not math.isfinite(kl):
        raise UserError(
            f"Held-out loss {loss}, KL {kl}: a model gives logits that are not finite. Its weights are damaged "
            "or its training diverged: lower the learning rate, or load the weights again."
        )
    mean_loss = loss / num_tokens
    perplexity = math.exp(mean_loss) if mean_loss < 700 else math.inf
    mean_kl = None if teacher is None else kl / num_tokens
    return HeldOut(mean_kl, mean_loss, perplexity, num_right / num_tokens, int(num_tokens))


def _valid_logits(model: LogitsFn, tokens_BS: Tensor, valid_BS: Tensor) -> Tensor | ProjectedLogits | None:
    logits_BSV = model(tokens_BS)
    return None if logits_BSV is None else logits_BSV[valid_BS.to(logits_BSV.device)]


def _kl_sum(log_p_NV: Tensor, log_q_NV: Tensor) -> float:
    """sum_n sum_v p (log p - log q), where p = 0 counts as 0 even if log p is -inf."""
    terms_NV = torch.where(log_p_NV.isneginf(), 0.0, log_p_NV.exp() * (log_p_NV - log_q_NV))
    return float(terms_NV.sum(dtype=torch.float64))
