"""Post-training quantisation of a model, on one rank or many: quantizers, calibration, scales, and their checks.

ModelOpt inserts the quantizers and observes the ranges of activations, of K and of V on the BF16 model; scales of
weights are searched by `scales.py`. Calibration batches are dealt out to the data-parallel ranks. What is left after
the last full round goes to all of them with its weight divided by their number, so that no rank waits for another and
no sample counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_qad.choices import IdleExperts, ScaleError, ScaleSearch
from nemo_qad.errors import UserError, show
from nemo_qad.models.placement import EXPERT, Placement, union_of_names
from nemo_qad.quantization import modelopt
from nemo_qad.quantization.coverage import (
    Coverage,
    check_coverage,
    check_scales,
    check_structure,
    check_weights,
    local_linears,
)
from nemo_qad.quantization.observe import CHUNK_TOKENS, Observer
from nemo_qad.quantization.recipes import LinearFormat, formats, rules
from nemo_qad.quantization.scales import choose_weight_scales, share_amax
from nemo_qad.schema import CalibrationConfig, ModelConfig, RecipeConfig

Batch = dict[str, Tensor]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Calibrated:
    """What calibration did.

    expert_tokens: calibration tokens of each routed expert, by global name ("decoder...local_experts.3").
    idle_experts: those that no token reached. warnings: for a person.
    """

    coverage: Coverage
    expert_tokens: dict[str, int]
    idle_experts: list[str]
    warnings: list[str]


def quantize(
    module: nn.Module,
    recipe: RecipeConfig,
    model: ModelConfig,
    batches: Iterable[Batch],
    progress: Tell | None = None,
    *,
    calibration: CalibrationConfig | None = None,
) -> Calibrated:
    """Inserts quantizers into `module` in place and calibrates them; a collective call of all ranks.

    Args:
        module: the bare HybridModel (no DDP or Float16Module around it), or this rank's part of it.
        recipe: formats, scales and the search for them.
        batches: calibration set, the same on every rank: "tokens" int64 [B, S] each.
        progress: called with a short text before each step and every tenth of the batches.
        calibration: what the search makes small, and what becomes of idle experts; by default squared errors and
            scales from the weights.

    Raises:
        UserError: no batches, a rule or module without effect, a bad scale, an idle expert where those are an error.
        ConfigError: a recipe that does not fit the model.
    """
    settings = calibration or CalibrationConfig()
    table = formats(recipe, model)
    check_structure(module, table)
    check_weights(module)
    local = local_linears(module, table)
    plan = rules(recipe, model, None if Placement(module).is_trivial else local)
    modelopt.insert_quantizers(module, plan.quant_cfg)
    coverage = check_coverage(module, table, plan.expected, recipe)
    samples, tell = list(batches), progress or (lambda _: None)
    if not samples:
        raise UserError("calibration.num_samples: no calibration batch came. Set it to at least 1")
    needs_hessians = settings.error == ScaleError.hessian and recipe.scale_search != ScaleSearch.max
    weighed = [n for n, whole in local.items() if table[whole].format.has_blocks] if needs_hessians else []
    run = _Calibration(module, Observer(module, weighed), samples, IdleExperts(settings.idle_experts), tell)
    run.observes_output = _observes_output(table, weighed)
    modelopt.calibrate(module, modelopt.MAX, run.forward_all)
    share_amax(module)
    if recipe.scale_search != ScaleSearch.max:
        tell("Searching the scale of each block")
    choose_weight_scales(module, recipe.scale_search, run.observer.hessians())
    warnings = check_scales(module)
    return Calibrated(coverage, run.tokens, run.idle, warnings)


def _observes_output(table: dict[str, LinearFormat], weighed: list[str]) -> bool:
    """Whether the output layer's inputs matter; its logits, the largest tensor of all, are skipped otherwise."""
    return "output_layer" in weighed or ("output_layer" in table and table["output_layer"].format.covers_inputs)


