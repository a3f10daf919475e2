"""Values that have the right type and still cannot work: refused before anything is built.

Each check names the field, its value and the remedy. Paths are looked at by `check_inputs` alone, so that
a frozen configuration can be read on a machine that does not have them.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from nemo_qad import fields as schema_fields
from nemo_qad.errors import ConfigError
from nemo_qad.recipe_validation import check_recipe
from nemo_qad.schema import (
    Loss,
    ModelConfig,
    RunConfig,
    Source,
    Stage,
)
from nemo_qad.sharding import check_batches, check_sharding

LAYERS = "M*E-"
MIN_TOKENIZER = 512  # byte-level BPE: 256 bytes, specials, and room for merges
MAY_BE_ZERO = {
    "seed",
    "data.seed",
    "teacher.seed",
    "threads",
    "model.mtp_num_layers",
    "qad.refresh_scales_every",
    "qad.max_skipped_steps",
    "qad.warmup_steps",
    "resume.restart",
    "teacher.warmup_steps",
}
MAY_BE_ZERO |= {"model.moe.shared_expert_ffn_hidden_size"}
_ONLY_WITH = {"model.mamba": "M", "model.moe": "E"}  # parts that matter where the model has such layers
MUST_BE_POSITIVE = {"qad.temperature", "qad.adam_eps", "model.layernorm_epsilon", "model.init_std"}
MUST_BE_POSITIVE |= {"qad.learning_rate", "teacher.learning_rate", "export.max_shard_gb"}
MUST_BE_POSITIVE |= {"model.moe.routed_scaling_factor", "model.rotary_scaling.factor"}
MAX_SEED = 2**31 - 1


def validate(run: RunConfig) -> None:
    """Raises ConfigError for the first value that cannot work."""
    _check_numbers(run, "")
    _check_names(run)
    _check_fractions(run)
    _check_model(run.model, run.data.source)
    check_sharding(run.model, run.parallel)
    check_recipe(run)
    _check_schedules(run)
    _check_lengths(run)
    _check_loss(run)
    check_batches(run)
    _check_stages(run)
    _check_resume(run)
    if run.data.source is Source.indexed and not run.data.path:
        problem = "data=indexed reads a folder of yours"
        raise ConfigError("data.path", run.data.path, problem, "Give data.path=FOLDER.")


def check_inputs(run: RunConfig) -> None:
    """Raises ConfigError when a folder that the run reads is not there, or was not named."""
    teacher = run.teacher.path if reads_teacher(run) else None
    folders = {"data.path": run.data.path, "data.tokenizer": run.data.tokenizer, "teacher.path": teacher}
    for field, path in (folders | {"qad.teacher_logits": run.qad.teacher_logits}).items():
        if path and not Path(path).is_dir():
            raise ConfigError(field, path, "no such folder", "Give the path of an existing folder.")
    if run.model.source and not run.teacher.path:
        raise ConfigError(
            "teacher.path",
            run.teacher.path,
            f"model={run.model.name} is a released model, too large to train here",
            "Give teacher.path=FOLDER, the Hugging Face checkpoint of its BF16 weights.",
        )
    if run.model.mtp_num_layers and not run.teacher.path:
        raise ConfigError(
            "model.mtp_num_layers",
            run.model.mtp_num_layers,
            "these blocks are copied from a checkpoint, not trained here",
            "Give teacher.path=FOLDER, or model.mtp_num_layers=0 model.mtp_pattern=''.",
        )


def reads_teacher(run: RunConfig) -> bool:
    """Whether a stage of this run needs the teacher's weights once its digest is known."""
    readers = {Stage.teacher, Stage.ptq, Stage.evaluate}
    if run.model.mtp_num_layers:
        readers.add(Stage.export)  # which copies those blocks
    if not run.qad.loss.is_sparse:
        readers.add(Stage.qad)
    elif run.qad.teacher_logits is None:
        readers.add(Stage.logits)
    return not readers.isdisjoint(run.stages)


