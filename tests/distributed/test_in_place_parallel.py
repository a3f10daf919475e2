"""Weights quantised in place on two ranks: shards of the distributed optimizer, and scales over tensor parallelism.

Quantising in each forward, with the ordinary optimizer, is the oracle here too. With two data-parallel ranks each
holds the truth of its shard alone, whose ends lie inside weights; the rest comes with the gathered parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, SEQUENCE, batches, build, hybrid
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.errors import UserError
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.in_place import student_weights
from nemo_qad.quantization.student import effective_weight, is_quantised
from nemo_qad.schema import Precision, QadConfig, QuantizeWeights
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Trainer

MICRO = 2
DATA_PARALLEL = [  # recipe, precision, clipping, steps
    ("four_over_six", Precision.bf16, True, 50),
    ("four_over_six", Precision.fp32, True, 15),
    ("max", Precision.bf16, False, 15),
]
TENSOR_PARALLEL = [("max", Precision.bf16, False, 10)]
Case = tuple[str, Precision, bool, int]


def start(
    layout: str, recipe_name: str, precision: Precision, *, clips: bool, how: QuantizeWeights, distributed: bool
) -> Trainer:
    model = hybrid(hybrid_pattern="ME*", vocab_size=100, precision=precision)
    recipe = compose([f"+recipe={recipe_name}"]).recipe
    teacher, student = build(model, LAYOUTS[layout], seed=3), build(model, LAYOUTS[layout], seed=1)
    quantize(student, recipe, model, batches(model, 2))
    qad = QadConfig(
        "test", 3e-3, 0.0, 0, 50, global_batch_size=2 * MICRO, sequence_length=SEQUENCE, quantize_weights=how,
        clip_weights=clips, clip_grad=100.0,
    )  # fmt: skip
    loss = distillation_loss(qad, vocab_size=model.vocab_size, teacher=teacher)
    return Trainer(
        student, qad_settings(qad), loss, precision=precision, average_decay=0.9, distributed_optimizer=distributed,
        weights=student_weights(student, qad, recipe),
    )  # fmt: skip


def micro_batches(step: int, part: int) -> list[dict[str, Tensor]]:
    """Of one data-parallel rank."""
    given = batches(hybrid(vocab_size=100), MICRO, size=1, seed=100 + 2 * step + part)
    return [{**batch, "loss_mask": torch.ones_like(batch["tokens"], dtype=torch.float32)} for batch in given]


def train(trainer: Trainer, part: int, steps: int) -> Results:
    """Losses, gradient norms, and all values: in forward, the truth, its average."""
    results = [trainer.train_step(micro_batches(step, part)) for step in range(steps)]
    found = {"losses": torch.tensor([result.loss for result in results], dtype=torch.float64)}
    found |= {"norms": torch.tensor([result.grad_norm for result in results], dtype=torch.float64)}
    module: Any = trainer.module
    in_place = trainer._weights is not None and trainer._weights.in_place
    for name, linear in module.named_modules():
        if is_quantised(linear):
            weight = linear.get_parameter("weight").detach()
            value = weight if in_place else effective_weight(linear).to(weight.dtype)
            found[f"forward|{name}"] = value.clone()
    with trainer.latent():
        found |= {f"truth|{name}": p.detach().clone() for name, p in module.named_parameters()}
    with trainer.averaged():
        found |= {f"average|{name}": p.detach().clone() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        if name.removesuffix(".weight") in {n.removeprefix("forward|") for n in found}:
            found[f"again|{name}"] = p.detach().clone()
    return found


def both_ways(rank: int, layout: str, cases: list[Case], distributed: bool) -> Results:
    found: Results = {}
    with runtime.process_groups(LAYOUTS[layout], seed=1, threads=1):
        part = rank if layout == "dp2" else 0
        for recipe, precision, clips, steps in cases:
            for how in QuantizeWeights:
                is_ours = how is QuantizeWeights.per_step
                trainer = start(layout, recipe, precision, clips=clips, how=how, distributed=distributed and is_ours)
                values = train(trainer, part, steps)
                found |= {f"{recipe}-{precision}|{how}|{name}": value for name, value in values.items()}
                if is_ours and distributed:
                    found |= {f"refused|{name}": value for name, value in refused(trainer, rank).items()}
    return found


def refused(trainer: Trainer, rank: int) -> Results:
    """True where a UserError came as expected, and where nothing had changed after it."""
    found = {}
    before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
    loss = trainer.loss

    def broken(module: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = loss(module, batch)
        return total * (float("nan") if rank == 0 else 1.0), count

    broken.num_models, broken.paired = loss.num_models, loss.paired  # type: ignore[attr-defined]
    trainer.loss = broken  # type: ignore[assignment]
    found["nan"] = raises(lambda: trainer.train_step(micro_batches(1, rank)), "Nothing was updated")
    same = [torch.equal(p, before[name]) for name, p in trainer.module.named_parameters()]
    return found | {"untouched": torch.tensor(all(same))}


def raises(action: Callable[[], object], match: str) -> Tensor:
    try:
        action()
    except UserError as error:
        return torch.tensor(match in str(error))
    return torch.tensor(False)


@pytest.fixture(scope="module")
def data_parallel() -> list[Results]:
    return run_ranks(both_ways, 2, "dp2", DATA_PARALLEL, True, environment=True)


@pytest.fixture(scope="module")
def tensor_parallel() -> list[Results]:
    return run_ranks(both_ways, 2, "tp2", TENSOR_PARALLEL, False, environment=True)


def with_prefix(results: Results, prefix: str) -> Results:
    return {name.removeprefix(prefix): value for name, value in results.items() if name.startswith(prefix)}


def check(found: Results, case: str) -> None:
    ours = with_prefix(found, f"{case}|{QuantizeWeights.per_step}|")
    theirs = with_prefix(found, f"{case}|{QuantizeWeights.per_forward}|")
    assert ours.keys() == theirs.keys() and len(ours) > 40
    differ = [n for n in ours if not n.startswith(("again|", "norms")) and not torch.equal(ours[n], theirs[n])]
    assert differ == []
    torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-6, atol=0)
    assert ours["losses"][-3:].max() < 0.9 * ours["losses"][0]  # it does learn
    again = with_prefix(ours, "again|")
    assert len(again) >= 7
    assert all(torch.equal(value, ours[f"forward|{name.removesuffix('.weight')}"]) for name, value in again.items())


@pytest.mark.parametrize("case", [f"{recipe}-{precision}" for recipe, precision, *_ in DATA_PARALLEL])
def test_distributed_optimizer_on_two_data_parallel_ranks(data_parallel: list[Results], case: str) -> None:
    """Up to 50 steps: equal bits of losses, of values in forward, of the truth and its average, on both ranks."""
    for found in data_parallel:
        check(found, case)
    first, second = (with_prefix(found, f"{case}|{QuantizeWeights.per_step}|") for found in data_parallel)
    assert [n for n in first if not torch.equal(first[n], second[n])] == []


@pytest.mark.parametrize("case", [f"{recipe}-{precision}" for recipe, precision, *_ in TENSOR_PARALLEL])
def test_scales_of_the_whole_weight_under_tensor_parallelism(tensor_parallel: list[Results], case: str) -> None:
    for found in tensor_parallel:
        check(found, case)


def test_one_ranks_nan_stops_all(data_parallel: list[Results]) -> None:
    for found in data_parallel:
        outcomes = with_prefix(found, "refused|")
        assert len(outcomes) == 2 and all(bool(value) for value in outcomes.values()), outcomes
