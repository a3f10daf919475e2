"""The distillation step on Megatron-Core's models: tensor and sequence parallel, and a pipeline's last stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad import runtime
from nemo_qad.distillation.linear_kl import linear_kl
from nemo_qad.distillation.sparse_logits import top_k_logits
from nemo_qad.distillation.step import distillation_loss, output_operands
from nemo_qad.models.build import build_model, forward_hidden, forward_logit_shards, output_weight
from nemo_qad.schema import AttentionConfig, Loss, ModelConfig, ParallelConfig, Precision, QadConfig

MODEL = ModelConfig(
    name="small",
    hybrid_pattern="*-*-",
    hidden_size=32,
    vocab_size=150,  # of 256 columns: at TP 2 the second rank holds 22 words and 106 columns of padding
    max_position_embeddings=64,
    ffn_hidden_size=48,
    precision=Precision.fp32,
    init_std=0.2,
    attention=AttentionConfig(num_heads=4, num_query_groups=2, head_dim=8),
)
BATCH, SEQUENCE, NUM_MICRO = 3, 16, 4
ONE = ParallelConfig(name="one")
TENSOR = ParallelConfig(name="tp2", ranks_per_node=2, tensor=2)
PIPELINE = ParallelConfig(name="pp2", ranks_per_node=2, pipeline=2)
LOSSES = (Loss.linear_kl, Loss.kl, Loss.top_k, Loss.modelopt)


def settings(loss: Loss) -> QadConfig:
    return QadConfig(name="test", loss=loss, temperature=1.0 if loss is Loss.modelopt else 1.5, sparse_values=20)


def build(parallel: ParallelConfig, weights: Results | None, seed: int) -> torch.nn.Module:
    """A model with fresh weights, or with this rank's part of `weights`."""
    runtime.set_seeds(seed)
    module = build_model(MODEL, parallel, sequence_length=SEQUENCE).eval()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in module.named_parameters() if weights else ():
            parameter.copy_(own_part(parameter, weights[global_name(name, stage)]))
    return module


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(ranks, parameter.partition_dim)[rank]  # type: ignore[attr-defined]


def global_name(name: str, stage: int) -> str:
    """The name of a parameter in the model of one stage: each of the two stages has two layers."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + 2 * stage)
    return ".".join(parts)


def micro_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = (BATCH, SEQUENCE)
    return [
        {
            "tokens": torch.randint(0, MODEL.vocab_size, shape, generator=generator),
            "labels": torch.randint(0, MODEL.vocab_size, shape, generator=generator),
            "loss_mask": (torch.rand(shape, generator=generator) > 0.3).float(),
        }
        for _ in range(NUM_MICRO)
    ]


def add_sparse(teacher: torch.nn.Module, batch: dict[str, Tensor], qad: QadConfig) -> dict[str, Tensor]:
    """The batch with the teacher's top-k values, made on one rank."""
    with torch.no_grad():
        found = top_k_logits(
            *output_operands(teacher, batch["tokens"]), k=qad.sparse_values, vocab_size=MODEL.vocab_size,
            temperature=qad.temperature,
        )  # fmt: skip
    shape = batch["tokens"].shape
    return {
        **batch,
        "teacher_indices": found.indices_TK.unflatten(0, shape),
        "teacher_log_prob": found.log_prob_TK.unflatten(0, shape),
        "teacher_log_tail": found.log_tail_T.unflatten(0, shape),  # type: ignore[union-attr]
    }