class _Calibration:
    """The calibration set on its way through the model, once, or twice where idle experts see all tokens."""

    def __init__(
        self, module: nn.Module, observer: Observer, samples: list[Batch], policy: IdleExperts, tell: Tell
    ) -> None:
        self.module, self.observer, self.samples, self.policy, self.tell = module, observer, samples, policy, tell
        self.observes_output = True
        self.tokens: dict[str, int] = {}
        self.idle: list[str] = []  # global names
        self.idle_here: list[str] = []  # local names

    def forward_all(self) -> None:
        with torch.no_grad(), self.observer.watching():
            self._pass("Calibrating")
            self._look_for_idle_experts()
            if self.idle and self.policy == IdleExperts.all_tokens:
                with self.observer.showing_all_tokens(self._layers_to_show()):
                    self._pass(f"Showing all tokens to {len(self.idle)} idle experts")

    def _pass(self, what: str) -> None:
        group: Any = self.module.pg_collection.dp  # type: ignore[union-attr]
        rounds = list(deal(self.samples, group.rank(), group.size()))
        every, device = max(1, len(rounds) // 10), next(self.module.parameters()).device
        for index, (batch, share) in enumerate(rounds):
            if index % every == 0:
                self.tell(f"{what}, batch {index + 1} of {len(rounds)}")
            self.observer.share = share
            self._forward(batch["tokens"].to(device))

    def _forward(self, tokens_BS: Tensor) -> None:
        from nemo_qad.models.forward import local_hidden

        hidden = local_hidden(self.module, tokens_BS)
        if self.observes_output and hidden is not None:  # the last stage of a pipeline has hidden states
            output_layer: Any = self.module.output_layer
            for part_TD in hidden.transpose(0, 1).flatten(0, 1).split(CHUNK_TOKENS):
                output_layer(part_TD[:, None].contiguous(), runtime_gather_output=False)

    def _look_for_idle_experts(self) -> None:
        placement, counts = Placement(self.module), self.observer.expert_tokens()
        self.idle_here = [name for name, count in counts.items() if not count]
        self.idle = _in_order(union_of_names([placement.global_name(name) for name in self.idle_here]))
        self.tokens = _merged({placement.global_name(name): round(count) for name, count in counts.items()})
        if self.idle and self.policy == IdleExperts.error:
            raise UserError(
                f"calibration.idle_experts=error: no calibration token reached {show(self.idle)}. Raise "
                "calibration.num_samples, or choose calibration.idle_experts=weights or all_tokens"
            )

    def _layers_to_show(self) -> set[str]:
        """Idle experts of this rank, and the expert lists of layers that have an idle one on some rank."""
        placement = Placement(self.module)
        layers = {name.partition(EXPERT)[0] for name in self.idle}
        lists = {
            f"{name}.mlp{EXPERT.removeprefix('.mlp').removesuffix('.')}"
            for name, _ in self.module.named_modules()
            if placement.global_name(name) in layers
        }
        return lists | set(self.idle_here)


def deal(samples: list[Batch], rank: int, ranks: int) -> Iterator[tuple[Batch, float]]:
    """(batch, share of it that counts) of one rank: full rounds of equal shapes, then the rest on every rank."""
    full = 0
    while full + ranks <= len(samples) and len({s["tokens"].shape for s in samples[full : full + ranks]}) == 1:
        yield samples[full + rank], 1.0
        full += ranks
    for batch in samples[full:]:
        yield batch, 1.0 / ranks


def _in_order(names: list[str]) -> list[str]:
    """Names by their numbers: local_experts.10 after local_experts.9."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")])


def _merged(counts: dict[str, int]) -> dict[str, int]:
    """Of all ranks; a collective call."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return counts
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    merged = {name: count for each in gathered for name, count in each.items()}
    return {name: merged[name] for name in _in_order(list(merged))}
