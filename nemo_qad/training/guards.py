"""What must not go unnoticed in training: values that are not finite, and a loss that jumps when a run is continued."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nemo_qad import agreement
from nemo_qad.errors import UserError, show
from nemo_qad.models.placement import Placement


class NonFiniteStepError(UserError):
    """The loss or a gradient of a step is NaN or Inf on some rank; nothing was updated. The same on every rank."""


def require_finite(
    module: torch.nn.Module, step: int, total: float, broken: Sequence[int], trouble: str | None
) -> None:
    """Looks at the loss and at every gradient; a collective call.

    Args:
        total: of the loss, over all ranks.
        broken: numbers of this rank's micro-batches whose loss is not finite.
        trouble: what the loss says of the place.

    Raises:
        NonFiniteStepError: naming rank, layers and micro-batch.
    """
    sound = [bool(p.main_grad.isfinite().all()) for p in module.parameters()]  # type: ignore[attr-defined]
    if not agreement.any_rank(not (math.isfinite(total) and all(sound) and not broken)):
        return
    place = Placement(module)
    names = [place.global_name(n) for (n, _), fine in zip(module.named_parameters(), sound, strict=True) if not fine]
    found = [
        _described(rank, names, broken, trouble)
        for rank, (names, broken, trouble) in enumerate(agreement.of_all((names, list(broken), trouble)))
        if names or broken or trouble
    ]
    raise NonFiniteStepError(
        f"step {step}: the loss is {total}. {'; '.join(found[:3])}. Nothing was updated. Lower qad.learning_rate, look "
        "at the data of this step, or let such steps be passed over with qad.max_skipped_steps"
    )


def _described(rank: int, names: list[str], broken: list[int], trouble: str | None) -> str:
    parts = [f"micro-batch {', '.join(map(str, broken))}"] if broken else []
    parts += [trouble] if trouble else []
    parts += [f"gradients of {show(names)}"] if names else []
    return f"rank {rank}: NaN or Inf in {'; '.join(parts)}"


def require_no_jump(now: float, before: float, limit: float, step: int) -> None:
    """Compares the loss of the last step's samples, measured again after a checkpoint was read, with what it was.

    The same samples, as the losses of two batches may differ by more than `limit` without anything being wrong.

    Raises:
        UserError: it is more than `limit` times as large, or not finite.
    """
    if math.isfinite(now) and now <= limit * before + 1e-6:
        return
    raise UserError(
        f"The samples of step {step} had a loss of {before:.6g} when it was saved and have {now:.6g} with what its "
        f"checkpoint gives, more than qad.max_loss_jump={limit:g} times as much: weights, scales, teacher or data are "
        "not what they were. Nothing was changed. Continue with what the run was started with, or raise "
        "qad.max_loss_jump if you know why"
    )
