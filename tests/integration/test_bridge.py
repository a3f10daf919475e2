"""The forward step for Megatron-Bridge: Megatron-Core's schedule calls it here, and Bridge itself where it imports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_programs import SKIPPED
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from small_model import SEQUENCE_LENGTH, build, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.distillation.bridge import DistillationForwardStep
from nemo_qad.distillation.kl import reference_kl
from nemo_qad.errors import UserError
from nemo_qad.schema import ParallelConfig, Precision

VOCAB_SIZE = 250  # of 256 padded columns
PROGRAMS = Path(__file__).with_name("bridge_programs.py")
BRIDGE_PYTHON = "NEMO_QAD_BRIDGE_PYTHON"  # an interpreter that has megatron-bridge, if it is not the tests' own
Batch = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def hybrid(seed: int) -> nn.Module:
    module = build(small_model(), seed)
    module.config.moe_aux_loss_coeff = 0.0  # in distillation the loss alone moves the student
    return module


def tied_hybrid(seed: int) -> nn.Module:
    return build(small_model(tied_output=True, hybrid_pattern="M*-"), seed)


def gpt(seed: int) -> nn.Module:
    """A transformer with rotary positions, whose sizes differ from the hybrid's."""
    runtime.set_seeds(seed)
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=4, use_cpu_initialization=True, init_method_std=0.1,
        hidden_dropout=0.0, attention_dropout=0.0, calculate_per_token_loss=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, 256, SEQUENCE_LENGTH, position_embedding_type="rope", rotary_percent=0.5)


def micro_batches(count: int = 2) -> list[Batch]:
    """As Bridge's datasets make them; the micro-batches differ in their number of counted tokens."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, SEQUENCE_LENGTH)
    causal = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH).tril()[None, None] < 0.5
    found = []
    for index in range(count):
        tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        mask = (torch.rand(shape, generator=generator) < 0.9 / (index + 1)).float()
        position_ids = torch.arange(SEQUENCE_LENGTH).expand(shape)
        found.append(
            {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask, "attention_mask": causal,
             "position_ids": position_ids}
        )  # fmt: skip
    return found


def wrap(module: nn.Module) -> DistributedDataParallel:
    config: Any = module.config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, settings, module)


def run_schedule(
    step: Callable, model: nn.Module, batches: list[Batch], *, forward_only: bool = False
) -> dict[str, Tensor]:
    """What Bridge's train_step does with a forward step; returns the sum of the reports."""
    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=2,
        forward_only=forward_only,
    )
    return {key: torch.stack([report[key] for report in reports]).sum(0) for key in reports[0]}


def logits(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch["tokens"], batch["position_ids"], batch["attention_mask"]).flatten(0, 1).float()


def expected(teacher: nn.Module, student: nn.Module, batches: list[Batch], **settings: Any) -> tuple[Tensor, Tensor]:
    """(sum, count) of the global batch from full logits."""
    parts = []
    for batch in batches:
        with torch.no_grad():
            of_teacher = logits(teacher.eval(), batch)
        mask_T = batch["loss_mask"].flatten()
        parts.append(reference_kl(of_teacher, logits(student, batch), mask_T, vocab_size=VOCAB_SIZE, **settings))
    totals, counts = zip(*parts, strict=True)
    return torch.stack(totals).sum(), torch.stack(counts).sum()


def truth_and_main_gradients(teacher: nn.Module, student: nn.Module, settings: dict) -> tuple[Tensor, list]:
    """The mean loss of the global batch with its gradients, and the pairs (what DDP accumulated, truth)."""
    batches = micro_batches()
    total, count = expected(teacher, student.train(), batches, **settings)
    parameters = list(student.parameters())
    truth = torch.autograd.grad(total / count, parameters)
    step = DistillationForwardStep(teacher, vocab_size=VOCAB_SIZE, **settings)
    report = run_schedule(step, wrap(student), batches)["kl"]
    assert report[1] == count and batches[0]["loss_mask"].sum() > 1.5 * batches[1]["loss_mask"].sum()
    torch.testing.assert_close(report[0], total.detach(), rtol=2e-5, atol=0)
    return total / count, [(p.main_grad, g) for p, g in zip(parameters, truth, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0}, {"reverse": True}], ids=["plain", "warm", "reverse"])
@pytest.mark.parametrize("make", [hybrid, tied_hybrid, gpt])
def test_loss_and_gradients_are_those_of_the_full_logits(make: Callable[[int], nn.Module], settings: dict) -> None:
    teacher = hybrid(1)
    loss, gradients = truth_and_main_gradients(teacher, make(2), settings)
    largest = max(float(truth.norm()) for _, truth in gradients)
    assert loss > 1e-3
    for accumulated, truth in gradients:
        assert (accumulated - truth).norm() <= 2e-5 * truth.norm() + 1e-7 * largest
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())


def test_bf16_model_in_its_wrapper() -> None:
    batches, teacher = micro_batches(), build(small_model(precision=Precision.bf16), 1)
    student = build(small_model(precision=Precision.bf16), 2)
    total, _ = expected(teacher, student, batches)
    model = wrap(Float16Module(student.config, student))
    step = DistillationForwardStep(Float16Module(teacher.config, teacher), vocab_size=VOCAB_SIZE)
    report = run_schedule(step, model, batches, forward_only=True)["kl"]
    torch.testing.assert_close(report[0], total.detach().float(), rtol=2e-2, atol=0)


def test_evaluation_gives_the_same_loss_and_no_gradient() -> None:
    batches, teacher, student = micro_batches(), hybrid(1), hybrid(2)
    total, count = expected(teacher, student.eval(), batches)
    model = wrap(student).eval()
    with torch.no_grad():
        step = DistillationForwardStep(teacher, vocab_size=VOCAB_SIZE)
        report = run_schedule(step, model, batches, forward_only=True)["kl"]
    torch.testing.assert_close(report, torch.stack([total.detach(), count.float()]), rtol=2e-5, atol=0)
    assert not any(p.main_grad.any() for p in student.parameters())


