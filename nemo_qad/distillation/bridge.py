"""Our loss in Megatron-Bridge's training loop: `pretrain(config, DistillationForwardStep(...))`.

Bridge calls a forward step once a micro-batch, in evaluation too, and gets (output, loss function). The loss
function makes (sum, count, report) of the output; Megatron-Core differentiates the sum and divides the gradients
once, by the count of the global batch. A report of two numbers is summed over micro-batches and ranks, and divided.
No name of Bridge is part of this interface, so Megatron-Core is all that is imported.

Legend: B sequences, S tokens of a sequence, s those whose hidden states this rank holds (S / TP under sequence
parallelism), T = s x B, D hidden, v words of this rank, R ranks whose hidden states the output layer gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config, unwrap_model
from torch import Tensor, nn

from nemo_qad.distillation.fused import MEMORY_BUDGET
from nemo_qad.distillation.kl import NonFiniteError
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.errors import UserError
from nemo_qad.quantization.student import linear_operands

Batch = dict[str, Any]
LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]

# Settings of a model under which the loss would be wrong: (field, values that are fine, why, remedy).
_UNSUPPORTED = (
    ("pipeline_model_parallel_size", (1,), "the teacher's hidden states do not travel between stages", "Use 1"),
    ("overlap_moe_expert_parallel_comm", (False,), "the schedule would run the model in parts", "Use False"),
    ("mtp_num_layers", (None, 0), "the loss says nothing about tokens further ahead", "Build the model without MTP"),
    ("final_logit_softcapping", (None, 0), "the loss takes logits without a cap", "Use another model"),
    ("use_mup", (False,), "the loss takes logits without a factor", "Use another model"),
    ("cuda_graph_impl", ("none", "local", "transformer_engine"), "each step counts other tokens", "Use none"),
)


class DistillationForwardStep:
    """kl(teacher || student) of a frozen teacher, from hidden states and output weights: no logits are held.

    The loss is the mean over all tokens of the global batch whose loss_mask is above 0; labels are not read.

    Args:
        teacher: a Megatron-Core model with an output layer, or a function that builds one. It is called at the first
            micro-batch, when Bridge has made the process groups. The model must be sharded as the student is.
        vocab_size: true vocabulary, without the padding of the output layers.
        temperature, reverse, memory_budget: see `linear_kl`. A GPU wants more than the default budget.
    """

    def __init__(
        self, teacher: nn.Module | Callable[[], nn.Module], *, vocab_size: int, temperature: float = 1.0,
        reverse: bool = False, memory_budget: int = MEMORY_BUDGET,
    ) -> None:  # fmt: skip
        self.teacher = teacher
        self.settings: dict[str, Any] = {"vocab_size": vocab_size, "temperature": temperature}
        self.settings |= {"reverse": reverse, "memory_budget": memory_budget}

    def __call__(
        self, data_iterator: Iterator[Batch], model: nn.Module, return_schedule_plan: bool = False
    ) -> tuple[Tensor, LossFunction]:
        """One micro-batch: a dict of [B, S] tensors, with attention_mask (or None) as the model takes it.

        Raises:
            UserError: a setting under which the loss would be wrong, or a loss that is NaN or Inf.
        """
        if not isinstance(self.teacher, nn.Module):
            self.teacher = self.teacher()
        refuse_unsupported("teacher", self.teacher.eval().requires_grad_(False))
        refuse_unsupported("student", model)
        if not get_model_config(model).calculate_per_token_loss:
            raise UserError(
                "student: calculate_per_token_loss=False is not supported: a micro-batch of few counted tokens would "
                "weigh as much as a full one. Use True, and average_in_collective=False."
            )
        batch = _next_batch(data_iterator, model)
        with torch.no_grad():
            teacher = output_operands("teacher", self.teacher, batch)
        student = output_operands("student", model, batch)
        layer: Any = unwrap_model(model).output_layer
        mask_T = batch["loss_mask"].t().flatten()  # position by position, as hidden states and their shards are
        settings = {"group": layer.tp_group, "sequence_parallel": layer.sequence_parallel, **self.settings}
        try:
            total, count = linear_kl(*teacher, *student, mask_T, **settings)
        except NonFiniteError as error:
            position, sequence = divmod(error.token, len(batch["loss_mask"]))
            raise UserError(f"sequence {sequence}, position {position} of a micro-batch: {error.source}") from error
        report = {"kl": torch.stack([total.detach(), count.to(total)])}
        return total, lambda output: (output, count.int(), report)


def refuse_unsupported(name: str, model: nn.Module) -> None:
    """Raises UserError for a model, wrapped or not, with a setting under which the loss would be wrong."""
    config = get_model_config(model)
    for field, fine, why, remedy in _UNSUPPORTED:
        value = getattr(config, field, fine[0])
        if value not in fine:
            raise UserError(f"{name}: {field}={value} is not supported: {why}. {remedy}.")
    if "FullyShardedDataParallel" in type(model).__name__:
        raise UserError(f"{name}: {type(model).__name__} is not supported: it frees weights after use. Use DDP.")
    if not hasattr(unwrap_model(model), "output_layer"):
        raise UserError(f"{name}: {type(unwrap_model(model)).__name__} has no output_layer. Use a language model.")


def _next_batch(data_iterator: Iterator[Batch], model: nn.Module) -> Batch:
    """The next micro-batch on the model's device, cut to this rank's part of the context."""
    batch = next(data_iterator)
    if any(key.startswith("cu_seqlens") and value is not None for key, value in batch.items()):
        raise UserError("cu_seqlens in a batch: packed sequences are not supported. Turn packing off in the dataset.")
    device, names = next(model.parameters()).device, ("tokens", "loss_mask", "attention_mask", "position_ids")
    kept = {k: batch[k].to(device, non_blocking=True) for k in names if batch.get(k) is not None}
    return get_batch_on_this_cp_rank(kept, is_hybrid_cp=False, cp_group=unwrap_model(model).pg_collection.cp)


def output_operands(name: str, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the output layer multiplies: hidden states [T, D] and weight [v, D].

    The whole model runs, wrappers included, and a pre-forward hook keeps the output layer's inputs and leaves it one
    position to project. GPTModel has an argument for this (output_processor), but HybridModel has not; and a layer
    that is not called does not wait for its weight where DDP gathers parameters during forward.
    """
    layer: Any = unwrap_model(model).output_layer
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(layer: Any, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        weight = kwargs.get("weight")  # given where it is shared with the embedding
        kept.append((args[0], layer.weight if weight is None else weight))
        return (args[0][:1],), {**kwargs, "runtime_gather_output": False}

    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        positions, mask = batch.get("position_ids"), batch.get("attention_mask")
        logits_BRv = model(input_ids=batch["tokens"], position_ids=positions, attention_mask=mask)
    finally:
        hook.remove()
    hidden_sBD, weight_vD = linear_operands(layer, *kept[0])
    own_Bv = logits_BRv[:, layer.tp_group.rank() if layer.sequence_parallel else 0].detach().float()
    product_Bv = (hidden_sBD[0] @ weight_vD.t()).detach().float()
    if (own_Bv - product_Bv).norm() > 0.01 * product_Bv.norm():  # false for NaN, of which linear_kl says more
        raise UserError(
            f"{name}: its logits are not its hidden states times its output weight, so the loss would be another "
            "model's. Use a model without factors, caps or adapters on its logits."
        )
    return hidden_sBD.flatten(0, 1), weight_vD
