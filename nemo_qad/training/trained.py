"""What of a trainer its state consists of, as `sharded_state.py` and `whole_state.py` read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from nemo_qad.training.main_parameters import MainParameters, chained
from nemo_qad.training.student_weights import StudentWeights

ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Trained:
    """average: by local name, empty where none is kept; weights: those that are quantised, if there are any."""

    module: nn.Module
    main: MainParameters
    optimizer: MegatronOptimizer
    average: dict[str, Tensor]
    weights: StudentWeights | None

    def adam(self) -> dict[int, dict[str, Any]]:
        """Adam's state of a parameter's main values, by their id."""
        return {id(p): s for o in chained(self.optimizer) for p, s in o.optimizer.state.items()}
