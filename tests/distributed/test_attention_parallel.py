"""Attention over context-parallel ranks against a plain FP64 reference: outputs, gradients, and the cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Results, run_ranks
from torch import Tensor

from nemo_qad.models import context_attention
from nemo_qad.models.context import join_sequence, split_sequence
from nemo_qad.models.context_attention import attention

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
        positions = None if rows == "none" else split_sequence(positions_of(rows), group)

        def in_parts(query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None = positions) -> Tensor:
            return attention(query, key, value, positions_BL=positions, group=group)

        results, again = with_gradients(in_parts, local), with_gradients(in_parts, local)
        same = same and all(torch.equal(r, a) for r, a in zip(results, again, strict=True))
        for name, tensor in zip(("out", "query", "key", "value"), results, strict=True):
            found[f"{case}|{name}"] = join_sequence(tensor, group, dim=0)
    return found | {"again": torch.tensor(same)}


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> list[Results]:
    return run_ranks(attend, request.param)


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_the_reference(ranks: list[Results], case: str) -> None:
    """The relative error of the whole, and at each token: a cut must not be worse than its surroundings."""
    rows, groups, _ = CASES[case]
    for name, truth in zip(("out", "query", "key", "value"), reference(rows, groups), strict=True):
        found = ranks[0][f"{case}|{name}"]
        assert found.dtype == torch.float32
        error = (found - truth).norm() / truth.norm()
        assert error < 1e-6 or (rows == "one_token" and name in ("query", "key")), (name, error)
        sizes = truth.flatten(1).norm(dim=1)  # the first tokens of a document get most of its gradient
        of_tokens = (found - truth).flatten(1).norm(dim=1) / sizes.clamp(min=float(sizes.mean()))
        assert of_tokens.max() < 3e-6, (name, of_tokens.argmax())
        assert all(torch.equal(other[f"{case}|{name}"], found) for other in ranks)


def test_two_runs_are_bit_equal(ranks: list[Results]) -> None:
    assert all(rank["again"] for rank in ranks)
