"""Parallel sizes against the world, the model and the batches. Numbers only; no process group is made.

Each message names a value that passes the check that failed, as near below the given one as there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nemo_qad.errors import ConfigError
from nemo_qad.models.vocabulary import padded_vocab_size
from nemo_qad.schema import ModelConfig, ParallelConfig, RunConfig

INT32_LIMIT = 2**31
MAX_SIZES = 12  # that a message lists
LARGEST = 4096  # size or micro-batch that is proposed

Check = Callable[[int], str | None]  # a size -> what is wrong with it


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
    """Raises ConfigError when the model does not divide over the groups, or these do not tile the world."""
    layers = len(model.hybrid_pattern)
    _check_size("tensor", parallel.tensor, lambda size: _tensor_problem(model, size))
    _check_size("context", parallel.context, lambda size: _context_problem(model, parallel.tensor, size))
    _check_size("pipeline", parallel.pipeline, lambda size: _pipeline_problem(layers, size))
    _check_size("expert", parallel.expert, lambda size: _expert_problem(model, size))
    _check_size("expert_tensor", parallel.expert_tensor, lambda size: _expert_tensor_problem(model, size))
    _check_world(parallel)


def _check_size(name: str, size: int, check: Check) -> None:
    """Raises with the nearest smaller size that passes; 1 always does."""
    problem = check(size)
    if problem is None:
        return
    fits = [n for n in range(1, LARGEST) if check(n) is None]
    below = [n for n in fits if n < size]
    shown = ", ".join(map(str, fits[max(0, len(below) - MAX_SIZES // 2) :][:MAX_SIZES]))
    raise ConfigError(f"parallel.{name}", size, problem, f"Give {below[-1]}. Sizes that fit: {shown}.")


def _not_dividing(total: int, what: str, size: int) -> str | None:
    return f"does not divide {what} ({total})" if total % size else None


def _tensor_problem(model: ModelConfig, size: int) -> str | None:
    layers, attention, mamba, moe = model.hybrid_pattern, model.attention, model.mamba, model.moe
    widths = {"model.hidden_size": model.hidden_size}
    if "*" in layers:
        widths["model.attention.num_heads"] = attention.num_heads
    if "M" in layers:
        widths |= {"model.mamba.num_groups": mamba.num_groups, "model.mamba.num_heads": mamba.num_heads}
    if "E" in layers:
        widths["model.moe.shared_expert_ffn_hidden_size"] = moe.shared_expert_ffn_hidden_size
    if "-" in layers:
        widths["model.ffn_hidden_size"] = model.ffn_hidden_size
    problems = (_not_dividing(total, what, size) for what, total in widths.items())
    groups = attention.num_query_groups
    if "*" in layers and groups % size and size % groups:
        return f"neither divides model.attention.num_query_groups ({groups}) nor is a multiple of it"
    return next((problem for problem in problems if problem), None) or _vocabulary_problem(model, size)


def _vocabulary_problem(model: ModelConfig, size: int) -> str | None:
    """The vocabulary is padded to a multiple of size x vocab_divisible_by; no rank may hold padding alone."""
    share = padded_vocab_size(model, size) // size
    if model.vocab_size > (size - 1) * share:
        return None
    held = f"of {share} rows each rank holds, the last rank's are all padding"
    return f"model.vocab_size={model.vocab_size} with model.vocab_divisible_by={model.vocab_divisible_by}: {held}"


def _context_problem(model: ModelConfig, tensor: int, size: int) -> str | None:
    """Attention takes any size; Mamba-2 trades sequence for heads, and copies groups that are fewer than ranks."""
    if "M" not in model.hybrid_pattern:
        return None
    heads, groups = model.mamba.num_heads // tensor, model.mamba.num_groups // tensor
    if heads % size:
        return f"does not divide the Mamba heads of a tensor-parallel rank ({heads})"
    if groups % size and size % groups:
        return f"neither divides the Mamba groups of a tensor-parallel rank ({groups}) nor is a multiple of them"
    return None


def _pipeline_problem(layers: int, size: int) -> str | None:
    return f"more stages than model.hybrid_pattern has layers ({layers})" if size > layers else None


def _expert_problem(model: ModelConfig, size: int) -> str | None:
    if "E" not in model.hybrid_pattern:
        return "the model has no experts" if size > 1 else None
    return _not_dividing(model.moe.num_experts, "model.moe.num_experts", size)


def _expert_tensor_problem(model: ModelConfig, size: int) -> str | None:
    if "E" not in model.hybrid_pattern:
        return "the model has no experts" if size > 1 else None
    return _not_dividing(model.moe.ffn_hidden_size, "model.moe.ffn_hidden_size", size)


def _check_world(parallel: ParallelConfig) -> None:
    """Attention's and the experts' groups each tile the ranks; a multiple of both products always fits."""
    world, products = world_size(parallel), {}
    for names in (("tensor", "pipeline", "context"), ("expert_tensor", "expert", "pipeline")):
        products[names] = math.prod(getattr(parallel, name) for name in names)
    unit = math.lcm(*products.values())
    a_node = unit // math.gcd(unit, parallel.nodes)
    ranks = math.ceil(parallel.ranks_per_node / a_node) * a_node
    for names, product in products.items():
        if world % product:
            largest = max(names, key=lambda name: getattr(parallel, name))
            formula = " x ".join(f"{name} {getattr(parallel, name)}" for name in names)
            raise ConfigError(
                f"parallel.{largest}",
                getattr(parallel, largest),
                f"{formula} = {product} does not divide the {world} ranks of nodes x ranks_per_node",
                f"Give parallel.ranks_per_node={ranks}, or a smaller size.",
            )


def check_batches(run: RunConfig) -> None:
    """Raises ConfigError when a batch does not divide over the ranks, or a sequence over CP and TP."""
    replicas = data_parallel_size(run.parallel)
    _check_global_batch(run, replicas)
    if run.teacher.path is None and run.teacher.global_batch_size % replicas:
        size = math.ceil(run.teacher.global_batch_size / replicas) * replicas
        problem = f"not a multiple of data-parallel {replicas}"
        raise ConfigError("teacher.global_batch_size", run.teacher.global_batch_size, problem, f"Give {size}.")
    multiple = sequence_multiple(run.parallel)
    for name in _stages(run):
        length = getattr(run, name).sequence_length
        if length % multiple:
            problem = f"not a multiple of {multiple}, which parallel={run.parallel.name} needs"
            raise ConfigError(f"{name}.sequence_length", length, problem, _length_remedy(run, length, multiple))
    if "M" in run.model.hybrid_pattern:
        _check_scan(run)


def _stages(run: RunConfig) -> list[str]:
    """Parts of the configuration whose sequences a model of this run sees."""
    return ["qad", "calibration", "evaluation", *(["teacher"] if run.teacher.path is None else [])]


def _check_global_batch(run: RunConfig, replicas: int) -> None:
    total, micro = run.qad.global_batch_size, run.qad.micro_batch_size
    if total % (micro * replicas) == 0:
        return
    fits = [size for size in range(1, min(micro, LARGEST)) if total % (size * replicas) == 0]
    other = f"or qad.micro_batch_size={fits[-1]}" if fits else "or fewer data-parallel ranks"
    raise ConfigError(
        "qad.global_batch_size",
        total,
        f"not a multiple of qad.micro_batch_size {micro} x data-parallel {replicas}",
        f"Give {math.ceil(total / (micro * replicas)) * micro * replicas}, {other}.",
    )


def _length_remedy(run: RunConfig, length: int, multiple: int) -> str:
    above = math.ceil(length / multiple) * multiple
    if above <= run.model.max_position_embeddings:
        return f"Give {above}."
    below = length // multiple * multiple
    return f"Give {below}." if below else "Use fewer context- or tensor-parallel ranks."


def _check_scan(run: RunConfig) -> None:
    """Mamba-2's Triton kernels on GPUs count offsets in 32 bits: beyond 2^31 values their results are wrong.

    The furthest offset is that of the last token in the projection that holds z, x, B, C and dt of the rank's heads.
    """
    for name in _stages(run):
        length, rows, context = getattr(run, name).sequence_length, _rows(run, name), run.parallel.context
        width = _scan_width(run.model, run.parallel.tensor, context)
        if rows * length * width < INT32_LIMIT:
            continue
        raise ConfigError(
            f"{name}.sequence_length",
            length,
            "the kernels of Mamba-2's chunk scan (mamba_split_conv1d_scan_combined) would address more than 2^31 "
            f"values on a rank ({rows} x {length} tokens x {width} with context-parallel {context})",
            _scan_remedy(run, name, rows),
        )


def _scan_width(model: ModelConfig, tensor: int, context: int) -> int:
    """Values a token of the whole sequence on a rank: z, x, B and C (of groups that few ranks have to share), dt."""
    mamba, ranks = model.mamba, tensor * context
    groups = max(1, mamba.num_groups // ranks)
    return (2 * mamba.num_heads * mamba.head_dim + mamba.num_heads) // ranks + 2 * groups * mamba.state_dim


def _rows(run: RunConfig, name: str) -> int:
    """Sequences that a rank feeds at a time."""
    if name == "teacher":  # which has no micro-batches
        return max(1, run.teacher.global_batch_size // data_parallel_size(run.parallel))
    rows = getattr(run, name).micro_batch_size
    assert isinstance(rows, int)
    return rows


def _scan_remedy(run: RunConfig, name: str, rows: int) -> str:
    """The smallest context-parallel size that is safe and that model and sequence allow; else a shorter input."""
    model, parallel, length = run.model, run.parallel, getattr(run, name).sequence_length
    step = math.lcm(2, parallel.tensor)
    for size in range(parallel.context + 1, model.mamba.num_heads // parallel.tensor + 1):
        fits = _context_problem(model, parallel.tensor, size) is None and length % (size * step) == 0
        if fits and rows * length * _scan_width(model, parallel.tensor, size) < INT32_LIMIT:
            return f"Give parallel.context of at least {size}, a smaller micro_batch_size or a shorter text."
    multiple, width = sequence_multiple(parallel), _scan_width(model, parallel.tensor, parallel.context)
    longest = (INT32_LIMIT - 1) // (rows * width) // multiple * multiple
    shorter = f"Give {longest}, or a" if longest else "Give a"
    return f"{shorter} smaller micro_batch_size; no context-parallel size of this model is enough."