def gradients(module: torch.nn.Module, loss: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Of every parameter; under sequence parallelism those of norms are added up, as Megatron does at a step's end."""
    parameters = dict(module.named_parameters())
    for (name, parameter), gradient in zip(
        parameters.items(), torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        yield f"{prefix}|{name}", gradient


def mixed_with_cross_entropy(teacher: torch.nn.Module, student: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """B1: half KL, half Megatron's vocabulary-parallel cross-entropy, which overwrites the logits that it is given."""
    kl, _ = distillation_loss(settings(Loss.linear_kl), vocab_size=MODEL.vocab_size, teacher=teacher)(student, batch)
    logits_SBv = forward_logit_shards(student, batch["tokens"])
    per_token_SB = vocab_parallel_cross_entropy(logits_SBv, batch["labels"].T.contiguous())
    return 0.5 * kl + 0.5 * (per_token_SB * batch["loss_mask"].T).sum()


def measure(teacher: torch.nn.Module, student: torch.nn.Module, sparse: list[dict[str, Tensor]]) -> Results:
    results: Results = {}
    for kind in LOSSES:
        loss = distillation_loss(settings(kind), vocab_size=MODEL.vocab_size, teacher=teacher)
        total = torch.stack([loss(student, batch)[0] for batch in sparse]).sum()
        results |= {f"{kind}|loss": total.detach(), **dict(gradients(student, total, kind))}
    total = mixed_with_cross_entropy(teacher, student, sparse[0])
    return results | {"mixed|loss": total.detach(), **dict(gradients(student, total, "mixed"))}


def one_rank(rank: int) -> Results:
    with runtime.process_groups(ONE, seed=1, threads=1):
        teacher, student = build(ONE, None, 1), build(ONE, None, 1)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        sparse = [add_sparse(teacher, batch, settings(Loss.top_k)) for batch in micro_batches()]
        results = measure(teacher, student, sparse)
        loss = distillation_loss(settings(Loss.linear_kl), vocab_size=MODEL.vocab_size, teacher=teacher)
        results |= {micro_name(number): loss(student, batch)[0].detach() for number, batch in enumerate(sparse)}
        results |= {f"teacher.{name}": p.detach() for name, p in teacher.named_parameters()}
        results |= {f"student.{name}": p.detach() for name, p in student.named_parameters()}
        return results | {f"{number}.{name}": t for number, batch in enumerate(sparse) for name, t in batch.items()}


def micro_name(number: int) -> str:
    return f"one micro-batch|{number}"


def with_prefix(results: Results, prefix: str) -> Results:
    return {name.removeprefix(prefix): tensor for name, tensor in results.items() if name.startswith(prefix)}


def two_ranks(rank: int, known: Results) -> Results:
    with runtime.process_groups(TENSOR, seed=1, threads=1):
        teacher, student = (build(TENSOR, with_prefix(known, f"{who}."), 1) for who in ("teacher", "student"))
        found = measure(teacher, student, [with_prefix(known, f"{number}.") for number in range(NUM_MICRO)])
        parameters = dict(student.named_parameters())
        expected = {}
        for name in found:
            kind, _, parameter = name.partition("|")
            whole = known[name] if parameter == "loss" else own_part(parameters[parameter], known[name])
            expected[f"{kind}|expected {parameter}"] = whole
        return found | expected


def two_stages(rank: int, known: Results) -> Results:
    with runtime.process_groups(PIPELINE, seed=1, threads=1):
        teacher, student = (build(PIPELINE, with_prefix(known, f"{who}."), 1) for who in ("teacher", "student"))
        remembered: list[Tensor] = []

        def remember(hidden_SBD: Tensor, _: dict[str, Tensor]) -> Tensor:
            remembered.append(hidden_SBD)
            return hidden_SBD.sum()

        run_schedule(teacher, remember, forward_only=True)

        def loss(hidden_SBD: Tensor, batch: dict[str, Tensor]) -> Tensor:
            total, _ = linear_kl(
                remembered.pop(0).flatten(0, 1), output_weight(teacher),
                hidden_SBD.flatten(0, 1), output_weight(student),
                batch["loss_mask"].T.flatten(), vocab_size=MODEL.vocab_size, temperature=1.5,
            )  # fmt: skip
            return total

        losses = run_schedule(student, loss, forward_only=False)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        found: Results = {f"pipeline|{n}": p.grad for n, p in student.named_parameters() if p.grad is not None}
        for name, _ in student.named_parameters():
            found[f"pipeline|expected {name}"] = known[f"linear_kl|{global_name(name, stage)}"]
        if losses:
            found |= {"pipeline|loss": torch.stack(losses).sum(), "pipeline|expected loss": known["linear_kl|loss"]}
            found |= {f"micro|{number}": each for number, each in enumerate(losses)}
            found |= {f"micro|expected {number}": known[micro_name(number)] for number in range(NUM_MICRO)}
        return found


def run_schedule(module: torch.nn.Module, loss, *, forward_only: bool) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """One pass of Megatron's pipeline schedule; `loss` sees the last stage's hidden states [S, B, D]."""

    def step(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module):  # type: ignore[no-untyped-def]
        batch = next(batches)

        def reduce(hidden_SBD: Tensor):  # type: ignore[no-untyped-def]
            total = loss(hidden_SBD, batch)
            return total, torch.tensor(1), {"loss": total.detach()}

        return forward_hidden(model, batch["tokens"]).transpose(0, 1).contiguous(), reduce

    with torch.set_grad_enabled(not forward_only):
        found = get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(micro_batches()), model=[module], num_microbatches=NUM_MICRO,
            seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=forward_only,
        )  # fmt: skip
    return [each["loss"] for each in found]


@pytest.fixture(scope="module")
def known() -> Results:
    return run_ranks(one_rank, 1, environment=True)[0]


@pytest.fixture(scope="module")
def tensor_parallel(known: Results) -> list[Results]:
    return run_ranks(two_ranks, 2, known, environment=True)


def check(results: list[Results], kind: str, tolerance: float, at_least: int = 6) -> None:
    for found in results:
        names = [name for name in with_prefix(found, f"{kind}|") if not name.startswith("expected ")]
        assert len(names) >= at_least
        for name in names:
            got, expected = found[f"{kind}|{name}"], found[f"{kind}|expected {name}"]
            assert float((got - expected).norm()) <= tolerance * float(expected.norm()), name


@pytest.mark.parametrize("kind", [*LOSSES[:3], "mixed"])
def test_tensor_and_sequence_parallel_step_equals_one_rank(tensor_parallel: list[Results], kind: str) -> None:
    """Loss and the gradient of every parameter, FP32, at TP 2 with sequence-parallel hidden states."""
    check(tensor_parallel, kind, 2e-5)


def test_the_stock_loss_runs_beside_ours(tensor_parallel: list[Results]) -> None:
    """Its gradient is compared too: the peer that a user selects must be the real one."""
    check(tensor_parallel, Loss.modelopt, 2e-5)


@pytest.fixture(scope="module")
def pipeline_parallel(known: Results) -> list[Results]:
    return run_ranks(two_stages, 2, known, environment=True)


def test_hidden_states_of_a_pipelines_last_stage(pipeline_parallel: list[Results]) -> None:
    """D8: four micro-batches over two stages; the teacher's hidden states are kept for each."""
    check(pipeline_parallel, "pipeline", 2e-5)
    assert sum("pipeline|loss" in found for found in pipeline_parallel) == 1


def test_every_micro_batch_of_a_pipeline_has_its_one_rank_kl(pipeline_parallel: list[Results]) -> None:
    """D8: each against its own teacher, where a sum could hide two that were exchanged."""
    last = [found for found in pipeline_parallel if "pipeline|loss" in found]
    check(last, "micro", 2e-5, at_least=NUM_MICRO)
    values = sorted(float(last[0][f"micro|{number}"]) for number in range(NUM_MICRO))
    assert all(high > 1.001 * low > 0 for low, high in itertools.pairwise(values))  # else an exchange would not show
