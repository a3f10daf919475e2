"""Weights quantised once a step, in place, train to the same bits as weights quantised in each forward.

`per_forward` is the oracle. Runs are cached: each test looks at what a pair of runs left behind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import SEQUENCE_LENGTH, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.checkpoint import sharded
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.checkpoint.steps import StepFolders
from nemo_qad.distillation.step import distillation_loss
from nemo_qad.errors import UserError
from nemo_qad.models.build import forward_logits
from nemo_qad.quantization import fp8, modelopt, nvfp4
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.in_place import QuantizedWeights, quantize_in_place, student_weights
from nemo_qad.quantization.student import effective_weight, is_quantised, quantizer_state, stored_linear
from nemo_qad.schema import MambaConfig, MoeConfig, ParallelConfig, Precision, QadConfig, QuantizeWeights
from nemo_qad.training.main_parameters import chained
from nemo_qad.training.optimizer import qad_settings
from nemo_qad.training.trainer import Trainer

STEPS, MICRO = 50, 2
PER_STEP, PER_FORWARD = QuantizeWeights.per_step, QuantizeWeights.per_forward


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="one"), seed=1, threads=1):
        yield
    trained.cache_clear()


@dataclass(frozen=True)
class Case:
    recipe: str
    precision: Precision = Precision.fp32
    distributed: bool = False
    clips: bool = False
    refresh_every: int = 0
    average_decay: float = 0.0
    steps: int = STEPS

    def __str__(self) -> str:
        flags = ("distributed", "clips", "refresh_every", "average_decay")
        return "-".join([self.recipe, self.precision, *(flag for flag in flags if getattr(self, flag))])


@dataclass
class Run:
    trainer: Trainer
    weights: QuantizedWeights
    case: Case
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    moved: int = 0  # weights that clipping changed


def small(precision: Precision):  # type: ignore[no-untyped-def]
    return small_model(
        hybrid_pattern="ME*",
        hidden_size=32,
        ffn_hidden_size=48,
        vocab_size=100,
        precision=precision,
        mamba=MambaConfig(num_heads=4, head_dim=8, num_groups=2, state_dim=8, chunk_size=8),
        moe=MoeConfig(num_experts=2, top_k=1, ffn_hidden_size=16, shared_expert_ffn_hidden_size=16),
    )


def micro_batches(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (1, 16)
    return [
        {
            "tokens": torch.randint(0, 100, shape, generator=generator),
            "loss_mask": (torch.rand(shape, generator=generator) > 0.2).float(),
        }
        for _ in range(MICRO)
    ]


def start(case: Case, how: QuantizeWeights) -> Run:
    """A trainer before its first step, of a student quantised from its teacher."""
    model, recipe = small(case.precision), load_recipe(case.recipe)
    teacher, student = build(model, seed=3), build(model)
    quantize(student, recipe, model, [{"tokens": torch.arange(2 * SEQUENCE_LENGTH).view(2, -1) % 100}])
    # A large rate: scales must change, and weights leave the range of frozen ones.
    qad = QadConfig(
        "test", 3e-3, 0.0, 0, STEPS, global_batch_size=MICRO, sequence_length=16, quantize_weights=how,
        clip_weights=case.clips, refresh_scales_every=case.refresh_every,
    )  # fmt: skip
    weights = student_weights(student, qad, recipe)
    trainer = Trainer(
        student, qad_settings(qad), distillation_loss(qad, vocab_size=100, teacher=teacher), precision=case.precision,
        average_decay=case.average_decay, distributed_optimizer=case.distributed, weights=weights,
    )  # fmt: skip
    return Run(trainer, weights, case)


def advance(run: Run, until: int) -> Run:
    clip = run.weights.clip

    def counting(name: str, values: Tensor, start: int = 0) -> None:
        before = values.detach().clone()
        clip(name, values, start)
        run.moved += int((values.detach() != before).sum())

    run.weights.clip = counting  # type: ignore[method-assign]
    while run.trainer.step < until:
        result = run.trainer.train_step(micro_batches(run.trainer.step))
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
    run.weights.clip = clip  # type: ignore[method-assign]
    return run


@cache
def trained(case: Case, how: QuantizeWeights) -> Run:
    return advance(start(case, how), case.steps)


def linears(module: nn.Module) -> dict[str, nn.Module]:
    found = {name: child for name, child in module.named_modules() if is_quantised(child)}
    assert len(found) >= 7
    return found


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same_bits(ours[name], theirs[name])] == []


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Sign of zero included."""
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


