"""One optimizer step on Megatron's schedule, and the state that makes it exact to resume.

The loss is a function (module, batch) -> (sum, count); gradients of all micro-batches are summed and
divided once by the total count (Megatron's `calculate_per_token_loss`).

A student's weights may be quantised in place between steps. The truth is then Megatron's main parameters, which BF16
has anyway; in FP32, where a parameter is its own main parameter, a copy of those weights is kept. What is not
training (validation, storing weights) belongs inside `Trainer.latent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.models.forward import Ranks, local_part
from nemo_qad.schema import Precision
from nemo_qad.training.guards import require_finite
from nemo_qad.training.main_parameters import MainParameters, wrapped
from nemo_qad.training.optimizer import OptimizerSettings, build_optimizer
from nemo_qad.training.sharded_state import Load, ShardedState
from nemo_qad.training.student_weights import StudentWeights
from nemo_qad.training.trained import Trained
from nemo_qad.training.whole_state import WholeState

Batch = dict[str, Tensor]


class Loss(Protocol):
    """A micro-batch's contribution. Tensors of a batch [B, L, ...] are the rank's part of the sequence."""

    trouble: str | None  # what was not finite in the last calls, if anything; the sum is NaN then. The caller clears it

    @property
    def num_models(self) -> int:
        """Whose activations go from one pipeline stage to the next, side by side in the batch."""

    def __call__(self, module: torch.nn.Module, batch: Batch, /) -> tuple[Tensor, Tensor]:
        """(sum in nats, count) of this rank's tokens; on the last pipeline stage."""

    def stage(self, module: torch.nn.Module, batch: Batch, /) -> Tensor:
        """What an earlier stage hands on, [L / ranks of sequence parallelism, num_models x B, D]."""

    def paired(self, module: torch.nn.Module, /) -> AbstractContextManager[None]:
        """Inside, a stage's models are given their parts of what it receives."""


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the counted tokens of the step, nats; num_tokens: how many counted."""

    loss: float
    grad_norm: float
    num_tokens: int
    learning_rate: float


class Trainer:
    """Trains `module` in place.

    Args:
        average_decay: above 0 keeps an exponential moving average beside the weights.
        distributed_optimizer: each data-parallel rank keeps and updates a part of the optimizer's state.
        weights: those that are quantised, if the student has any that want care between steps.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        settings: OptimizerSettings,
        loss: Loss,
        *,
        precision: Precision,
        average_decay: float = 0.0,
        distributed_optimizer: bool = False,
        weights: StudentWeights | None = None,
    ) -> None:
        self.module = module
        self.loss = loss
        self.average_decay = average_decay
        self.step = 0  # global batches that were taken, also those that changed nothing
        self.updates = 0  # how often the optimizer has stepped
        self._ranks = Ranks.of(module)
        config: Any = module.config
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = finalize_model_grads
        self._ddp = wrapped(module, distributed=distributed_optimizer)
        self._optimizer, self._scheduler = build_optimizer(
            self._ddp, settings, precision, distributed=distributed_optimizer
        )
        self._main = MainParameters(module, self._ddp, self._optimizer)
        parts = self._main.parts
        self.average = {n: part.values.detach().clone() for n, part in parts.items()} if average_decay else {}
        self._weights = weights
        trained = Trained(module, self._main, self._optimizer, self.average, weights)
        self._whole, self._sharded = WholeState(trained), ShardedState(trained)
        self._in_place = weights is not None and weights.in_place
        self._is_latent = not self._in_place
        # The truth about weights quantised in place whose main values lie in the parameter: of this rank's part.
        self._kept: dict[str, Tensor] = {}
        if weights and weights.in_place:
            mine = [n for n in weights.names if n in parts and parts[n].is_parameter]
            self._kept = {n: parts[n].values.detach().clone() for n in mine}
            weights.quantize()

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over `micro_batches` ([B, S] each).

        Raises:
            NonFiniteStepError: the loss or a gradient is NaN or Inf. UserError: ranks that share samples read other
                ones. The parameters are left as they were; `skip` goes on to the next step.
        """
        assert self._is_latent != self._in_place, "a step inside latent()"
        self._refuse_other_data(micro_batches)
        self.loss.trouble = None
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = self._forward_backward(micro_batches, forward_only=False)
        total, count = self._over_ranks(sums)
        broken = [number for number, (value, _) in enumerate(sums) if not math.isfinite(value)]
        require_finite(self.module, self.step + 1, total, broken, self.loss.trouble)
        learning_rate = self._optimizer.param_groups[0]["lr"]
        for name, truth in self._kept.items():
            self._main.parts[name].write(truth)
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(increment=1)
        self.step, self.updates = self.step + 1, self.updates + 1
        self._after_update()
        return StepResult(total / max(count, 1), float(grad_norm or 0.0), int(count), learning_rate)

    def skip(self) -> None:
        """Passes over the step that `train_step` refused: its samples and its place in the schedule are gone."""
        self._scheduler.step(increment=1)
        self.step += 1

    @torch.no_grad()
    def measure(self, micro_batches: Sequence[Batch]) -> float:
        """The loss of a step's samples under the weights as training has them, nothing being changed."""
        with torch.random.fork_rng(devices=[]):
            sums = self._forward_backward(micro_batches, forward_only=True)
        total, count = self._over_ranks(sums)
        return total / max(count, 1)

    def _forward_backward(self, micro_batches: Sequence[Batch], *, forward_only: bool) -> list[tuple[float, float]]:
        """Through Megatron's schedule: (sum, count) of each micro-batch; nothing before the last stage."""
        num_rows, length = micro_batches[0]["tokens"].shape
        local = [self._local(batch) for batch in micro_batches]
        with self.loss.paired(self.module):
            sums: list[dict[str, Tensor]] = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iter(local),
                model=[self._ddp],
                num_microbatches=len(local),
                seq_length=length,
                micro_batch_size=num_rows * self.loss.num_models,
                forward_only=forward_only,
            )
        return [(float(item["sum"]), float(item["count"])) for item in sums]

    def _local(self, batch: Batch) -> Batch:
        """The rank's part of the sequence, on its device."""
        device = next(self.module.parameters()).device
        return {name: local_part(self.module, value.to(device)) for name, value in batch.items()}

    def _over_ranks(self, sums: list[tuple[float, float]]) -> tuple[float, float]:
        """(sum, count) over micro-batches and ranks that saw other tokens; of a pipeline only the last stage did."""
        total, count = sum(value for value, _ in sums), sum(number for _, number in sums)
        groups = self._ranks.groups
        members = [group for group in (groups.dp_cp, groups.pp) if group.size() > 1]
        if not members:
            return total, count
        both = torch.tensor([total, count], dtype=torch.float64, device=next(self.module.parameters()).device)
        for group in members:
            dist.all_reduce(both, group=group)
        return float(both[0]), float(both[1])

    def _forward_step(self, batches: Iterator[Batch], module: torch.nn.Module) -> tuple[Tensor, Callable]:
        if not self._ranks.is_last_stage:
            return self.loss.stage(module, next(batches)), _no_loss
        total, count = self.loss(module, next(batches))

        def reduce(total: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return total, count.int(), {"sum": total.detach(), "count": count}

        return total, reduce

    def _refuse_other_data(self, micro_batches: Sequence[Batch]) -> None:
        """Ranks of one data-parallel rank share its samples: other tokens on one of them give wrong sums, silently."""
        if dist.get_world_size() == 1:
            return
        mine = [self._ranks.groups.dp.rank(), *(_checksum(batch["tokens"]) for batch in micro_batches)]
        own = torch.tensor(mine, dtype=torch.int64, device=next(self.module.parameters()).device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        first: dict[int, int] = {}
        for rank, found in enumerate(everyone):
            model = first.setdefault(int(found[0]), rank)
            if not torch.equal(found, everyone[model]):
                raise UserError(
                    f"step {self.step + 1}: rank {rank} has read other tokens than rank {model} for the same samples. "
                    "Nothing was updated; see that both read the same data files (data.path, cache_dir)"
                )

    @torch.no_grad()
    def _after_update(self) -> None:
        """The parameters hold the truth: clip it, average it, choose scales by it, keep it, quantise it."""
        weights = self._weights
        if weights and weights.clips:
            self._clip(weights)
        self._update_average()
        if weights:
            weights.refresh(self.step)
            if weights.in_place:
                for name, kept in self._kept.items():
                    kept.copy_(self._main.parts[name].values)
                weights.quantize()

    def _clip(self, weights: StudentWeights) -> None:
        """In the main values and the whole parameters: rounding is monotone, so a parameter clipped to the rounded
        limit is the rounding of its clipped main values, on the ranks that do not have these too."""
        parameters = dict(self.module.named_parameters())
        for name in weights.names:
            weights.clip(name, parameters[name])
            part = self._main.parts.get(name)
            if part and not part.is_parameter:
                weights.clip(name, part.values, part.start)

    @torch.no_grad()
    def _update_average(self) -> None:
        # The first steps count fully (as an unbiased running mean), so that the start does not linger.
        decay = min(self.average_decay, (self.updates - 1) / self.updates)
        for name, average in self.average.items():
            average.lerp_(self._main.parts[name].values, 1 - decay)

    @contextmanager
    def latent(self) -> Iterator[None]:
        """Inside, parameters hold the truth (in BF16: its rounding) and the student quantises them in forward, as
        everything but training expects; on exit weights are quantised in place again, if they were.

        With the distributed optimizer a collective call. Without weights in place nothing happens.
        """
        weights = self._weights
        if weights is None or self._is_latent:
            yield
            return
        self._main.write({n: self._truth(n) for n in weights.names if n in self._main.parts})
        weights.quantize_in_forward()
        self._is_latent = True
        try:
            yield
        finally:
            self._is_latent = False
            weights.quantize()

    def _truth(self, name: str) -> Tensor:
        return self._kept[name] if name in self._kept else self._main.parts[name].values.detach()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the module holds the averaged weights; on exit its own come back bit for bit.

        As inside `latent`, the student quantises them in forward.
        """
        parameters = dict(self.module.named_parameters())
        with self.latent():
            own = {name: p.detach().clone() for name, p in parameters.items()}
            try:
                self._main.write(self.average)
                yield
            finally:
                with torch.no_grad():
                    for name, p in parameters.items():
                        p.copy_(own[name])

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the data's position: whole tensors on the first rank.

        The same names and shapes in every layout, with the distributed optimizer and without. A collective call; other
        ranks get nothing.
        """
        return self._whole.collect(self._truth)

    def saving(self) -> dict[str, Any]:
        """What this rank writes of `state`, and of the random states, as Megatron's sharded tensors; a collective call.

        They are the trainer's own tensors: to be written, or copied, before the next step.
        """
        return self._sharded.to_save(self._truth)

    @torch.no_grad()
    def restore(self, load: Load, step: int, updates: int | None = None, *, same_ranks: bool = True) -> None:
        """The inverse of `saving`, for a fresh trainer of the same settings in any layout; a collective call.

        Args:
            load: fills sharded tensors from the checkpoint (`checkpoint.sharded.load`).
            updates: how often the optimizer had stepped; default: each step.
            same_ranks: as many ranks wrote it.
        """
        self.updates = step if updates is None else updates
        with self.latent():
            self._sharded.restore(load, self.updates, self._kept, same_ranks=same_ranks)
            self._main.gather()
        self._scheduler.step(increment=step)
        self.step = step


def _checksum(tokens_BS: Tensor) -> int:
    """Changes with any token and with their order."""
    tokens = tokens_BS.flatten().to(torch.int64)
    return int((tokens * (torch.arange(len(tokens), device=tokens.device) % 8191 + 1)).sum())


def _no_loss(output: Tensor) -> Tensor:
    raise AssertionError("only the last stage of a pipeline has a loss")
