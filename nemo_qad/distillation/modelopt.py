"""ModelOpt's stock distillation loss, kept as the peer that ours is compared with. Not for training in earnest:

it counts padded vocabulary columns, holds about seven FP32 tensors of the size of the logits, and has no factor
tau^2, so its gradient shrinks with the temperature.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from modelopt.torch.distill.plugins.megatron import LogitsKLLoss
from torch import Tensor


def modelopt_kl(
    teacher_SBv: Tensor, student_SBv: Tensor, mask_BS: Tensor, *, config: TransformerConfig, temperature: float
) -> tuple[Tensor, Tensor]:
    """ModelOpt's LogitsKLLoss over the tokens with mask > 0: (sum in nats, count).

    Args:
        teacher_SBv, student_SBv: this rank's columns of the logits.
        config: the student's, for its tensor-parallel size.
    """
    loss_BS, is_partial, _ = LogitsKLLoss(config, temperature=temperature)(student_SBv, teacher_SBv)
    keep_BS = mask_BS > 0
    total = loss_BS[keep_BS].sum()
    if is_partial:
        total = reduce_from_tensor_model_parallel_region(total)
    return total, keep_BS.sum()
