"""What one micro-batch contributes: the distillation loss of the student against its frozen teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_qad.distillation.kl import kl_divergence
from nemo_qad.models.build import forward_logits
from nemo_qad.training.trainer import Batch, Loss


def distillation_loss(teacher: torch.nn.Module, *, vocab_size: int, temperature: float) -> Loss:
    """kl(teacher || student) over the tokens whose loss_mask is above 0, as a (sum, count) in nats.

    The teacher runs without gradients and in eval mode: no dropout, no router state that moves.
    """
    teacher.eval()

    def loss(student: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_BSW = forward_logits(teacher, batch["tokens"])
        student_BSW = forward_logits(student, batch["tokens"])
        return kl_divergence(
            teacher_BSW.flatten(0, 1),
            student_BSW.flatten(0, 1),
            batch["loss_mask"].flatten(),
            vocab_size=vocab_size,
            temperature=temperature,
        )

    return loss
