"""Attention in parts against a plain reference with a mask, on one rank; which parts there are; what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from nemo_qad.errors import UserError
from nemo_qad.models import context_attention
from nemo_qad.models.attention import CoreAttention
from nemo_qad.models.context import Documents
from nemo_qad.models.context_attention import attention, chunk_starts, find_parts, find_pieces

BATCH, HEAD_DIM = 2, 16
LENGTH = 75
ROWS: dict[str, list[list[int]] | None] = {  # lengths of the documents of each row
    "none": None,
    "alike": [[30, 1, 44]] * 2,
    "one_token": [[1] * 5 + [69, 1]] * 2,
    "differing": [[75], [7, 1, 1, 40, 26]],
}


def positions_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor([[position for length in row for position in range(length)] for row in rows])


def allowed(positions_BL: Tensor) -> Tensor:
    """[B, L, L]: may query i attend key j? By the definition: i - position <= j <= i."""
    index = torch.arange(positions_BL.shape[1])
    first = (index - positions_BL)[:, :, None]
    return (first <= index) & (index <= index[:, None])


def reference(query: Tensor, key: Tensor, value: Tensor, positions_BL: Tensor | None) -> Tensor:
    """From the definition, with a mask of the whole sequence."""
    length, batch, heads, head_dim = query.shape
    if positions_BL is None:
        positions_BL = torch.arange(length).expand(batch, -1)
    key, value = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (key, value))
    scores = torch.einsum("ibhp,jbhp->bhij", query, key) / head_dim**0.5
    scores = scores.masked_fill(~allowed(positions_BL)[:, None], -torch.inf)
    return torch.einsum("bhij,jbhp->ibhp", scores.softmax(-1), value)


def operands(heads: int = 4, groups: int = 2, length: int = LENGTH) -> list[Tensor]:
    """FP64 query, key, value and a gradient of the output."""
    random = torch.Generator().manual_seed(heads * length + groups)
    shapes = [(length, BATCH, n, HEAD_DIM) for n in (heads, groups, groups, heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes]


def relative_error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


def with_gradients(function, inputs: list[Tensor], *more) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """[output, gradients of query, key and value]."""
    *leaves, gradient = (tensor.detach().requires_grad_() for tensor in inputs)
    out = function(*leaves, *more)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def in_parts(query: Tensor, key: Tensor, value: Tensor, positions_BL: Tensor | None) -> Tensor:
    return attention(query, key, value, positions_BL=positions_BL)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("block", [8, 2048])
def test_parts_equal_the_reference(
    rows: str, heads: int, groups: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_attention, "BLOCK", block)
    documents = ROWS[rows]
    positions = None if documents is None else positions_of(documents)
    inputs = operands(heads, groups)
    truth = with_gradients(reference, inputs, positions)
    found = with_gradients(in_parts, [tensor.float() for tensor in inputs], positions)
    assert found[0].dtype == torch.float32
    assert [relative_error(f, t) < 1e-6 for f, t in zip(found, truth, strict=True)] == [True] * 4
    exact = with_gradients(in_parts, inputs, positions)
    assert max(relative_error(f, t) for f, t in zip(exact, truth, strict=True)) < 1e-14


@pytest.mark.parametrize("rows", ["none", "differing"])
def test_a_scale_of_its_own(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and in parts: the default scale is that of queries multiplied by 0.3 sqrt(P)."""
    inputs, documents = operands(), ROWS[rows]
    positions = None if documents is None else positions_of(documents)
    truth = with_gradients(lambda q, k, v: reference(q * 0.3 * HEAD_DIM**0.5, k, v, positions), inputs)
    module, packed = core_attention(softmax_scale=0.3), Documents(positions_BL=positions)
    for block in (2048, 8):
        monkeypatch.setattr(context_attention, "BLOCK", block)
        found = with_gradients(
            lambda *qkv: module(*qkv, packed_seq_params=packed).unflatten(2, (4, HEAD_DIM)), inputs
        )
        assert max(relative_error(f, t) for f, t in zip(found, truth, strict=True)) < 1e-14