def test_teacher_is_built_once_and_stays_in_eval_mode() -> None:
    built: list[nn.Module] = []

    def build_teacher() -> nn.Module:
        built.append(hybrid(1).train())
        return built[-1]

    step = DistillationForwardStep(build_teacher, vocab_size=VOCAB_SIZE)
    assert built == []
    before = {name: value.clone() for name, value in hybrid(1).state_dict().items() if torch.is_tensor(value)}
    run_schedule(step, wrap(hybrid(2)), micro_batches())
    (teacher,) = built
    assert not teacher.training
    after = teacher.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("make", [hybrid, gpt])
def test_output_layer_projects_one_position_alone(make: Callable[[int], nn.Module]) -> None:
    student, seen = make(2), []
    student.output_layer.register_forward_hook(lambda layer, args, output: seen.append(tuple(output[0].shape)))
    run_schedule(DistillationForwardStep(hybrid(1), vocab_size=VOCAB_SIZE), wrap(student), micro_batches())
    assert seen == [(1, 2, 256)] * 2
    assert not student.output_layer._forward_pre_hooks  # nothing of ours is left on the model


@pytest.mark.parametrize(
    ("who", "field", "value"),
    [
        ("student", "calculate_per_token_loss", False),
        ("student", "pipeline_model_parallel_size", 2),
        ("student", "overlap_moe_expert_parallel_comm", True),
        ("teacher", "mtp_num_layers", 1),
        ("teacher", "final_logit_softcapping", 30.0),
        ("student", "use_mup", True),
        ("student", "cuda_graph_impl", "full_iteration"),
    ],
)
def test_settings_under_which_the_loss_would_be_wrong_are_refused(who: str, field: str, value: object) -> None:
    models = {"teacher": gpt(1), "student": gpt(2)}
    setattr(models[who].config, field, value)
    step = DistillationForwardStep(models["teacher"], vocab_size=VOCAB_SIZE)
    with pytest.raises(UserError, match=f"{who}: {field}={value} is not supported"):
        step(iter(micro_batches()), models["student"])


def test_packed_sequences_and_models_without_an_output_layer_are_refused() -> None:
    step = DistillationForwardStep(gpt(1), vocab_size=VOCAB_SIZE)
    with pytest.raises(UserError, match="cu_seqlens"):
        step(iter([{**micro_batches()[0], "cu_seqlens_q": torch.tensor([0, 7, 32])}]), gpt(2))
    student = gpt(2)
    del student.output_layer
    with pytest.raises(UserError, match="student: GPTModel has no output_layer"):
        step(iter(micro_batches()), student)


def test_logits_that_are_no_plain_product_are_refused() -> None:
    student = gpt(2)
    student.output_layer.register_forward_hook(lambda layer, args, output: (output[0] * 1.1, output[1]))
    with pytest.raises(UserError, match="student: its logits are not its hidden states times its output weight"):
        DistillationForwardStep(gpt(1), vocab_size=VOCAB_SIZE)(iter(micro_batches()), student)


def test_a_loss_that_is_not_finite_is_named_by_sequence_and_position() -> None:
    batch, student = micro_batches()[0], gpt(2)
    batch["loss_mask"][1, 20:] = 1

    def spoil(layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        spoiled = output.clone()
        spoiled[20, 1] = torch.nan  # hidden states are [S, B, D]
        return spoiled

    student.decoder.register_forward_hook(spoil)
    with pytest.raises(UserError, match=r"sequence 1, position 20 .* the student's hidden state"):
        DistillationForwardStep(gpt(1), vocab_size=VOCAB_SIZE)(iter([batch]), student)


def run_program(*command: str, python: str = sys.executable) -> dict[str, Any]:
    """Runs bridge_programs.py and returns what its last line says."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    pipe = subprocess.PIPE
    with subprocess.Popen([python, *command], stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            output, errors = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            raise
    lines = output.strip().splitlines() or [""]
    if process.returncode == SKIPPED:
        pytest.skip(lines[-1])
    assert process.returncode == 0, errors[-3000:]
    return json.loads(lines[-1])


@pytest.mark.parametrize("kind", ["tensor", "context"])
def test_two_ranks_give_the_loss_of_the_full_logits(kind: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0"]
    result = run_program(*torchrun, str(PROGRAMS), "ranks", kind)
    assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5) and result["loss"] > 1
    assert result["counts"][0] == result["counts"][1] > 40
    assert result.get("gradient_error", 0) < 2e-5


@pytest.mark.parametrize("optimizer", ["plain", "overlap"])
def test_bridge_trains_with_it(optimizer: str) -> None:
    """Bridge's own pretrain: each step's loss and gradient norm are those of full logits, and the loss falls."""
    if BRIDGE_PYTHON not in os.environ and importlib.util.find_spec("megatron.bridge") is None:
        transformers = importlib.metadata.version("transformers")
        pytest.skip(f"megatron-bridge is not installed (transformers here: {transformers}); see {PROGRAMS.name}")
    result = run_program(str(PROGRAMS), "pretrain", optimizer, python=os.environ.get(BRIDGE_PYTHON, sys.executable))
    assert result["accepted"]
    steps, evaluations = result["steps"], result["evaluations"]
    assert len(steps) == 4 and len(evaluations) == 3
    for step in steps:
        assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)
        assert step["norm"] == pytest.approx(step["expected_norm"], rel=1e-4)
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"] and evaluations[-1] < 0.9 * evaluations[0]
