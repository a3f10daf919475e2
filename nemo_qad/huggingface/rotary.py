"""Rotary embedding in config.json: written for a model and read into one, in old spelling and new. No torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_qad.errors import UserError
from nemo_qad.schema import ModelConfig, RotaryScalingConfig


def rotary_fields(model: ModelConfig) -> dict[str, Any]:
    """Under the names of old readers (rope_theta, rope_scaling) and of new ones (rope_parameters)."""
    base, scaling = {"rope_theta": model.rotary_base}, {}
    if model.rotary_scaling.factor != 1:
        scaling = {"rope_type": "llama3", **asdict(model.rotary_scaling)}
    parameters = {"rope_parameters": {"rope_type": "default", **base, **scaling}}
    return base | parameters | ({"rope_scaling": scaling} if scaling else {})


def read_rotary(path: Path, found: dict[str, Any]) -> tuple[float, RotaryScalingConfig]:
    """Base and scaling, of old files (rope_theta, rope_scaling) and of new ones, which have both in rope_parameters."""
    settings = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{path}: rotary embeddings of type {kind!r} are not supported, only 'default' and 'llama3'")
    if found.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{path}: partial_rotary_factor={found['partial_rotary_factor']} is not supported")
    scaling = RotaryScalingConfig()
    if kind == "llama3":
        scaling = RotaryScalingConfig(**{name: type(value)(settings[name]) for name, value in asdict(scaling).items()})
    return float(settings.get("rope_theta") or found["rope_theta"]), scaling
