"""One optimizer step on Megatron's schedule, and the state that makes it exact to resume.

The loss is a function (module, batch) -> (sum, count); gradients of all micro-batches are summed and
divided once by the total count (Megatron's `calculate_per_token_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.schema import Precision
from nemo_qad.training.optimizer import OptimizerSettings, build_optimizer

Batch = dict[str, Tensor]
Loss = Callable[[torch.nn.Module, Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the counted tokens of the step, nats; num_tokens: how many counted."""

    loss: float
    grad_norm: float
    num_tokens: int
    learning_rate: float


class Trainer:
    """Trains `module` in place. `average_decay` > 0 keeps an exponential moving average beside it."""

    def __init__(
        self,
        module: torch.nn.Module,
        settings: OptimizerSettings,
        loss: Loss,
        *,
        precision: Precision,
        average_decay: float = 0.0,
    ) -> None:
        self.module = module
        self.loss = loss
        self.average_decay = average_decay
        self.step = 0
        config: Any = module.config
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = finalize_model_grads
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
        )
        self._optimizer, self._scheduler = build_optimizer(self._ddp, settings, precision)
        # Without BF16 the parameter is its own main parameter.
        self._main = {name: getattr(p, "main_param", p) for name, p in module.named_parameters()}
        self.average = {k: p.detach().clone() for k, p in self._main.items()} if average_decay else {}

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over `micro_batches` ([B, S] each).

        Raises:
            UserError: the loss or the gradient norm is NaN or Inf; the parameters are left as they were.
        """
        device = next(self.module.parameters()).device
        micro_batches = [{k: t.to(device) for k, t in batch.items()} for batch in micro_batches]
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(micro_batches),
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0]["tokens"].shape[1],
            micro_batch_size=micro_batches[0]["tokens"].shape[0],
            forward_only=False,
        )
        total, count = (sum(float(item[key]) for item in sums) for key in ("sum", "count"))
        self._refuse_non_finite(total)
        learning_rate = self._optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(increment=1)
        self.step += 1
        self._update_average()
        return StepResult(total / max(count, 1), float(grad_norm or 0.0), int(count), learning_rate)

    def _forward_step(self, batches: Iterator[Batch], module: torch.nn.Module) -> tuple[Tensor, Callable]:
        total, count = self.loss(module, next(batches))

        def reduce(total: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return total, count.int(), {"sum": total.detach(), "count": count}

        return total, reduce

    def _refuse_non_finite(self, total: float) -> None:
        names = [n for n, p in self.module.named_parameters() if not _gradient(p).isfinite().all()]
        if names or not math.isfinite(total):
            raise UserError(
                f"step {self.step + 1}: the loss is {total} and these gradients are NaN or Inf: "
                f"{', '.join(names[:3]) or 'none'}. Nothing was updated; lower the learning rate, or look at "
                "the data of this step"
            )

    @torch.no_grad()
    def _update_average(self) -> None:
        # The first steps count fully (as an unbiased running mean), so that the start does not linger.
        decay = min(self.average_decay, (self.step - 1) / self.step)
        for name, average in self.average.items():
            average.lerp_(self._main[name], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the module holds the averaged weights; on exit its own come back bit for bit."""
        parameters = dict(self.module.named_parameters())
        own = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            with torch.no_grad():
                for name, average in self.average.items():
                    parameters[name].copy_(average)
            yield
        finally:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(own[name])

    def _adam_states(self) -> dict[int, dict[str, Tensor]]:
        optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return {id(p): s for o in optimizers for p, s in o.optimizer.state.items()}

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the data's position: name -> tensor."""
        tensors: dict[str, Tensor] = {}
        adam = self._adam_states()
        for name, p in self._main.items():
            tensors[f"main.{name}"] = p.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = adam[id(p)][key]
        tensors |= {f"average.{name}": t for name, t in self.average.items()}
        tensors |= {f"buffer.{n}": b for n, b in self.module.named_buffers() if n.endswith("expert_bias")}
        tensors["rng"] = torch.get_rng_state()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], step: int) -> None:
        """The inverse of `state`, for a fresh trainer of the same settings.

        Raises:
            UserError: a tensor is missing, so the checkpoint belongs to another model.
        """
        try:
            buffers = dict(self.module.named_buffers())
            optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
            owner = {
                id(p): o.optimizer for o in optimizers for g in o.optimizer.param_groups for p in g["params"]
            }
            for name, p in self.module.named_parameters():
                main = self._main[name]
                main.copy_(tensors[f"main.{name}"])
                p.copy_(main)
                # Every parameter has a step of its own: a shared tensor would be advanced by each of them.
                owner[id(main)].state[main] = {
                    "step": torch.tensor(float(step)),
                    **{k: tensors[f"{k}.{name}"].clone() for k in ("exp_avg", "exp_avg_sq")},
                }
            for name, average in self.average.items():
                average.copy_(tensors[f"average.{name}"])
            for key in (k for k in tensors if k.startswith("buffer.")):
                buffers[key.removeprefix("buffer.")].copy_(tensors[key])
            torch.set_rng_state(tensors["rng"])
        except KeyError as error:
            raise UserError(f"the checkpoint lacks {error}: it belongs to another model or setting") from None
        self._scheduler.step(increment=step)
        self.step = step


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Where Megatron's DDP accumulates a parameter's gradient."""
    return parameter.main_grad  # type: ignore[attr-defined]
