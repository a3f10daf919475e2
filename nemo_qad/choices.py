"""The choices of the configuration, as enums: a misspelt one is refused by name. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """Arithmetic of the model: FP32, or BF16 parameters with FP32 main parameters in the optimizer."""

    fp32 = "fp32"
    bf16 = "bf16"


class Architecture(StrEnum):
    """Whose layers a model has, by transformers' model_type."""

    nemotron_h = "nemotron_h"
    llama = "llama"
    qwen3 = "qwen3"
    qwen3_moe = "qwen3_moe"

    @property
    def is_hybrid(self) -> bool:
        """Squared ReLU, no rotary embedding, sigmoid router with a bias; the others are gated, rotary, softmax."""
        return self is Architecture.nemotron_h

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed, head by head."""
        return self in (Architecture.qwen3, Architecture.qwen3_moe)


class Format(StrEnum):
    """What a linear layer is stored in: BF16, NVFP4 weights (W4A16), weights and activations in NVFP4 (W4A4) or FP8."""

    bf16 = "bf16"
    nvfp4 = "nvfp4"
    nvfp4_w4a4 = "nvfp4_w4a4"
    fp8 = "fp8"

    @property
    def has_blocks(self) -> bool:
        """Whether 16 columns of the weight share a scale."""
        return self in (Format.nvfp4, Format.nvfp4_w4a4)

    @property
    def covers_inputs(self) -> bool:
        """Whether a linear's inputs are quantised as its weight is."""
        return self in (Format.nvfp4_w4a4, Format.fp8)


class KvFormat(StrEnum):
    none = "none"
    fp8 = "fp8"
    nvfp4 = "nvfp4"


class WeightScales(StrEnum):
    """dynamic: block scales are recomputed from the weights; static: kept from calibration."""

    dynamic = "dynamic"
    static = "static"


class ScaleSearch(StrEnum):
    """How static block scales are found.

    max: a block's largest element becomes 6. four_over_six: 6 or 4, the lower error, on scales up to 256.
    mse: the lowest error of all 126 E4M3 scales. mse_256: the same with the tensor's scale as four_over_six has it,
    which leaves the largest blocks room for a larger scale.
    """

    max = "max"
    mse = "mse"
    four_over_six = "four_over_six"
    mse_256 = "mse_256"

    @property
    def leaves_room(self) -> bool:
        """Whether the largest block scale aimed at is 256 instead of 448."""
        return self in (ScaleSearch.four_over_six, ScaleSearch.mse_256)


class ScaleError(StrEnum):
    """What a search of block scales makes small.

    squared: the squared error of the weights. hessian: that of the layer's outputs on the calibration set, block by
    block (each block's errors weighed by X^T X of its 16 inputs).
    """

    squared = "squared"
    hessian = "hessian"


class IdleExperts(StrEnum):
    """What becomes of an expert that no calibration token reached.

    weights: its scales come from its weights alone, and an activation scale from the other experts of its layer.
    all_tokens: it is shown every calibration token of its layer; routing stays as it is.
    error: the run stops and names it.
    """

    weights = "weights"
    all_tokens = "all_tokens"
    error = "error"


class QuantizeWeights(StrEnum):
    """When QAD quantises weights: once per_step, in place, or again in each per_forward, which gives the same bits."""

    per_step = "per_step"
    per_forward = "per_forward"


class QadScales(StrEnum):
    """Whether QAD recomputes the block scales as the weights move, or keeps those of PTQ."""

    dynamic = "dynamic"
    frozen = "frozen"


class Schedule(StrEnum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Keep(StrEnum):
    """Which weights QAD hands on: the best held-out KL seen, or those of the last step."""

    best = "best"
    last = "last"


class Loss(StrEnum):
    """What QAD minimises.

    linear_kl: kl(teacher || student) from hidden states and output weights; never holds logits.
    kl: the same on full logits.
    modelopt: ModelOpt's stock LogitsKLLoss, the peer to compare with; it counts padded vocabulary columns.
    top_k: the teacher's `sparse_values` most likely words, all others as one bucket, from a file.
    sampled: `sparse_values` draws a token from the teacher's distribution, from a file.
    """

    linear_kl = "linear_kl"
    kl = "kl"
    modelopt = "modelopt"
    top_k = "top_k"
    sampled = "sampled"

    @property
    def is_sparse(self) -> bool:
        """Whether the teacher comes from a file and is not built beside the student."""
        return self in (Loss.top_k, Loss.sampled)


class Recompute(StrEnum):
    """Which activations the backward pass makes anew instead of keeping them.

    none: keeps all. selective: makes anew what is inside expert, dense MLP and Mamba layers, but not attention, whose
    time grows with the square of the sequence. full: keeps each layer's input alone.
    """

    none = "none"
    selective = "selective"
    full = "full"


class Stage(StrEnum):
    """In their order. `logits` writes the teacher's file and applies to the sparse losses alone."""

    teacher = "teacher"
    ptq = "ptq"
    logits = "logits"
    qad = "qad"
    evaluate = "evaluate"
    export = "export"
    report = "report"


class Source(StrEnum):
    """Where text comes from: Python's standard library, or Megatron .bin/.idx files."""

    stdlib = "stdlib"
    indexed = "indexed"
