"""Which stage needs which, and when one is made again. No torch."""

from __future__ import annotations

from typing import Any

from nemo_qad.schema import RunConfig, Stage

# A stage is made anew when what it was made from has changed.
NEEDS: dict[Stage, list[Stage]] = {
    Stage.ptq: [],
    Stage.logits: [],
    Stage.qad: [Stage.ptq, Stage.logits],
    Stage.evaluate: [Stage.ptq, Stage.qad],
    Stage.export: [Stage.ptq, Stage.qad],
}
OPTIONAL = {Stage.qad}  # without QAD, evaluate and export take the PTQ student


def applies(stage: Stage, run: RunConfig) -> bool:
    """Whether this configuration has the stage at all."""
    return stage is not Stage.logits or run.qad.loss.is_sparse


def needed(stage: Stage, run: RunConfig) -> list[Stage]:
    """Stages whose results it is made from."""
    return [need for need in NEEDS[stage] if applies(need, run)]


def made(result: dict[str, Any] | None) -> Any:
    """What tells a stage's product from another: digests of its files here, or of what it made elsewhere."""
    result = result or {}
    return result.get("files") or result.get("digest")
