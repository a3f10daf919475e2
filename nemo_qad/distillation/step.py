"""What one micro-batch contributes: the distillation loss of the student against its frozen teacher.

B micro-batch, S sequence, T = B x S tokens, D hidden, v output columns of this rank, K values a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_qad.distillation.kl import NonFiniteError, kl_divergence
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.sparse_kl import SparseLogits, sparse_kl
from nemo_qad.models.build import bare, forward_hidden, forward_logit_shards, output_weight
from nemo_qad.models.context import Documents, local_starts
from nemo_qad.quantization.student import linear_operands
from nemo_qad.schema import Loss as LossName
from nemo_qad.schema import QadConfig
from nemo_qad.training.trainer import Batch


class DistillationLoss:
    """The loss `qad.loss` over the tokens whose loss_mask is above 0, as a (sum, count) in nats.

    The teacher runs without gradients and in eval mode: no dropout, no router state that moves. The sparse losses
    take None: their batches carry teacher_indices [B, S, K], teacher_log_prob [B, S, K] and, for top_k,
    teacher_log_tail [B, S]. A batch may carry positions [B, S] of packed documents.

    Over pipeline stages the activations of teacher and student travel side by side in the batch, teacher first; only
    the last stage projects and compares.
    """

    def __init__(self, qad: QadConfig, *, vocab_size: int, teacher: torch.nn.Module | None) -> None:
        self.qad, self.vocab_size, self.teacher = qad, vocab_size, teacher
        self.trouble: str | None = None
        if teacher is not None:
            teacher.eval()

    @property
    def num_models(self) -> int:
        """Whose activations go from stage to stage."""
        return 1 if self.teacher is None else 2

    def __call__(self, student: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """On the last stage of a pipeline.

        Where hidden states, weights or the teacher's values hold NaN or Inf, `trouble` names the place and the sum is
        NaN, with a gradient that reaches all that a sound one reaches: other ranks wait for it.
        """
        by_name = _KINDS[self.qad.loss]
        try:
            return by_name(student, batch, qad=self.qad, vocab_size=self.vocab_size, teacher=self.teacher)
        except NonFiniteError as error:
            row, position = self._place(student, batch, error.token)
            self.trouble = (
                f"the loss of token {position} of sample {row} of the micro-batch is not finite: {error.source}"
            )
        hidden, weight = output_operands(student, batch["tokens"], _documents(batch))
        nan = (hidden.sum() + weight.sum()).float() * float("nan")
        return nan, (batch["loss_mask"] > 0).sum()

    def _place(self, student: torch.nn.Module, batch: Batch, token: int) -> tuple[int, int]:
        """Row and position in the whole sequence of the token that the loss calls number `token`."""
        shape = batch["tokens"].shape
        numbers_BS = torch.arange(shape.numel()).view(shape)
        order_T = numbers_BS.T.flatten() if self.qad.loss is LossName.kl else _token_order(numbers_BS, student)
        row, position = divmod(int(order_T[token]), shape[1])
        starts = local_starts(shape[1], bare(student).pg_collection.cp)
        chunk, offset = divmod(position, shape[1] // len(starts))
        return row, starts[chunk] + offset

    def stage(self, student: torch.nn.Module, batch: Batch) -> Tensor:
        """What an earlier stage hands on: [L / ranks of sequence parallelism, models x B, D]."""
        tokens, packed = batch["tokens"], _documents(batch)
        hidden = [forward_hidden(student, tokens, packed).transpose(0, 1)]
        if self.teacher is not None:
            with torch.no_grad():
                hidden.insert(0, forward_hidden(self.teacher, tokens, packed).transpose(0, 1))
        return torch.cat(hidden, 1)

    @contextmanager
    def paired(self, student: torch.nn.Module) -> Iterator[None]:
        """Inside, what a stage receives is shared out: the first half of the batch to the teacher."""
        model: Any = bare(student)
        if self.teacher is None or model.pg_collection.pp.size() == 1:
            yield
            return
        teacher: Any = bare(self.teacher)

        def set_input_tensor(received: Any) -> None:
            both = received[0] if isinstance(received, list) else received
            halves = (None, None) if both is None else both.chunk(2, 1)
            teacher.set_input_tensor(None if halves[0] is None else halves[0].detach().contiguous())
            type(model).set_input_tensor(model, None if halves[1] is None else halves[1].contiguous())

        model.set_input_tensor = set_input_tensor
        try:
            yield
        finally:
            del model.set_input_tensor


def distillation_loss(qad: QadConfig, *, vocab_size: int, teacher: torch.nn.Module | None) -> DistillationLoss:
    """The loss of a run's configuration."""
    return DistillationLoss(qad, vocab_size=vocab_size, teacher=teacher)


