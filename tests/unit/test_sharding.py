"""Layouts that cannot work are refused with a value that does; every shipped layout fits its model."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_qad import config
from nemo_qad.errors import ConfigError
from nemo_qad.models.vocabulary import padded_vocab_size
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, ParallelConfig, RunConfig
from nemo_qad.sharding import INT32_LIMIT, check_batches, check_sharding, data_parallel_size, world_size

LOCAL = [name for name in config.choices("parallel") if name.startswith("local_")]
GIVE = re.compile(r"Give (?:([\w.]+)(?:=| of at least ))?(\d+)")
SIZES = ("tensor", "pipeline", "context", "expert", "expert_tensor")


@cache
def tiny() -> RunConfig:
    return config.compose(["+recipe=max", "qad.micro_batch_size=1", "teacher.global_batch_size=8"])


@cache
def nano() -> ModelConfig:
    return config.compose(["+recipe=max", "model=nemotron_3_nano_30b_a3b", "teacher.path=/t"]).model


def changed(node: Any, name: str, value: int) -> Any:
    """`node` with the field at a dotted name changed."""
    first, _, rest = name.partition(".")
    return replace(node, **{first: changed(getattr(node, first), rest, value) if rest else value})


def refusal(run: RunConfig) -> ConfigError | None:
    try:
        check_sharding(run.model, run.parallel)
        check_batches(run)
    except ConfigError as error:
        return error
    return None


def advised(run: RunConfig, error: ConfigError) -> RunConfig | None:
    """`run` with the value that the message names; None where it names none."""
    if (found := GIVE.search(str(error))) is None:
        return None
    advice: RunConfig = changed(run, found[1] or error.field, int(found[2]))
    assert advice != run, error
    return advice


def failed_check(run: RunConfig) -> str | None:
    """Field and problem, without their numbers."""
    error = refusal(run)
    if error is None:
        return None
    problem = str(error).partition(": ")[2].partition(". Give")[0]
    return re.sub(r"\d+", "", f"{error.field}: {problem}")


few = st.integers(1, 12)
layouts = st.builds(ParallelConfig, name=st.just("any"), nodes=st.integers(1, 3), ranks_per_node=st.integers(1, 16),
                    **dict.fromkeys(SIZES, few))  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    groups, maps = draw(few), draw(few)
    return ModelConfig(
        name="any",
        hybrid_pattern=draw(st.text("M*E-", min_size=1, max_size=8)),
        hidden_size=draw(st.sampled_from([48, 64, 96, 120])),
        vocab_size=draw(st.integers(1, 600)),
        max_position_embeddings=1 << 24,
        ffn_hidden_size=draw(st.sampled_from([48, 64, 96])),
        vocab_divisible_by=draw(st.sampled_from([1, 16, 128])),
        attention=AttentionConfig(groups * draw(st.integers(1, 4)), groups, 16),
        mamba=MambaConfig(maps * draw(st.integers(1, 4)), draw(st.sampled_from([16, 64])), maps, 16),
        moe=MoeConfig(draw(few), 1, draw(st.sampled_from([48, 64])), draw(st.sampled_from([48, 64]))),
    )


@settings(deadline=None, max_examples=400)
@given(
    model=models(), parallel=layouts, length=st.integers(1, 1 << 21), micro=st.integers(1, 9), total=st.integers(1, 40)
)
def test_advice_passes_the_check_that_failed_and_leads_to_a_layout(
    model: ModelConfig, parallel: ParallelConfig, length: int, micro: int, total: int
) -> None:
    run = replace(tiny(), model=model, parallel=parallel)
    run = changed(changed(run, "qad.sequence_length", length), "qad.micro_batch_size", micro)
    run = changed(run, "qad.global_batch_size", total)
    for _ in range(40):
        error = refusal(run)
        if error is None:
            break
        better = advised(run, error)
        if better is None:  # the remedy is in words: no length of this many ranks is short enough
            assert "Use fewer" in str(error)
            return
        assert failed_check(better) != failed_check(run), error
        run = better
    else:
        pytest.fail(f"the advice leads nowhere: {error}")
    sizes = run.parallel
    assert world_size(sizes) % (sizes.tensor * sizes.pipeline * sizes.context) == 0
    assert world_size(sizes) % (sizes.expert_tensor * sizes.expert * sizes.pipeline) == 0
    assert run.qad.global_batch_size % (run.qad.micro_batch_size * data_parallel_size(sizes)) == 0
    assert padded_vocab_size(run.model, sizes.tensor) % sizes.tensor == 0


@pytest.mark.parametrize("name", LOCAL)
def test_every_local_layout_fits_the_small_model(name: str) -> None:
    run = config.compose(["+recipe=four_over_six", f"parallel={name}", "qad.micro_batch_size=8"])
    sizes = run.parallel
    product = sizes.tensor * sizes.pipeline * sizes.context * sizes.expert
    assert run.parallel.name == name and sizes.nodes == 1
    assert sizes.ranks_per_node == (2 if name == "local_dp2" else product)
    for size in re.findall(r"(tp|cp|ep|pp)(\d)", name):
        field = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}[size[0]]
        assert getattr(sizes, field) == int(size[1])


def test_the_grid_of_local_layouts() -> None:
    assert {"local_tp2", "local_cp2", "local_ep2", "local_pp2", "local_dp2", "local_tp2_cp2"} <= set(LOCAL)


def test_clusters_fit_the_released_model() -> None:
    given = ["+recipe=max", "model=nemotron_3_nano_30b_a3b", "teacher.path=/t", "qad=published_32k"]
    for name, replicas in {"b300_ptq": 4, "b300_qad_32k": 8, "b300_qad_522k": 2, "h100": 1}.items():
        parallel = config.compose([*given, f"parallel={name}"]).parallel
        check_sharding(nano(), parallel)
        assert data_parallel_size(parallel) == replicas


@pytest.mark.parametrize(
    ("context", "tensor"), [(2, 4), (4, 2), (4, 3), (8, 8), (2, 1), (1, 4), (1, 1)]
)
def test_sequences_divide_over_both_kinds_of_ranks(context: int, tensor: int) -> None:
    """Accepted if and only if S % (CP x lcm(2, TP)) == 0 (under CP 1: S % TP); else the next valid S is named."""
    multiple = {(2, 4): 8, (4, 2): 8, (4, 3): 24, (8, 8): 64, (2, 1): 4, (1, 4): 4, (1, 1): 1}[context, tensor]
    parallel = ParallelConfig(name="any", ranks_per_node=context * tensor, tensor=tensor, context=context)
    model = replace(tiny().model, hybrid_pattern="-", hidden_size=192, ffn_hidden_size=192, max_position_embeddings=960)
    run = replace(tiny(), parallel=parallel, model=model)
    for name in ("calibration", "evaluation", "teacher"):
        run = changed(run, f"{name}.sequence_length", 960)
    for length in range(1, 200):
        error = refusal(changed(run, "qad.sequence_length", length))
        assert (error is None) == (length % multiple == 0)
        assert error is None or str(error).endswith(f"Give {-(-length // multiple) * multiple}.")


def test_the_smallest_safe_context_parallel_size_of_the_scan() -> None:
    """Exactly: also a size that the Mamba heads and groups allow and that divides the sequence."""
    def needed(length: int, parallel: ParallelConfig, micro: int = 1) -> str:
        run = replace(tiny(), model=replace(nano(), max_position_embeddings=1 << 24), parallel=parallel)
        run = changed(changed(run, "qad.micro_batch_size", micro), "qad.sequence_length", length)
        error = refusal(changed(run, "qad.global_batch_size", 960))
        if error is None:
            return "fits"
        assert error.field == "qad.sequence_length"
        return str(error)

    one, two = ParallelConfig(name="one"), ParallelConfig(name="tp2", ranks_per_node=2, tensor=2)
    row = 2 * 64 * 64 + 2 * 8 * 128 + 64  # z and x, B and C, dt of a token
    safe = (INT32_LIMIT - 1) // row
    assert safe == 208_412
    assert needed(safe, one) == "fits"
    assert f"{safe + 4} tokens x {row}" in needed(safe + 4, one) and "at least 2," in needed(safe + 4, one)
    assert "at least 4," in needed(1 << 19, one)
    assert "at least 16," in needed(1 << 19, one, micro=5)  # sizes between do not divide the heads, or are too few
    assert needed(2 * safe, two) == "fits"
    assert "at least 2," in needed(2 * safe + 8, two)
    assert f"Give {safe // 2 * 2}" in needed(safe + 2, one)  # no multiple of 2 x CP: a shorter text
    # The published 522,240 tokens on 16 ranks, more than there are groups: far below.
    assert needed(522_240, ParallelConfig(name="cp16", ranks_per_node=16, context=16)) == "fits"


@pytest.mark.parametrize("size", [7, 1 << 30])
@pytest.mark.parametrize("name", SIZES)
def test_absurd_sizes_are_refused_at_once(name: str, size: int) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"parallel\.{name}={size}"):
        check_sharding(nano(), changed(ParallelConfig(name="any"), name, size))
    assert time.monotonic() - began < 1
