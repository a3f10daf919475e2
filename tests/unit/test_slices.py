"""A tensor-parallel rank reads the rows that it needs, and they are what cutting the whole tensor gives."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_huggingface_names import small_model
from torch import Tensor

from nemo_qad.choices import Architecture
from nemo_qad.huggingface.mapping import Kind, Mapping, to_mcore
from nemo_qad.huggingface.names import mappings
from nemo_qad.huggingface.slices import own_runs, read_own
from nemo_qad.huggingface.source import SafetensorsFolder
from nemo_qad.models.placement import Pieces
from nemo_qad.models.whole import fitted
from nemo_qad.schema import ModelConfig

HYBRID = small_model()
QWEN = small_model(architecture=Architecture.qwen3, hybrid_pattern="*-*-", rotary_base=1e4)


class Group:
    """Of a process group what a cut asks for."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


def cut_of(mapping: Mapping, model: ModelConfig, group: Any) -> Pieces | None:
    """As Megatron-Core's layers cut it, at 2 ranks."""
    name, rows = mapping.mcore, sum(shape[0] for shape in mapping.shapes)
    if name.endswith(("in_proj.weight", "conv1d_weight")):
        mamba = model.mamba
        inner, states = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
        parts = [inner, inner, states, states, mamba.num_heads] if "in_proj" in name else [inner, states, states]
        return Pieces(0, tuple(size // group.size() for size in parts), group)
    if name.endswith(("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")):
        return Pieces(1, (mapping.shapes[0][1] // group.size(),), group)
    if mapping.kind is Kind.gated:
        return Pieces(0, (rows // 2 // group.size(),) * 2, group)
    if mapping.kind is Kind.vocabulary:
        return Pieces(0, (128 // group.size(),), group)
    return Pieces(0, (rows // group.size(),), group) if mapping.is_linear else None


@pytest.fixture(scope="module", params=[HYBRID, QWEN], ids=["hybrid", "qwen3"])
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


@pytest.fixture(scope="module")
def folder(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(2)
    named = [(name, shape) for m in mappings(model) for name, shape in zip(m.hf, m.shapes, strict=True)]
    tensors = {name: torch.randn(shape, generator=random) for name, shape in named}
    path = tmp_path_factory.mktemp("model")
    save_file(tensors, path / "model.safetensors")
    return path, tensors


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_are_what_cutting_the_whole_gives(
    model: ModelConfig, folder: tuple[Path, dict[str, Tensor]], rank: int
) -> None:
    path, tensors = folder
    num_cut = 0
    with ExitStack() as files:
        source = SafetensorsFolder(path, files)
        for mapping in mappings(model):
            cut = cut_of(mapping, model, Group(2, rank))
            whole = to_mcore(mapping, tensors, model)
            if mapping.kind is Kind.vocabulary:
                whole = fitted(whole, 128)
            expected = whole if cut is None else cut.own(whole)
            own, read = read_own(source, mapping, cut, len(expected), model)
            assert torch.equal(own, expected), mapping.mcore
            if cut is not None:
                num_cut += 1
                num_read = sum(part.numel() for parts in read.values() for part in parts)
                assert num_read == (own[: 100 - 64 * rank] if mapping.kind is Kind.vocabulary else own).numel()
    assert num_cut >= 8


def test_runs_are_as_long_as_the_format_allows() -> None:
    """One read for each piece: three for q, k, v, five for in_proj, none of them row by row."""
    group: Any = Group(2, 1)
    counts = {m.mcore: len(own_runs(m, cut, 64, HYBRID)) for m in mappings(HYBRID) if (cut := cut_of(m, HYBRID, group))}
    assert counts["decoder.layers.0.mixer.in_proj.weight"] == 5
    assert counts["decoder.layers.0.mixer.conv1d_weight"] == 3
    assert counts["decoder.layers.1.self_attention.linear_qkv.weight"] == 3
    assert counts["decoder.layers.1.self_attention.linear_proj.weight"] == 1
