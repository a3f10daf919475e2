"""Attention over context-parallel ranks against a plain FP64 reference: outputs, gradients, and the cuts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad.models import context_attention
from nemo_qad.models.attention import CoreAttention
from nemo_qad.models.context import Documents, join_sequence, local_starts, split_sequence
from nemo_qad.models.context_attention import attention, chunk_starts

BATCH, HEADS, HEAD_DIM = 2, 4, 16
# Lengths of the documents of each row. With 4 ranks, 96 tokens are chunks of 12, and 712 of 89.
ROWS: dict[str, list[list[int]]] = {
    "none": [[96]] * 2,
    "across_cuts": [[11, 2, 30, 53]] * 2,
    "at_cuts": [[12, 36, 24, 24]] * 2,
    "one_token": [[1] * 96, [1] * 13 + [82, 1]],
    "differing": [[96], [5, 1, 1, 60, 29]],
    "padded": [[7, 698, 1, 6]] * 2,
}
CASES = {
    f"{rows}-{groups}-{block}": (rows, groups, block)
    for rows in ROWS
    for groups, block in ((4, 2048), (2, 2048), (1, 8))
}
RESULTS = ("out", "query", "key", "value")
MODULES = (
    ("fp32", "plain", torch.float32),
    ("fp32_kv8", "quantised", torch.float32),
    ("bf16_kv8", "quantised", torch.bfloat16),
)


def positions_of(rows: str) -> Tensor:
    return torch.tensor([[position for length in row for position in range(length)] for row in ROWS[rows]])


def operands(rows: str, groups: int) -> list[Tensor]:
    """FP64 query, key, value and a gradient of the output, of the whole sequence, [S, B, heads, P]."""
    random = torch.Generator().manual_seed(groups)
    length = sum(ROWS[rows][0])
    shapes = [(length, BATCH, heads, HEAD_DIM) for heads in (HEADS, groups, groups, HEADS)]
    return [torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes]


def with_gradients(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """[output, gradients of query, key and value]."""
    *leaves, gradient = (tensor.detach().requires_grad_() for tensor in inputs)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def reference(rows: str, groups: int) -> list[Tensor]:
    """From the definition, with a mask of the whole sequence: query i at position p attends keys i - p .. i."""
    positions = positions_of(rows)
    index = torch.arange(positions.shape[1])
    allowed = ((index - positions)[:, :, None] <= index) & (index <= index[:, None])

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(HEADS // groups, 2) for tensor in (key, value))
        scores = torch.einsum("ibhp,jbhp->bhij", query, key) / HEAD_DIM**0.5
        weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bhij,jbhp->ibhp", weights, value)

    return with_gradients(masked, operands(rows, groups))


def attend(rank: int) -> Results:
    """Every case's whole output and gradients, joined from the ranks; `again`: all equal, bit by bit, twice."""
    group, found, same = dist.group.WORLD, {}, True
    for case, (rows, groups, block) in CASES.items():
        context_attention.BLOCK = block
        local = [split_sequence(tensor.float(), group, dim=0) for tensor in operands(rows, groups)]
        assert chunk_starts(len(local[0]), rank, group.size()) == local_starts(len(local[0]), group)
        positions = None if rows == "none" else split_sequence(positions_of(rows), group)

        def in_parts(query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None = positions) -> Tensor:
            return attention(query, key, value, positions_BL=positions, group=group)

        results, again = with_gradients(in_parts, local), with_gradients(in_parts, local)
        same = same and all(torch.equal(r, a) for r, a in zip(results, again, strict=True))
        for name, tensor in zip(RESULTS, results, strict=True):
            found[f"{case}|{name}"] = join_sequence(tensor, group, dim=0)
    return found | {"again": torch.tensor(same)} | (attend_in_module(group) if group.size() <= 2 else {})


def attend_in_module(group: dist.ProcessGroup) -> Results:
    """The same by `CoreAttention` with FP8 keys and values, in FP32 and BF16, and without quantizers."""
    # Imported here: 4 ranks that import ModelOpt on 2 cores take half a minute.
    from modelopt.torch.quantization.nn import QuantModuleRegistry

    from nemo_qad.quantization import modelopt

    parallel_state.initialize_model_parallel(context_parallel_size=group.size())
    modelopt.install()
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=HEADS, attention_dropout=0.0, softmax_scale=0.3,
        context_parallel_size=group.size(),
    )  # fmt: skip
    plain = CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3)
    passed_on = ProcessGroupCollection(cp=group)
    quantised = CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3, pg_collection=passed_on)
    quantised = QuantModuleRegistry.convert(quantised)
    for quantizer in (quantised.k_bmm_quantizer, quantised.v_bmm_quantizer):
        quantizer.set_from_attribute_config({"num_bits": (4, 3)})
        quantizer.amax = torch.tensor(4.0)
    packed, found = Documents(positions_BL=split_sequence(positions_of("differing"), group)), {}
    for name, module, dtype in MODULES:
        run = {"plain": plain, "quantised": quantised}[module]
        local = [split_sequence(tensor.to(dtype), group, dim=0) for tensor in operands("differing", 2)]
        local[3] = local[3].flatten(2)
        results = with_gradients(lambda *qkv, run=run: run(*qkv, packed_seq_params=packed), local)
        for result, tensor in zip(RESULTS, results, strict=True):
            found[f"{name}|{result}"] = join_sequence(tensor, group, dim=0)
    return found


@cache
def run(world_size: int) -> list[Results]:
    return run_ranks(attend, world_size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_equal_the_reference(world_size: int, case: str) -> None:
    """The relative error of the whole, and at each token: a cut must not be worse than its surroundings."""
    rows, groups, _ = CASES[case]
    for name, truth in zip(RESULTS, reference(rows, groups), strict=True):
        of_ranks = [results[f"{case}|{name}"] for results in run(world_size)]
        found = of_ranks[0]
        assert found.dtype == torch.float32
        assert all(torch.equal(found, other) for other in of_ranks)
        error = (found - truth).norm() / truth.norm()
        assert error < 1e-6, (name, error)
        sizes = truth.flatten(1).norm(dim=1)  # the first tokens of a document get most of its gradient
        of_tokens = (found - truth).flatten(1).norm(dim=1) / sizes.clamp(min=float(sizes.mean()))
        assert of_tokens.max() < 3e-6, (name, of_tokens.argmax())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_two_runs_are_bit_equal(world_size: int) -> None:
    assert all(results["again"] for results in run(world_size))


@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 1e-6), ("fp32_kv8", 1e-6), ("bf16_kv8", 8e-3)])
def test_core_attention_over_ranks(name: str, tolerance: float) -> None:
    """Documents, the group of the model or of Megatron's state, and quantised keys and values that are sent on."""
    alone, found = (run(world_size)[0] for world_size in (1, 2))
    for result in RESULTS:
        truth = alone[f"{name}|{result}"].double()
        assert (found[f"{name}|{result}"] - truth).norm() / truth.norm() < tolerance, result
    if name != "fp32":
        assert not torch.allclose(alone[f"{name}|out"].float(), alone["fp32|out"], rtol=1e-3)