def _check_numbers(node: Any, prefix: str) -> None:
    """Sizes are positive, floats finite and not negative, each with its exceptions."""
    for field in fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        if is_dataclass(value):
            if not (name in _ONLY_WITH and _ONLY_WITH[name] not in node.hybrid_pattern + node.mtp_pattern):
                _check_numbers(value, name + ".")
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            low = 0 if name in MAY_BE_ZERO else 1
            if value < low:
                raise ConfigError(name, value, "too small", f"Give a whole number of at least {low}.")
            if field.name == "seed" and value > MAX_SEED:
                raise ConfigError(name, value, "too large for a seed", f"Give at most {MAX_SEED}.")
        elif isinstance(value, float):
            low_word = "above 0" if name in MUST_BE_POSITIVE else "of at least 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and name in MUST_BE_POSITIVE):
                raise ConfigError(name, value, "out of range", f"Give a finite number {low_word}.")


def _check_names(run: RunConfig) -> None:
    for field, name in (("model.name", run.model.name), ("recipe.name", run.recipe.name)):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ConfigError(field, name, "becomes a folder name", "Use letters, digits, '.', '_' and '-'.")
    if not run.output_dir.strip():
        raise ConfigError("output_dir", run.output_dir, "empty", "Name a folder, for example outputs.")


def _check_fractions(run: RunConfig) -> None:
    def between(field: str, value: float, *, zero: bool, one: bool = False) -> None:
        if not (0 < value < 1 or (zero and value == 0) or (one and value == 1)):
            low, high = ("[" if zero else "("), ("]" if one else ")")
            raise ConfigError(field, value, "out of range", f"Give a number in {low}0, 1{high}.")

    between("data.held_out_fraction", run.data.held_out_fraction, zero=False)
    between("data.generated_fraction", run.data.generated_fraction, zero=True)
    between("qad.average_decay", run.qad.average_decay, zero=True)
    for name, stage in (("qad", run.qad), ("teacher", run.teacher)):
        between(f"{name}.adam_beta1", stage.adam_beta1, zero=True)
        between(f"{name}.adam_beta2", stage.adam_beta2, zero=True)
    between("evaluation.band_low", run.evaluation.band_low, zero=False)
    between("evaluation.band_high", run.evaluation.band_high, zero=False, one=True)
    if run.evaluation.band_low >= run.evaluation.band_high:
        raise ConfigError(
            "evaluation.band_low",
            run.evaluation.band_low,
            f"not below evaluation.band_high={run.evaluation.band_high}",
            "Give a smaller number.",
        )


def divisible(field: str, value: int, divisor: int, what: str) -> None:
    """Raises ConfigError unless `value` is a multiple of `divisor`, naming the neighbours that are."""
    if value % divisor:
        below, above = value // divisor * divisor, (value // divisor + 1) * divisor
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(field, value, f"not a multiple of {what}={divisor}", f"Try {near}.")


def _check_model(model: ModelConfig, source: Source) -> None:
    for field, pattern in (("hybrid_pattern", model.hybrid_pattern), ("mtp_pattern", model.mtp_pattern)):
        wrong = sorted(set(pattern) - set(LAYERS))
        if wrong or (not pattern and field == "hybrid_pattern"):
            problem = f"unknown layer {wrong[0]!r}" if wrong else "no layers"
            remedy = "Use M (Mamba-2), * (attention), E (mixture of experts) and - (dense MLP)."
            raise ConfigError(f"model.{field}", pattern, problem, remedy)
    if bool(model.mtp_pattern) != bool(model.mtp_num_layers):
        raise ConfigError(
            "model.mtp_num_layers",
            model.mtp_num_layers,
            f"does not fit model.mtp_pattern={model.mtp_pattern!r}",
            "Give both, or neither.",
        )
    layers = model.hybrid_pattern + model.mtp_pattern
    attention, mamba, moe = model.attention, model.mamba, model.moe
    if "*" in layers:
        heads, groups = attention.num_heads, attention.num_query_groups
        divisible("model.attention.num_heads", heads, groups, "model.attention.num_query_groups")
    if "M" in layers:
        divisible("model.mamba.num_heads", mamba.num_heads, mamba.num_groups, "model.mamba.num_groups")
    if "E" in layers and moe.top_k > moe.num_experts:
        problem = f"more than model.moe.num_experts={moe.num_experts}"
        raise ConfigError("model.moe.top_k", moe.top_k, problem, "Give a smaller number.")
    if "E" in layers and moe.top_k == 1 and not model.architecture.is_hybrid:
        problem = "one expert a token has weight 1 by softmax over the chosen ones, which Megatron-Core refuses"
        raise ConfigError("model.moe.top_k", 1, problem, "Not supported; give a model of 2 or more.")
    scaling = model.rotary_scaling
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        problem = f"not above model.rotary_scaling.low_freq_factor={scaling.low_freq_factor}"
        raise ConfigError("model.rotary_scaling.high_freq_factor", scaling.high_freq_factor, problem, "Give more.")
    if source is Source.stdlib and model.vocab_size < MIN_TOKENIZER:
        problem, remedy = "too small for a tokenizer", f"Give at least {MIN_TOKENIZER}."
        raise ConfigError("model.vocab_size", model.vocab_size, problem, remedy)


