"""Everything that the next step depends on, but the data's position, as whole tensors: to compare two trainers by.

Names are global ones behind a kind: main.NAME, exp_avg.NAME, exp_avg_sq.NAME, average.NAME (FP32, in the shape of the
whole parameter, however tensor, expert and data parallelism had cut it), buffer.NAME, scale.NAME, rng.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_qad.models.placement import expert_biases, is_expert
from nemo_qad.models.whole import assembled, gather, parameter_cut
from nemo_qad.training.main_parameters import MainPart
from nemo_qad.training.trained import ADAM, Trained


class WholeState:
    """Of one trainer, on all ranks together. Checkpoints hold the same in pieces (`sharded_state.py`)."""

    def __init__(self, trained: Trained) -> None:
        self._module, self._main = trained.module, trained.main
        self._average, self._weights, self._adam = trained.average, trained.weights, trained.adam

    def collect(self, truth: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The state on the first rank, nothing on the others; a collective call.

        Args:
            truth: this rank's main values of a parameter of which it has a part.
        """
        adam = self._adam()
        tensors = self._gathered("main", lambda name, part: truth(name))
        for key in ADAM:
            tensors |= self._gathered(key, lambda name, part, key=key: adam[id(part.values)][key])  # type: ignore[misc]
        if self._average:
            tensors |= self._gathered("average", lambda name, part: self._average[name])
        tensors |= _named("buffer", gather(self._module, expert_biases(self._module), lambda name: None))
        if self._weights and self._weights.scales():
            scales = self._weights.scales()
            tensors |= _named("scale", gather(self._module, scales, self._weights.scale_cut()))
        return tensors | {"rng": torch.get_rng_state()} if tensors else {}

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


def _named(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": value for name, value in tensors.items()}