@pytest.mark.parametrize("rows", ["none", "differing"])
def test_bf16_is_as_near_as_one_masked_call(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_attention, "BLOCK", 16)
    documents = ROWS[rows]
    positions = positions_of(documents) if documents else torch.arange(LENGTH).expand(BATCH, -1)
    inputs = [tensor.bfloat16() for tensor in operands()]
    truth = with_gradients(reference, [tensor.double() for tensor in inputs], positions)
    found = with_gradients(in_parts, inputs, positions)

    def one_call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (t.repeat_interleave(4 // t.shape[2], 2).permute(1, 2, 0, 3) for t in (query, key, value))
        mask = allowed(positions)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).permute(2, 0, 1, 3)

    for f, at_once, t in zip(found, with_gradients(one_call, inputs), truth, strict=True):
        assert f.dtype == torch.bfloat16
        assert relative_error(f, t) < 1.1 * relative_error(at_once, t) + 1e-4


def test_operands_and_gradients_of_any_stride() -> None:
    query, key, value, _ = (tensor.float() for tensor in operands())
    mixed = torch.cat([query.unflatten(2, (2, 2)).flatten(3), key, value], dim=3)  # as Megatron's QKV linear has them
    views = mixed.split([2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=3)
    transposed = query.movedim(3, 0).contiguous().movedim(0, 3)
    gradient = torch.ones(()).expand_as(query)
    expected = with_gradients(in_parts, [query, key, value, gradient.contiguous()], None)
    found = with_gradients(in_parts, [transposed, *views[1:], gradient], None)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("block", [4, 2048])
def test_parts_cover_what_is_allowed_once(
    ranks: int, rows: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_attention, "BLOCK", block)
    length, documents = 72 // ranks, ROWS[rows]
    if documents is None:
        whole, expected = None, allowed(torch.arange(72).expand(BATCH, -1)).int()
    else:
        whole = positions_of(documents)[:, :72]
        expected = allowed(whole).int()

    def indices(rank: int) -> Tensor:
        """Where each local token lies in the whole sequence."""
        starts = chunk_starts(length, rank, ranks)
        return torch.cat([torch.arange(start, start + length // len(starts)) for start in starts])

    counts = torch.zeros(BATCH, 72, 72, dtype=torch.int)
    for rank in range(ranks):
        own = indices(rank)
        local = None if whole is None else whole[:, own]
        pieces = find_pieces(local, chunk_starts(length, rank, ranks), length, BATCH)
        for owner in range(ranks):
            for part in find_parts(pieces, chunk_starts(length, owner, ranks), length, own=owner == rank):
                queries, keys = own[part.queries], indices(owner)[part.keys]
                assert 0 < len(queries) <= block
                assert 0 < len(keys) <= block
                pairs = torch.ones(len(queries), len(keys), dtype=torch.int)
                for row in range(BATCH)[part.rows]:
                    counts[row, queries[:, None], keys] += pairs.tril() if part.causal else pairs
    assert torch.equal(counts, expected)


def test_rows_cut_alike_go_together() -> None:
    starts = chunk_starts(LENGTH, 0, 1)
    alike, differing = (find_pieces(positions_of(ROWS[n] or []), starts, LENGTH, BATCH) for n in ("alike", "differing"))
    assert [(p.rows, p.begin, p.end) for p in alike] == [
        (slice(0, 2), 0, 30), (slice(0, 2), 30, 31), (slice(0, 2), 31, 75),
    ]  # fmt: skip
    assert [p.rows for p in differing] == [slice(0, 1)] + [slice(1, 2)] * 5


@pytest.mark.parametrize(
    ("row", "starts", "message"),
    [
        ([3, 4, 5, 6], (0,), "token 0 in row 1 is 3: it must lie between 0 and 0"),
        ([0, 1, 3, 4], (0,), "token 2 in row 1 is 3: after 1 it must be 2, or 0"),
        ([0, 1, 1, 2], (0,), "token 2 in row 1 is 1: after 1 it must be 2, or 0"),
        ([0, 1, -1, 0], (0,), "token 2 in row 1 is -1: after 1 it must be 2, or 0"),
        ([3, 4, 7, 8], (2, 4), "token 2 in row 1 is 3: it must lie between 0 and 2"),
        ([2, 3, 5, 6], (2, 4), "token 4 in row 1 is 5: it must lie between 0 and 4"),
        ([-1, 0, 0, 1], (2, 4), "token 2 in row 1 is -1: it must lie between 0 and 2"),
    ],
)
def test_positions_that_cannot_be(row: list[int], starts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_pieces(torch.tensor([[0, 0, 0, 0], row]), starts, 4, 2)


@pytest.mark.parametrize("positions", [torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 4)])
def test_positions_of_another_shape_or_dtype(positions: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \[2, 4\] integers"):
        find_pieces(positions, (0,), 4, 2)


def test_shapes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="7 tokens on each of 2"):
        chunk_starts(7, 0, 2)
    query, key, value, _ = operands(heads=3, groups=2)
    with pytest.raises(ValueError, match="3 query heads do not divide into 2 groups"):
        attention(query, key, value)


def core_attention(softmax_scale: float | None = None, **config: float) -> CoreAttention:
    settings = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, **{"attention_dropout": 0.0, **config}
    )
    return CoreAttention(settings, 1, AttnMaskType.causal, "self", softmax_scale=softmax_scale)


def test_core_attention_reads_documents() -> None:
    query, key, value, _ = operands()
    module, positions = core_attention(), positions_of(ROWS["differing"] or [])
    found = module(query, key, value, packed_seq_params=Documents(positions_BL=positions))
    assert relative_error(found, reference(query, key, value, positions).flatten(2)) < 1e-14
    without = module(query, key, value, packed_seq_params=Documents())
    assert torch.equal(without, module(query, key, value))
    assert relative_error(without, reference(query, key, value, None).flatten(2)) < 1e-14


def test_core_attention_in_parts_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence longer than a block takes the parts, a shorter one a single call."""
    *inputs, _ = operands()
    at_once = core_attention()(*inputs)
    monkeypatch.setattr(context_attention, "BLOCK", LENGTH - 1)
    calls = []
    monkeypatch.setattr(
        context_attention, "attention", lambda *a, **more: (calls.append(more), attention(*a, **more))[1]
    )
    assert relative_error(core_attention()(*inputs), at_once) < 1e-14
    assert len(calls) == 1


def test_what_core_attention_refuses() -> None:
    *inputs, _ = operands()
    documents = Documents(positions_BL=positions_of(ROWS["alike"] or []))
    with pytest.raises(UserError, match=r"PackedSeqParams is not supported.*Documents"):
        core_attention()(*inputs, packed_seq_params=PackedSeqParams())
    with pytest.raises(UserError, match=r"attention_dropout=0.1.*use 0"):
        core_attention(attention_dropout=0.1)(*inputs, packed_seq_params=documents)
    with pytest.raises(UserError, match="biases"):
        core_attention()(*inputs, attention_bias=inputs[0])
    on_gpu = SimpleNamespace(is_cuda=True)
    with pytest.raises(UserError, match="install Transformer Engine"):
        core_attention()._check_parts(on_gpu)


def test_dropout_acts_in_training_alone() -> None:
    *inputs, _ = (tensor.float() for tensor in operands())
    module = core_attention(attention_dropout=0.5)
    assert not torch.allclose(module.train()(*inputs), core_attention()(*inputs))
    assert torch.equal(module.eval()(*inputs), core_attention()(*inputs))


PEAKS = """
import torch
from pathlib import Path
from nemo_qad.models.context_attention import attention
torch.set_num_threads(1)
for length in (4096, 16384, 32768):
    query, key, value = (torch.randn(length, 1, heads, 16, requires_grad=True) for heads in (2, 1, 1))
    out = attention(query, key, value)
    out.backward(torch.randn_like(out))
    del query, key, value, out
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_memory_is_linear_in_the_sequence() -> None:
    """Forward and backward need their operands, results and gradients, and a constant.

    In a process of its own, whose allocator maps every large tensor, so that the peak is that of live tensors.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, env=environment
    )
    at_4k, at_16k, at_32k = (int(line) * 1024 for line in result.stdout.split())
    per_token = (at_16k - at_4k) / (16384 - 4096), (at_32k - at_16k) / 16384
    # FP32: query, output and their gradients; key, value and theirs; log-sum-exp.
    needed = 4 * (4 * 2 * 16 + 4 * 16 + 2)
    assert max(per_token) < 1.1 * needed
    assert min(per_token) > 0.9 * needed
