"""Rotary frequencies that are stretched to sequences longer than those of pre-training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_qad.schema import RotaryScalingConfig


def scaled(frequencies: Tensor, scaling: RotaryScalingConfig) -> Tensor:
    """Frequencies (radians a position, FP32, any shape) as Llama 3.1 has them: f, f / factor, or between.

    With t the turns in `original_max_position_embeddings` positions, the weight of f is (t - low) / (high - low) within
    [0, 1] and that of f / factor the rest. Source: the reference code of Llama 3.1, 2024; equal to transformers'
    rope type `llama3`.
    """
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, share.clamp(0, 1))