def _documents(batch: Batch) -> Documents | None:
    return Documents(positions_BL=batch["positions"]) if "positions" in batch else None


def output_operands(
    module: torch.nn.Module, tokens_BS: Tensor, packed: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """What the output layer of a model multiplies: hidden states [T, D] and weight [v, D], fake-quantised if they are.

    Under sequence parallelism T / ranks hidden states, in the order of `_token_order`.
    """
    return output_operands_of(module, forward_hidden(module, tokens_BS, packed).flatten(0, 1))


def output_operands_of(module: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The same of hidden states [..., D] that are there already."""
    return linear_operands(bare(module).output_layer, hidden, output_weight(module))


def _token_order(values_BS: Tensor, module: torch.nn.Module) -> Tensor:
    """Values [B, S, ...] as [T, ...], in the order of the hidden states of all tensor-parallel ranks in turn."""
    config = bare(module).config
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return values_BS.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 2)


def _fused_settings(student: torch.nn.Module, qad: QadConfig, vocab_size: int) -> dict[str, Any]:
    model = bare(student)
    return {
        "vocab_size": vocab_size,
        "temperature": qad.temperature,
        "group": model.pg_collection.tp,
        "sequence_parallel": model.config.sequence_parallel,
        "memory_budget": qad.loss_memory_mib * 2**20,
    }


def _fused(
    student: torch.nn.Module, batch: Batch, *, qad: QadConfig, vocab_size: int, teacher: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        of_teacher = output_operands(teacher, batch["tokens"], _documents(batch))
    return linear_kl(
        *of_teacher,
        *output_operands(student, batch["tokens"], _documents(batch)),
        _token_order(batch["loss_mask"], student),
        reverse=qad.reverse,
        **_fused_settings(student, qad, vocab_size),
    )


def _sparse(
    student: torch.nn.Module, batch: Batch, *, qad: QadConfig, vocab_size: int, teacher: None
) -> tuple[Tensor, Tensor]:
    def in_order(name: str) -> Tensor:
        return _token_order(batch[name], student)

    tail_T = in_order("teacher_log_tail") if qad.loss is LossName.top_k else None
    return sparse_kl(
        SparseLogits(in_order("teacher_indices"), in_order("teacher_log_prob"), tail_T),
        *output_operands(student, batch["tokens"], _documents(batch)),
        in_order("loss_mask"),
        **_fused_settings(student, qad, vocab_size),
    )


def _on_logits(
    student: torch.nn.Module, batch: Batch, *, qad: QadConfig, vocab_size: int, teacher: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher_SBv = forward_logit_shards(teacher, batch["tokens"], _documents(batch))
    return kl_divergence(
        teacher_SBv.flatten(0, 1),
        forward_logit_shards(student, batch["tokens"], _documents(batch)).flatten(0, 1),
        batch["loss_mask"].T.flatten(),
        vocab_size=vocab_size,
        temperature=qad.temperature,
        reverse=qad.reverse,
        group=bare(student).pg_collection.tp,
    )


def _by_modelopt(
    student: torch.nn.Module, batch: Batch, *, qad: QadConfig, vocab_size: int, teacher: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    from nemo_qad.distillation.modelopt import modelopt_kl

    with torch.no_grad():
        teacher_SBv = forward_logit_shards(teacher, batch["tokens"], _documents(batch))
    return modelopt_kl(
        teacher_SBv,
        forward_logit_shards(student, batch["tokens"], _documents(batch)),
        batch["loss_mask"],
        config=bare(student).config,
        temperature=qad.temperature,
    )


_KINDS: dict[LossName, Callable[..., tuple[Tensor, Tensor]]] = {
    LossName.linear_kl: _fused,
    LossName.kl: _on_logits,
    LossName.modelopt: _by_modelopt,
    LossName.top_k: _sparse,
    LossName.sampled: _sparse,
}