def _check_schedules(run: RunConfig) -> None:
    for name, stage in (("qad", run.qad), ("teacher", run.teacher)):
        if stage.warmup_steps >= stage.steps:
            problem = f"not below {name}.steps={stage.steps}"
            raise ConfigError(f"{name}.warmup_steps", stage.warmup_steps, problem, "Give fewer of them.")
        if stage.min_learning_rate > stage.learning_rate:
            raise ConfigError(
                f"{name}.min_learning_rate",
                stage.min_learning_rate,
                f"above {name}.learning_rate={stage.learning_rate}",
                "Give a smaller number.",
            )


def _check_lengths(run: RunConfig) -> None:
    longest = run.model.max_position_embeddings
    for name in ("qad", "teacher", "calibration", "evaluation"):
        length = getattr(run, name).sequence_length
        if length > longest:
            problem = f"longer than model.max_position_embeddings={longest}"
            remedy = "Give a shorter length, or a model made for longer text."
            raise ConfigError(f"{name}.sequence_length", length, problem, remedy)


def _check_loss(run: RunConfig) -> None:
    qad, sparse = run.qad, "qad.loss=top_k or qad.loss=sampled"
    if qad.reverse and qad.loss not in (Loss.linear_kl, Loss.kl):
        problem = f"qad.loss={qad.loss} is kl(teacher || student) alone"
        raise ConfigError("qad.reverse", "true", problem, "Give qad.loss=linear_kl or qad.loss=kl.")
    if qad.loss.is_sparse and qad.sparse_values > run.model.vocab_size:
        problem = f"more than model.vocab_size={run.model.vocab_size}"
        raise ConfigError("qad.sparse_values", qad.sparse_values, problem, "Give a smaller number.")
    if qad.teacher_logits is not None and not qad.teacher_logits.strip():
        raise ConfigError("qad.teacher_logits", "''", "no folder", "Name one, or leave it out.")
    if qad.teacher_logits is not None and not qad.loss.is_sparse:
        problem = f"qad.loss={qad.loss} reads no file, the teacher runs beside the student"
        raise ConfigError("qad.teacher_logits", qad.teacher_logits, problem, f"Give {sparse}, or leave it out.")


def _check_resume(run: RunConfig) -> None:
    if run.qad.max_loss_jump < 1:
        problem = "below 1, so no run could ever be continued"
        raise ConfigError("qad.max_loss_jump", run.qad.max_loss_jump, problem, "Give 1 or more, for example 1.2.")
    for name in run.resume.allow:
        if not schema_fields.is_known(name):
            remedy = "Name fields or groups of the configuration: resume.allow=[qad.steps,data]."
            raise ConfigError("resume.allow", name, "there is no such setting", remedy)


def _check_stages(run: RunConfig) -> None:
    """A dense loss leaves `logits` out of any list, so that one list serves a sweep over losses."""
    names = ", ".join(stage.name for stage in Stage)
    if not run.stages:
        raise ConfigError("stages", "[]", "nothing to do", f"Name at least one of {names}.")
    for stage in run.stages:
        if run.stages.count(stage) > 1:
            raise ConfigError("stages", stage, "named twice", "Name each stage once.")
    if run.stages == [Stage.logits] and not run.qad.loss.is_sparse:
        problem = f"nothing to do, qad.loss={run.qad.loss} needs no file of the teacher"
        raise ConfigError("stages", "[logits]", problem, "Give qad.loss=top_k or qad.loss=sampled.")