CASES = [
    Case(recipe, precision, distributed)
    for recipe in ("four_over_six", "max")
    for precision in Precision
    for distributed in (False, True)
]
CASES += [Case("mamba_fp8_max", precision, distributed=precision is Precision.bf16) for precision in Precision]
CASES += [
    Case("four_over_six", precision, distributed, clips=True)
    for precision in Precision
    for distributed in (False, True)
]
CASES += [
    Case("mamba_fp8_max", Precision.bf16, distributed=True, clips=True),
    Case("four_over_six", Precision.bf16, refresh_every=7, clips=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_per_step_equals_per_forward(case: Case) -> None:
    """50 steps of two micro-batches: losses, gradient norms, truth, optimizer state, and values in forward.

    The oracle has the ordinary optimizer, so that the distributed one is held to its bits too.
    """
    ours, theirs = trained(case, PER_STEP), trained(dataclasses.replace(case, distributed=False), PER_FORWARD)
    assert ours.losses == theirs.losses
    # The distributed optimizer adds up squares in another order.
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6 if case.distributed else 0, abs=0)
    assert len(set(ours.losses)) == STEPS and max(ours.losses[-5:]) < 0.5 * ours.losses[0]  # it does learn
    check_equal(ours.trainer.state(), theirs.trainer.state())
    expected = linears(theirs.trainer.module)
    in_place = {n: linear.get_parameter("weight").detach() for n, linear in linears(ours.trainer.module).items()}
    check_equal(in_place, {n: effective_weight(expected[n]).to(weight.dtype) for n, weight in in_place.items()})
    with ours.trainer.latent():
        check_equal(parameters(ours.trainer.module), parameters(theirs.trainer.module))
        check_equal(quantizer_state(ours.trainer.module), quantizer_state(theirs.trainer.module))


@pytest.mark.parametrize("case", [case for case in CASES if case.clips], ids=str)
def test_clipping_moves_weights_to_what_codes_reach(case: Case) -> None:
    run = trained(case, PER_STEP)
    assert run.moved > 0
    if not case.refresh_every:  # else codes reach elsewhere since the last step
        assert beyond(run) == 0
        assert beyond(trained(dataclasses.replace(case, clips=False), PER_STEP)) > 0


def beyond(run: Run) -> int:
    """Main values whose quotient by their step is out of range by more than rounding."""
    count = 0
    for name, linear in linears(run.trainer.module).items():
        main, quantizer = run.trainer.state()[f"main.{name}.weight"].float(), linear.weight_quantizer
        if quantizer.is_nvfp4_static:
            step = nvfp4.block_scale(quantizer.amax, quantizer.global_amax, 256.0).float().view(-1, 1)
            quotient = nvfp4.blocks(main) / (step * nvfp4.global_scale(quantizer.global_amax, 256.0))
            count += int((quotient.abs() > 6 * (1 + 2**-22)).sum())
        elif not quantizer.is_nvfp4_dynamic:
            count += int(((main / fp8.scale_of(quantizer.amax)).abs() > 448 * (1 + 2**-22)).sum())
    return count


def test_clipping_has_no_effect_on_dynamic_scales() -> None:
    run = trained(Case("max", clips=True), PER_STEP)
    assert run.moved == 0
    check_equal(run.trainer.state(), trained(Case("max"), PER_STEP).trainer.state())


@pytest.mark.parametrize("start_at", [0, 5, 16, 23])
def test_a_shard_is_clipped_as_the_whole(start_at: int) -> None:
    """Shards of the distributed optimizer are cut anywhere, inside blocks too."""
    run = start(Case("four_over_six"), PER_FORWARD)
    name = "decoder.layers.1.mlp.shared_experts.linear_fc1.weight"
    weight = 3 * dict(run.trainer.module.named_parameters())[name].detach().clone()
    whole, part = weight.clone(), weight.flatten()[start_at:-7].clone()
    run.weights.clip(name, whole)
    run.weights.clip(name, part, start_at)
    assert not torch.equal(whole, weight)
    assert torch.equal(part, whole.flatten()[start_at:-7])


@pytest.mark.parametrize("recipe", ["four_over_six", "max", "mamba_fp8_max", "four_over_six_w4a4"])
def test_gradient_reaches_clipped_elements(recipe: str) -> None:
    """Straight-through: the gradient of an element far out of range is that of its quantised value."""
    found = []
    for how in (PER_STEP, PER_FORWARD):
        run = start(Case(recipe), how)
        module: Any = run.trainer.module
        linear = module.decoder.layers[0].mixer.in_proj
        with torch.no_grad(), run.trainer.latent():
            linear.weight[3, 16:32] *= 20  # of frozen scales: far out of range
            run.trainer._kept.get("decoder.layers.0.mixer.in_proj.weight", linear.weight).copy_(linear.weight)
        seen: list[Tensor] = []
        step = run.trainer._optimizer.step
        run.trainer._optimizer.step = lambda: (seen.append(linear.weight.main_grad.clone()), step())[1]  # noqa: B023
        run.trainer.train_step(micro_batches(0))
        found.append(seen[0])
    assert torch.equal(*found)
    assert (found[0][3, 16:32] != 0).all()


@pytest.mark.parametrize("case", [Case("four_over_six", steps=3), Case("max", Precision.bf16, steps=3),
                                  Case("max", distributed=True, steps=3)], ids=str)  # fmt: skip
def test_latent_is_the_ordinary_student_and_leaves_no_trace(case: Case) -> None:
    ours, theirs = trained(case, PER_STEP), trained(case, PER_FORWARD)
    tokens, before = micro_batches(77)[0]["tokens"], parameters(ours.trainer.module)
    with torch.no_grad():
        in_place = forward_logits(ours.trainer.module.eval(), tokens)
        expected = forward_logits(theirs.trainer.module.eval(), tokens)
        with ours.trainer.latent(), ours.trainer.latent():
            inside = forward_logits(ours.trainer.module, tokens)
            changed = [n for n, p in ours.trainer.module.named_parameters() if not torch.equal(p, before[n])]
    assert torch.equal(in_place, expected) and torch.equal(inside, expected)
    assert len(changed) == len(linears(ours.trainer.module))
    check_equal(parameters(ours.trainer.module), before)


def test_latent_comes_back_after_an_error() -> None:
    run = trained(Case("max", steps=3), PER_STEP)
    before = parameters(run.trainer.module)
    with pytest.raises(UserError), run.trainer.latent():
        raise UserError("of the caller")
    check_equal(parameters(run.trainer.module), before)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("distributed", [False, True])
def test_average_is_of_the_truth(precision: Precision, distributed: bool) -> None:
    case = Case("max", precision, distributed, average_decay=0.9, steps=6)
    ours, theirs = trained(case, PER_STEP), trained(case, PER_FORWARD)
    check_equal(ours.trainer.state(), theirs.trainer.state())
    before = parameters(ours.trainer.module)
    with ours.trainer.averaged(), theirs.trainer.averaged():
        check_equal(parameters(ours.trainer.module), parameters(theirs.trainer.module))
        mine, other = (forward_logits(r.trainer.module, micro_batches(5)[0]["tokens"]) for r in (ours, theirs))
        assert torch.equal(mine, other)
        averaged = parameters(ours.trainer.module)
    check_equal(parameters(ours.trainer.module), before)
    assert sum(not torch.equal(averaged[n], before[n]) for n in before) > 8


def test_no_weight_is_quantised_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the numbers are made; with per_forward every linear of every micro-batch shows up."""
    runs = {how: start(Case("four_over_six"), how) for how in (PER_STEP, PER_FORWARD)}
    calls: list[tuple[int, ...]] = []
    original = nvfp4.fake_quantize
    monkeypatch.setattr(nvfp4, "fake_quantize", lambda x, *rest: calls.append(x.shape) or original(x, *rest))
    counts = {}
    for how, run in runs.items():
        calls.clear()
        for batch in micro_batches(0):
            run.trainer.loss(run.trainer.module, batch)[0].backward()
        counts[how] = len(calls)
    assert counts[PER_STEP] == 0
    assert counts[PER_FORWARD] >= MICRO * (len(linears(runs[PER_FORWARD].trainer.module)) - 2)  # idle experts


def test_quantizers_of_activations_and_of_the_cache_stay_on() -> None:
    run = trained(Case("mamba_fp8_max", steps=2), PER_STEP)
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, quantizer in modelopt.enabled_quantizers(run.trainer.module):
        found[quantizer._if_quant].add(name.rpartition(".")[2])
    assert found[True] == {"input_quantizer", "k_bmm_quantizer", "v_bmm_quantizer"}
    assert found[False] == {"weight_quantizer"}


SHIPPED = [Case("max"), Case("max", Precision.bf16), Case("four_over_six", Precision.bf16)]


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_what_ships_is_made_from_the_truth(case: Case) -> None:
    """Bytes of every linear; dynamic scales of values that were quantised already would be others."""
    ours, theirs = trained(case, PER_STEP), trained(case, PER_FORWARD)
    found = linears(ours.trainer.module)
    with ours.trainer.latent():
        stored = {n: stored_linear(n, linear) for n, linear in found.items()}
    for name, linear in linears(theirs.trainer.module).items():
        expected = stored_linear(name, linear)
        assert stored[name].keys() == expected.keys()
        assert all(torch.equal(raw(stored[name][key]), raw(expected[key])) for key in expected), name


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


RESUMED = [
    Case("max", average_decay=0.9, steps=8),
    Case("max", Precision.bf16, distributed=True, steps=8),
    Case("four_over_six", distributed=True, clips=True, steps=8),
    Case("four_over_six", refresh_every=3, steps=8),
]


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_stopped_run_continues_to_the_same_bits(case: Case, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """From a checkpoint on disk, with either way to quantise and either optimizer."""
    straight = trained(case, PER_STEP)
    stopped = advance(start(case, PER_STEP), 4)
    folder = saved(stopped, tmp_path)
    assert any(key.startswith("quantizer.") for key in sharded.keys(folder))
    for how, distributed in ((PER_STEP, case.distributed), (PER_FORWARD, not case.distributed)):
        again = start(dataclasses.replace(case, distributed=distributed), how)
        again.trainer.restore(functools.partial(sharded.load, folder), 4)
        advance(again, case.steps)
        assert again.losses == straight.losses[4:]
        check_equal(again.trainer.state(), straight.trainer.state())


def saved(run: Run, root: Path, leave_out: str = "nothing") -> Path:
    """The checkpoint of a run's step, without the keys that begin with `leave_out`."""
    folders = StepFolders(root / "checkpoints")
    state = {name: item for name, item in run.trainer.saving().items() if not item.key.startswith(leave_out)}
    CheckpointSaver(folders, print, asynchronous=False).save(run.trainer.step, state, {})
    return folders.path(run.trainer.step)


@pytest.mark.parametrize("refresh_every", [0, 3])
def test_checkpoint_without_scales_is_refused(refresh_every: int, tmp_path: Path) -> None:
    """F1, F3, F9: the missing quantizer is named, and PTQ's scales never stand in for it."""
    case = Case("four_over_six", refresh_every=refresh_every)
    folder = saved(advance(start(case, PER_STEP), 1), tmp_path, "quantizer.output_layer")
    with pytest.raises(UserError, match=r"lacks quantizer\.output_layer.weight_quantizer\._amax"):
        start(case, PER_STEP).trainer.restore(functools.partial(sharded.load, folder), 1)


def test_checkpoint_with_zero_scales_is_refused(tmp_path: Path) -> None:
    """F3: zeros where an amax should be would be NaN later."""
    run = advance(start(Case("four_over_six"), PER_STEP), 1)
    state = run.trainer.saving()
    name = next(name for name in state if name.startswith("quantizer.output_layer.weight_quantizer._global_amax"))
    state[name].data.zero_()
    folders = StepFolders(tmp_path)
    CheckpointSaver(folders, print, asynchronous=False).save(1, state, {})
    with pytest.raises(UserError, match=r"output_layer.*zero"):
        start(Case("four_over_six"), PER_STEP).trainer.restore(functools.partial(sharded.load, folders.path(1)), 1)


def test_resumed_optimizer_shares_no_step_and_starts_from_what_was_saved(tmp_path: Path) -> None:
    """A tensor `step` that parameters share is advanced once for each of them; a fresh one begins at 0."""
    folder = saved(advance(start(Case("max"), PER_STEP), 3), tmp_path)
    again = start(Case("max"), PER_STEP)
    again.trainer.restore(functools.partial(sharded.load, folder), 3)
    states = [s for o in chained(again.trainer._optimizer) for s in o.optimizer.state.values()]
    assert len({s["step"].data_ptr() for s in states}) == len(states) > 8
    assert all(float(s["step"]) == 3 for s in states)
    advance(again, 4)
    assert all(float(s["step"]) == 4 for s in states)


def test_refreshed_scales_are_those_of_the_weights() -> None:
    """Of the step at which they were chosen, and of the truth."""
    run = advance(start(Case("four_over_six", refresh_every=3), PER_STEP), 3)
    module: Any = run.trainer.module
    before = quantizer_state(start(Case("four_over_six"), PER_STEP).trainer.module)
    after = quantizer_state(module)
    assert sum(not torch.equal(before[n], after[n]) for n in before) > 8
    with run.trainer.latent():
        weight = module.output_layer.get_parameter("weight")
        outer = weight.abs().amax().float()
        assert torch.equal(module.output_layer.weight_quantizer.global_amax.reshape(()), outer)
        expected = nvfp4.four_over_six_amax(weight, outer).flatten()
    assert torch.equal(module.output_layer.weight_quantizer.amax.flatten(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["four_over_six", "max", "mamba_fp8_max"])
def test_large_weights_are_quantised_in_pieces(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits whether a weight is one piece or many; outliers in the last one set the scale of the first."""
    monkeypatch.setattr("nemo_qad.quantization.in_place.chunk_blocks", lambda _: 7)
    run = start(Case(recipe, Precision.bf16 if dtype is torch.bfloat16 else Precision.fp32), PER_FORWARD)
    for linear in linears(run.trainer.module).values():
        weight: Any = linear.get_parameter("weight")
        with torch.no_grad():
            weight[-1, -1] = 3.0
            expected = effective_weight(linear).to(dtype)
            address = weight.data_ptr()
            quantize_in_place(weight, linear.weight_quantizer)
        assert same_bits(weight.detach(), expected) and weight.data_ptr() == address
