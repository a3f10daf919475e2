"""What a training step does to quantised weights, as an argument: training imports no quantisation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from nemo_qad.models.whole import Cut


class StudentWeights(Protocol):
    """Weights that the student computes with in quantised form (`quantization.in_place.QuantizedWeights`)."""

    in_place: bool  # between steps the parameters hold quantised values
    clips: bool  # after each step, values beyond what codes reach are moved to that limit

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters."""

    def quantize(self) -> None:
        """The parameters hold the truth; afterwards their quantised values, and forward leaves them alone."""

    def quantize_in_forward(self) -> None:
        """Forward quantises them again."""

    def clip(self, name: str, values: Tensor, start: int = 0) -> None:
        """Clips values of a weight in place, the first of which is number `start` of the flattened weight."""

    def refresh(self, step: int) -> None:
        """Chooses frozen scales anew from the parameters, if it is time."""

    def scales(self) -> dict[str, Tensor]:
        """Scales that training changes."""

    def scale_cut(self) -> Cut:
        """How `scales` are cut over tensor-parallel ranks."""

    def sharded_scales(self) -> dict[str, Any]:
        """All scales as Megatron's sharded tensors, by key."""

    def load_scales(self, load: Callable[[dict[str, Any]], None]) -> None:
        """The inverse of `sharded_scales`. Raises UserError where one is missing or unusable."""

    def as_modelopt_has_them(self) -> AbstractContextManager[None]:
        """Inside, quantizers look as outside training."""
