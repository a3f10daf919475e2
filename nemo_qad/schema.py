"""The configuration's schema: one dataclass a group of `conf/`, standard library only.

Choices are the enums of `choices.py`. `config.py` loads YAML and the command line
into these classes and validates them; the rest of the package only ever sees the dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_qad.choices import (
    Architecture,
    Format,
    IdleExperts,
    Keep,
    KvFormat,
    Loss,
    Precision,
    QadScales,
    QuantizeWeights,
    Recompute,
    ScaleError,
    ScaleSearch,
    Schedule,
    Source,
    Stage,
    WeightScales,
)

MISSING: Any = "???"  # OmegaConf's mark of a value that the YAML must give


@dataclass
class AttentionConfig:
    num_heads: int = MISSING
    num_query_groups: int = MISSING
    head_dim: int = MISSING


@dataclass
class MambaConfig:
    num_heads: int = MISSING
    head_dim: int = MISSING
    num_groups: int = MISSING
    state_dim: int = MISSING
    conv_kernel: int = 4
    chunk_size: int = 128


@dataclass
class MoeConfig:
    num_experts: int = MISSING
    top_k: int = MISSING
    ffn_hidden_size: int = MISSING
    shared_expert_ffn_hidden_size: int = MISSING
    routed_scaling_factor: float = 2.5
    aux_loss_coeff: float = 1e-4
    bias_update_rate: float = 1e-3


@dataclass
class RotaryScalingConfig:
    """Llama 3.1's stretch of the slow rotary frequencies by `factor`; 1 leaves them alone.

    Frequencies that turn more than `high_freq_factor` times in `original_max_position_embeddings` positions stay,
    those that turn less than `low_freq_factor` times are divided by `factor`, others lie between.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass
