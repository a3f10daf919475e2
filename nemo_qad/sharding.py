"""Parallel sizes against the world, the model and the batches. Numbers only; no process group is made."""

from __future__ import annotations

import math

from nemo_qad.errors import ConfigError
from nemo_qad.schema import ModelConfig, ParallelConfig, RunConfig

INT32_LIMIT = 2**31


def world_size(parallel: ParallelConfig) -> int:
    return parallel.nodes * parallel.ranks_per_node


def data_parallel_size(parallel: ParallelConfig) -> int:
    """Model replicas that see different samples: world / (tensor x pipeline x context)."""
    return world_size(parallel) // (parallel.tensor * parallel.pipeline * parallel.context)


def sequence_multiple(parallel: ParallelConfig) -> int:
    """Sequence lengths must be multiples of this.

    Context parallelism cuts a sequence in 2 pieces a rank to balance causal attention, and sequence
    parallelism cuts what a rank holds over the tensor-parallel ranks.
    """
    if parallel.context == 1:
        return parallel.tensor
    return parallel.context * math.lcm(2, parallel.tensor)


def check_sharding(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError when the groups do not tile the world, or the model does not divide over them."""
    _check_world(parallel)
    layers = model.hybrid_pattern
    _must_divide("pipeline", parallel.pipeline, len(layers), "the number of layers of model.hybrid_pattern")
    if "*" in layers:
        _check_attention(model, parallel)
    if "M" in layers:
        _check_mamba(model, parallel)
    if "E" in layers:
        _must_divide("expert", parallel.expert, model.moe.num_experts, "model.moe.num_experts")
        width, shared = model.moe.ffn_hidden_size, model.moe.shared_expert_ffn_hidden_size
        _must_divide("expert_tensor", parallel.expert_tensor, width, "model.moe.ffn_hidden_size")
        _must_divide("tensor", parallel.tensor, shared, "model.moe.shared_expert_ffn_hidden_size")
    elif parallel.expert > 1 or parallel.expert_tensor > 1:
        remedy = "Give parallel.expert=1 parallel.expert_tensor=1."
        raise ConfigError("parallel.expert", parallel.expert, "the model has no experts", remedy)
    if "-" in layers:
        _must_divide("tensor", parallel.tensor, model.ffn_hidden_size, "model.ffn_hidden_size")
    _must_divide("tensor", parallel.tensor, model.hidden_size, "model.hidden_size")


def _must_divide(name: str, size: int, total: int, what: str) -> None:
    if total % size:
        fits = ", ".join(str(n) for n in range(1, min(total, 128) + 1) if total % n == 0)
        problem = f"does not divide {what} ({total})"
        raise ConfigError(f"parallel.{name}", size, problem, f"Sizes that do: {fits}.")


def _check_world(parallel: ParallelConfig) -> None:
    world = world_size(parallel)
    for names in (("tensor", "pipeline", "context"), ("expert_tensor", "expert", "pipeline")):
        sizes = [getattr(parallel, name) for name in names]
        product = math.prod(sizes)
        if world % product:
            largest = names[sizes.index(max(sizes))]
            formula = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
            raise ConfigError(
                f"parallel.{largest}",
                getattr(parallel, largest),
                f"{formula} = {product} does not divide the {world} ranks of nodes x ranks_per_node",
                "Change a size, or parallel.nodes and parallel.ranks_per_node.",
            )


def _check_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    heads, groups, tensor = model.attention.num_heads, model.attention.num_query_groups, parallel.tensor
    _must_divide("tensor", tensor, heads, "model.attention.num_heads")
    if groups % tensor and tensor % groups:
        problem = f"neither divides model.attention.num_query_groups ({groups}) nor is a multiple of it"
        raise ConfigError("parallel.tensor", tensor, problem, f"Give {groups} or a divisor of it.")


def _check_mamba(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Mamba-2 splits heads and groups over TP; under CP it trades sequence for heads, copying groups."""
    heads, groups = model.mamba.num_heads, model.mamba.num_groups
    _must_divide("tensor", parallel.tensor, groups, "model.mamba.num_groups")
    _must_divide("tensor", parallel.tensor, heads, "model.mamba.num_heads")
    _must_divide("context", parallel.context, heads // parallel.tensor, "the Mamba heads of a rank")
    local_groups, context = groups // parallel.tensor, parallel.context
    if local_groups % context and context % local_groups:
        problem = f"neither divides the Mamba groups of a rank ({local_groups}) nor is a multiple of them"
        raise ConfigError("parallel.context", context, problem, f"Give {local_groups} or a divisor of it.")


def check_batches(run: RunConfig) -> None:
    """Raises ConfigError when a batch does not divide over the ranks, or a sequence over CP and TP."""
    replicas = data_parallel_size(run.parallel)
    step = run.qad.micro_batch_size * replicas
    if run.qad.global_batch_size % step:
        raise ConfigError(
            "qad.global_batch_size",
            run.qad.global_batch_size,
            f"not a multiple of qad.micro_batch_size {run.qad.micro_batch_size} x data-parallel {replicas}",
            f"Give {math.ceil(run.qad.global_batch_size / step) * step}, or a smaller qad.micro_batch_size.",
        )
    multiple = sequence_multiple(run.parallel)
    for name in ("qad", "calibration", "evaluation"):
        length = getattr(run, name).sequence_length
        if length % multiple:
            problem = f"not a multiple of {multiple}, which parallel={run.parallel.name} needs"
            remedy = f"Give {math.ceil(length / multiple) * multiple}."
            raise ConfigError(f"{name}.sequence_length", length, problem, remedy)
    if "M" in run.model.hybrid_pattern:
        _check_scan(run)


def _check_scan(run: RunConfig) -> None:
    """Mamba-2's Triton scan addresses a rank's tokens x heads x head_dim in 32 bits; beyond, it is wrong."""
    mamba, parallel = run.model.mamba, run.parallel
    for name in ("qad", "calibration", "evaluation"):
        stage = getattr(run, name)
        tokens = stage.micro_batch_size * stage.sequence_length
        width = mamba.num_heads * mamba.head_dim // parallel.tensor
        if tokens * width // parallel.context >= INT32_LIMIT:
            needed = tokens * width // INT32_LIMIT + 1
            raise ConfigError(
                f"{name}.sequence_length",
                stage.sequence_length,
                "the Mamba-2 chunk scan would address more than 2^31 values on a rank",
                f"Give parallel.context of at least {needed}, a smaller micro_batch_size or a shorter text.",
            )
