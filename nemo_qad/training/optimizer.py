"""Megatron's Adam and learning-rate schedule, built from one small set of settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_qad.schema import Precision, QadConfig, Schedule, TeacherConfig


@dataclass(frozen=True)
class OptimizerSettings:
    """Learning rates are per optimizer step; `steps` is the length of the whole schedule."""

    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    steps: int
    schedule: Schedule
    weight_decay: float
    clip_grad: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float = 1e-8


def teacher_settings(teacher: TeacherConfig) -> OptimizerSettings:
    return OptimizerSettings(
        teacher.learning_rate, teacher.min_learning_rate, teacher.warmup_steps, teacher.steps,
        Schedule.cosine, teacher.weight_decay, teacher.clip_grad, teacher.adam_beta1, teacher.adam_beta2,
    )  # fmt: skip


def qad_settings(qad: QadConfig) -> OptimizerSettings:
    return OptimizerSettings(
        qad.learning_rate, qad.min_learning_rate, qad.warmup_steps, qad.steps, qad.schedule,
        qad.weight_decay, qad.clip_grad, qad.adam_beta1, qad.adam_beta2, qad.adam_eps,
    )  # fmt: skip


def build_optimizer(
    module: torch.nn.Module, settings: OptimizerSettings, precision: Precision, *, distributed: bool = False
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam over the trainable parameters of a DDP-wrapped module, and its schedule counted in steps.

    `distributed` spreads its state over the data-parallel ranks; the module's DDP must be set up for that too.
    """
    is_bf16 = precision is Precision.bf16
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.min_learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=is_bf16,
            use_distributed_optimizer=distributed,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        ),
        [module],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.steps,
        lr_decay_style=settings.schedule.value,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