class ModelConfig:
    """A decoder of four kinds of layers. `hybrid_pattern`: M Mamba-2, * attention, E mixture of experts, - dense MLP.

    A layer of Llama or Qwen3 is two of these: "*-" or "*E". `rotary_base` 0: no rotary embedding.
    """

    name: str = MISSING
    path: str | None = None  # folder of a Hugging Face checkpoint, whose config.json gives all of this
    architecture: Architecture = Architecture.nemotron_h
    hybrid_pattern: str = MISSING
    hidden_size: int = MISSING
    vocab_size: int = MISSING
    max_position_embeddings: int = MISSING
    ffn_hidden_size: int = MISSING
    precision: Precision = Precision.bf16
    layernorm_epsilon: float = 1e-5
    init_std: float = 0.02
    vocab_divisible_by: int = 128
    tied_output: bool = False
    rotary_base: float = 0.0
    rotary_scaling: RotaryScalingConfig = field(default_factory=RotaryScalingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mamba: MambaConfig = field(default_factory=MambaConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    mtp_pattern: str = ""
    mtp_num_layers: int = 0
    source: str = ""


@dataclass
class ExtraRule:
    """A recipe rule beside the named parts: module names that match `modules` (a glob) get `format`."""

    modules: str = MISSING
    format: Format = MISSING


@dataclass
class RecipeConfig:
    """A PTQ recipe. Each part of the model has a format; block scales are found by `scale_search`."""

    name: str = MISSING
    description: str = MISSING
    routed_experts: Format = Format.nvfp4
    shared_experts: Format = Format.nvfp4
    mamba: Format = Format.nvfp4
    dense_mlp: Format = Format.nvfp4
    attention: Format = Format.bf16
    output_layer: Format = Format.nvfp4
    kv_cache: KvFormat = KvFormat.fp8
    weight_scales: WeightScales = WeightScales.static
    scale_search: ScaleSearch = ScaleSearch.four_over_six
    qad_scales: QadScales = QadScales.frozen
    extra_rules: list[ExtraRule] = field(default_factory=list)


@dataclass
class CalibrationConfig:
    num_samples: int = MISSING
    sequence_length: int = MISSING
    micro_batch_size: int = 1
    error: ScaleError = ScaleError.squared  # what the recipe's search of block scales makes small
    idle_experts: IdleExperts = IdleExperts.weights


@dataclass
class DataConfig:
    """Training text. `generated_fraction` of the tokens is material that the generated tasks need."""

    name: str = MISSING
    source: Source = MISSING
    path: str | None = None  # folder of .bin/.idx pairs and tokenizer.json, for source=indexed
    tokenizer: str | None = None  # folder with the tokenizer.json that source=stdlib uses instead of training one
    held_out_fraction: float = 0.05
    generated_fraction: float = 0.25
    seed: int = 1234


@dataclass
class TeacherConfig:
    """The BF16 model. With `path` it is read; without, it is trained from scratch and cached."""

    path: str | None = None
    steps: int = 1000
    learning_rate: float = 3e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 50
    global_batch_size: int = 8
    sequence_length: int = 128
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    seed: int = 1234


@dataclass
class QadConfig:
    """Distillation: kl(teacher || student) over valid tokens by default, published settings in conf/qad."""

    name: str = MISSING
    learning_rate: float = MISSING
    min_learning_rate: float = MISSING
    warmup_steps: int = MISSING
    steps: int = MISSING
    schedule: Schedule = Schedule.cosine
    global_batch_size: int = MISSING
    micro_batch_size: int = 1
    sequence_length: int = MISSING
    loss: Loss = Loss.linear_kl
    reverse: bool = False  # kl(student || teacher); linear_kl and kl only
    temperature: float = 1.0
    loss_memory_mib: int = 128  # scratch memory of the fused losses
    sparse_values: int = 64  # a token, in the teacher's file
    teacher_logits: str | None = None  # an existing folder of sparse logits; empty: made in the cache
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    weight_decay: float = 0.0
    average_decay: float = 0.0  # 0: off; else exponential moving average of the weights, judged beside them
    validate_every: int = 20
    validation_samples: int = 64
    save_every: int = 50
    keep_checkpoints: int = 2  # the newest so many stay
    async_save: bool = True  # checkpoints are written by another process while training goes on
    max_skipped_steps: int = 0  # steps of NaN or Inf to pass over before the run stops
    max_loss_jump: float = 1.2  # of the same samples before and after a checkpoint was read; more stops the run
    keep: Keep = Keep.best
    quantize_weights: QuantizeWeights = QuantizeWeights.per_step
    clip_weights: bool = False  # after each step, weights beyond what their frozen scale reaches are moved to it
    refresh_scales_every: int = 0  # steps after which frozen block scales are chosen anew; 0: never


@dataclass
class ParallelConfig:
    """Sizes of the parallel groups; the data-parallel size follows from nodes x ranks_per_node."""

    name: str = MISSING
    nodes: int = 1
    ranks_per_node: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    distributed_optimizer: bool = False
    recompute: Recompute = Recompute.none


@dataclass
class EvaluationConfig:
    name: str = MISSING
    num_questions: int = 400
    held_out_samples: int = 256
    sequence_length: int = 128
    micro_batch_size: int = 16
    band_low: float = 0.95
    band_high: float = 0.99


@dataclass
class ExportConfig:
    max_shard_gb: float = 5.0


@dataclass
class ResumeConfig:
    """How a run folder that holds something already may be continued."""

    allow: list[str] = field(default_factory=list)  # fields that may differ from the run folder's, by dotted name
    restart: int = 0  # one more than before: QAD's checkpoints are set aside and it begins anew


@dataclass
class RunConfig:
    """One run. `run_dir` empty: outputs/MODEL-RECIPE-HASH, so that another configuration never collides."""

    recipe: RecipeConfig = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = MISSING
    qad: QadConfig = MISSING
    evaluation: EvaluationConfig = MISSING
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    calibration: CalibrationConfig = MISSING
    export: ExportConfig = field(default_factory=ExportConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    run_dir: str | None = None
    output_dir: str = "outputs"
    cache_dir: str | None = None  # empty: OUTPUT_DIR/cache
    seed: int = 1234
    threads: int = 0  # CPU threads a rank; 0: all cores divided by the local ranks
    deterministic: bool = True
