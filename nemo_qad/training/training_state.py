"""Everything that the next step depends on, but the data's position, as whole tensors that read in any layout.

Names are global ones behind a kind: main.NAME, exp_avg.NAME, exp_avg_sq.NAME, average.NAME (FP32, in the shape of the
whole parameter, however tensor, expert and data parallelism had cut it), buffer.NAME, scale.NAME, rng.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from nemo_qad.models.placement import is_expert
from nemo_qad.models.whole import Cut, assembled, gather, own_parts, parameter_cut
from nemo_qad.training.main_parameters import MainParameters, MainPart, chained
from nemo_qad.training.student_weights import StudentWeights

ADAM = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Reads and writes the state of one trainer, on all ranks together."""

    def __init__(
        self,
        module: nn.Module,
        main: MainParameters,
        optimizer: MegatronOptimizer,
        average: dict[str, Tensor],
        weights: StudentWeights | None,
    ) -> None:
        self._module, self._main, self._optimizer = module, main, optimizer
        self._average, self._weights = average, weights

    def collect(self, truth: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The state on the first rank, nothing on the others; a collective call.

        Args:
            truth: this rank's main values of a parameter of which it has a part.
        """
        adam = {id(p): s for o in chained(self._optimizer) for p, s in o.optimizer.state.items()}
        tensors = self._gathered("main", lambda name, part: truth(name))
        for key in ADAM:
            tensors |= self._gathered(key, lambda name, part, key=key: adam[id(part.values)][key])  # type: ignore[misc]
        if self._average:
            tensors |= self._gathered("average", lambda name, part: self._average[name])
        biases = {n: b for n, b in self._module.named_buffers() if n.endswith("expert_bias")}
        tensors |= _named("buffer", gather(self._module, biases, lambda name: None))
        if self._weights and self._weights.scales():
            scales = self._weights.scales()
            tensors |= _named("scale", gather(self._module, scales, self._weights.scale_cut()))
        return tensors | {"rng": torch.get_rng_state()} if tensors else {}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], step: int, kept: dict[str, Tensor]) -> None:
        """The inverse of `collect`, of whole tensors that every rank has; parameters are left latent.

        Args:
            kept: the truth about weights quantised in place in FP32, which is part of the state.

        Raises:
            KeyError: a tensor is missing.
        """
        owner = {
            id(p): o.optimizer for o in chained(self._optimizer) for g in o.optimizer.param_groups for p in g["params"]
        }
        found = {key: self._own(key, tensors) for key in ("main", *ADAM, *(["average"] if self._average else []))}
        for name, part in self._main.parts.items():
            main = part.values
            main.copy_(found["main"][name])
            part.write(main)
            if name in kept:
                kept[name].copy_(main)
            # Every parameter has a step of its own: a shared tensor would be advanced by each of them.
            state = {key: found[key][name].to(main.device).clone() for key in ADAM}
            owner[id(main)].state[main] = {"step": torch.tensor(float(step)), **state}
        for name, average in self._average.items():
            average.copy_(found["average"][name])
        buffers = {n: b for n, b in self._module.named_buffers() if n.endswith("expert_bias")}
        shapes = {name: buffer.shape for name, buffer in buffers.items()}
        for name, value in own_parts(self._module, shapes, _of("buffer", tensors), lambda name: None).items():
            buffers[name].copy_(value)
        if self._weights and self._weights.scales():
            scales = {name: value.shape for name, value in self._weights.scales().items()}
            cut = self._weights.scale_cut()
            self._weights.load_scales(own_parts(self._module, scales, _of("scale", tensors), cut))
        torch.set_rng_state(tensors["rng"])

    def _gathered(self, kind: str, values: Callable[[str, MainPart], Tensor]) -> dict[str, Tensor]:
        """Whole tensors of one kind: over the data-parallel ranks that share a parameter, then over the others."""
        own = {}
        for name, parameter in self._module.named_parameters():
            part = self._main.parts.get(name)
            flat = parameter.new_empty(0) if part is None else values(name, part)
            if self._main.is_whole:
                own[name] = flat.view(parameter.shape)
            else:
                start = 0 if part is None else part.start
                own[name] = assembled(flat, start, parameter, self._main.group(expert=is_expert(name)))
        return _named(kind, gather(self._module, own, parameter_cut(self._module)))

    def _own(self, kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's main-like values of one kind, in the shapes of the main parts."""
        cut: Cut = parameter_cut(self._module)
        parameters = dict(self._module.named_parameters())
        shapes = {name: parameters[name].shape for name in self._main.parts}
        whole = own_parts(self._module, shapes, _of(kind, tensors), cut)
        return {
            name: whole[name].reshape(-1)[part.start : part.start + part.values.numel()].view(part.values.shape)
            for name, part in self._main.parts.items()
        }


def _named(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": value for name, value in tensors.items()}


def _of(kind: str, tensors: dict[str, Any]) -> dict[str, Tensor]:
    prefix = f"{kind}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
