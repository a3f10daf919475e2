"""Scan and convolution of long and packed sequences, in FP64, against the recurrence and against documents alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_scan import BATCH, GROUPS, HEAD_DIM, HEADS, STATE, recurrence, scan_inputs
from torch import Tensor

from nemo_qad.models import convolution, scan
from nemo_qad.models.convolution import causal_conv
from nemo_qad.models.scan import chunked_scan

# Lengths of the documents of each row, of 40 tokens in all. Chunks of 8, segments of 16: borders at the first and at
# the last token of both, several in a chunk, documents of one token, rows that differ.
DOCUMENTS = {
    "at borders": ([8, 8, 24], [16, 16, 8]),
    "within": ([5, 30, 5], [1, 1, 1, 37]),
    "last token": ([39, 1], [15, 1, 24]),
    "one each": ([40], [1] * 40),
}
SEGMENTS = [16, 4096]
LENGTH = 40


def positions_of(rows: tuple[list[int], ...]) -> Tensor:
    """[L, B]"""
    return torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in rows], 1)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients of a fixed weighting of it."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def alone(function: Callable[..., Tensor], sequences: int, rows: tuple[list[int], ...], *tensors: Tensor) -> Tensor:
    """`function` of each document by itself; the first `sequences` tensors are [L, B, ...], the others whole."""
    of_rows = []
    for row, sizes in enumerate(rows):
        parts = [tensor[:, row : row + 1].split(sizes) for tensor in tensors[:sequences]]
        found = [function(*of_document, *tensors[sequences:]) for of_document in zip(*parts, strict=True)]
        of_rows.append(torch.cat(found))
    return torch.cat(of_rows, 1)


def compare(found: list[Tensor], truth: list[Tensor]) -> None:
    for number, (ours, exact) in enumerate(zip(found, truth, strict=True)):
        assert (ours - exact).norm() <= 1e-12 * exact.norm() + 1e-14, number


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("chunk", [8, 7])
def test_scan_starts_anew_in_each_document(
    documents: str, segment: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SEGMENT", segment)
    rows = DOCUMENTS[documents]
    x, dt, decay, b, c, d = scan_inputs(LENGTH)
    inputs = [x, dt, b, c, decay, d]

    def packed(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, d: Tensor) -> Tensor:
        return chunked_scan(x, dt, decay, b, c, d, chunk, positions_of(rows))

    def of_document(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, d: Tensor) -> Tensor:
        return recurrence(x, dt, decay, b, c, d)

    truth = with_gradients(lambda *tensors: alone(of_document, 4, rows, *tensors), inputs)
    compare(with_gradients(packed, inputs), truth)


@pytest.mark.parametrize("length", [16, 17, 32, 40, 47])
def test_segments_carry_the_state(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = scan_inputs(length)
    truth = with_gradients(recurrence, inputs)
    for segment in (8, 16, 24):
        monkeypatch.setattr(scan, "SEGMENT", segment)
        compare(with_gradients(lambda *tensors: chunked_scan(*tensors, chunk_size=8), inputs), truth)


def test_segments_of_low_precision_give_gradients_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SEGMENT", 16)
    leaves = [tensor.bfloat16().requires_grad_() for tensor in scan_inputs(LENGTH)]
    out = chunked_scan(*leaves, chunk_size=8)
    assert out.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def test_what_backward_keeps_does_not_grow_with_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands, and one state for each segment: nothing of the size of a chunk's inner tensors."""
    monkeypatch.setattr(scan, "SEGMENT", 16)
    kept: list[Tensor] = []
    leaves = [tensor.requires_grad_() for tensor in scan_inputs(64)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        chunked_scan(*leaves, chunk_size=8)
    states = 3 * BATCH * HEADS * HEAD_DIM * STATE
    assert GROUPS and sum(tensor.numel() for tensor in kept) == sum(leaf.numel() for leaf in leaves) + states


@pytest.mark.parametrize("documents", [*DOCUMENTS, "none"])
@pytest.mark.parametrize("segment", [3, 16, 4096])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_reads_no_other_document(
    documents: str, segment: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(width)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=random) for shape in ((LENGTH, BATCH, 6), (6, width), (6,))
    )
    rows = DOCUMENTS.get(documents, ([LENGTH], [LENGTH]))
    positions = None if documents == "none" else positions_of(rows)

    def of_document(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = torch.nn.functional.conv1d(
            x.permute(1, 2, 0), weight.unsqueeze(1), bias, padding=width - 1, groups=6
        )
        return torch.nn.functional.silu(found[..., : len(x)]).permute(2, 0, 1)

    truth = with_gradients(lambda *tensors: alone(of_document, 1, rows, *tensors), [x, weight, bias])
    monkeypatch.setattr(convolution, "SEGMENT", segment)
    compare(with_gradients(lambda *tensors: causal_conv(*tensors, positions), [x, weight, bias]), truth)
