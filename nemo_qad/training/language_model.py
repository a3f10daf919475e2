"""The plain language-model loss that trains the embedded teacher from scratch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nemo_qad.models.build import forward_logits
from nemo_qad.training.trainer import Batch, Loss


def language_model_loss(*, vocab_size: int) -> Loss:
    """Next-token cross-entropy over the true vocabulary and the counted tokens: (sum in nats, count)."""

    def loss(module: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_BSW = forward_logits(module, batch["tokens"])
        logits_TV = logits_BSW.flatten(0, 1)[:, :vocab_size].float()
        keep_T = batch["loss_mask"].flatten() > 0
        per_token_T = cross_entropy(logits_TV, batch["labels"].flatten(), reduction="none")
        return torch.where(keep_T, per_token_T, 0).sum(), keep_T.sum()

    return loss
