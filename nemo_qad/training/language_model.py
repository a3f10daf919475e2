"""The plain language-model loss that trains the embedded teacher from scratch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nemo_qad.errors import UserError
from nemo_qad.models.build import forward_logits
from nemo_qad.training.trainer import Batch


class LanguageModelLoss:
    """Next-token cross-entropy over the true vocabulary and the counted tokens: (sum in nats, count).

    On one rank alone: the embedded teacher is small.
    """

    num_models = 1
    trouble: str | None = None

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, module: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_BSW = forward_logits(module, batch["tokens"])
        logits_TV = logits_BSW.flatten(0, 1)[:, : self.vocab_size].float()
        keep_T = batch["loss_mask"].flatten() > 0
        per_token_T = cross_entropy(logits_TV, batch["labels"].flatten(), reduction="none")
        return torch.where(keep_T, per_token_T, 0).sum(), keep_T.sum()

    def stage(self, module: torch.nn.Module, batch: Batch) -> Tensor:
        raise UserError("parallel.pipeline: the embedded teacher is trained on one rank. Use parallel=single")

    def paired(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()
