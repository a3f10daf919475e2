"""What a training step does to quantised weights, as an argument: training imports no quantisation."""

from __future__ import annotations

from typing import Protocol

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
        """Scales that are part of a run's state."""

    def scale_cut(self) -> Cut:
        """How `scales` are cut over tensor-parallel ranks."""

    def load_scales(self, scales: dict[str, Tensor]) -> None:
        """Raises KeyError where one is missing."""
