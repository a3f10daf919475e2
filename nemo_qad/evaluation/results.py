"""What a run folder holds, read for reports: the stages' results, the metrics, the frozen configuration.

A report must also come out of a run that stopped half-way or skipped stages, so every reader here is
tolerant: a file that is missing or damaged reads as empty, a value that is missing reads as None.
No torch, no Megatron: a login node can read a run folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_qad.evaluation.recovery import Recovery, gap_closed, kl_fall, recover

STAGES = ("teacher", "ptq", "logits", "qad", "evaluate", "export", "report")
SPARSE = ("top_k", "sampled")  # the losses that read the file of the stage logits
MODELS = ("bf16", "ptq", "qad")


@dataclass(frozen=True)
class HeldOutPoint:
    """One validation during QAD: the step (0 = PTQ) and KL in nats per token."""

    step: int
    kl: float
    average_kl: float | None = None


@dataclass(frozen=True)
class Results:
    """One run folder. `stages` maps a finished stage to its JSON; `config` is config.yaml as plain data."""

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    held_out: list[HeldOutPoint] = field(default_factory=list)

    def setting(self, path: str) -> Any:
        """The configuration's value at a dotted path, None where it is not there."""
        return look_up(self.config, path)

    def value(self, stage: str, path: str) -> Any:
        """The value at a dotted path of a stage's JSON, None where the stage or the value is not there."""
        return look_up(self.stages.get(stage, {}), path)

    def number(self, stage: str, path: str) -> float | None:
        """As `value`, but None unless it is a finite number."""
        return as_number(self.value(stage, path))

    @property
    def recipe(self) -> str:
        return str(self.setting("recipe.name") or "-")

    @property
    def model(self) -> str:
        return str(self.setting("model.name") or "-")

    @property
    def is_sparse(self) -> bool:
        """Whether QAD read its teacher from a file of sparse logits."""
        return self.setting("qad.loss") in SPARSE

    @property
    def expected_stages(self) -> list[str]:
        """The stages of this configuration, in order; without a configuration, those of a dense loss."""
        return [stage for stage in STAGES if stage != "logits" or self.is_sparse]

    @property
    def is_coarse(self) -> bool:
        """Whether the KL of QAD is known only as its validations saw it through a file of sparse logits.

        Such a KL is a lower bound. It compares with itself over the steps, not with that of another loss.
        """
        return self.is_sparse and self.number("evaluate", "models.qad.held_out_kl") is None

    @property
    def kl_ptq(self) -> float | None:
        """Held-out KL of PTQ; the evaluate stage's large sample where there is one, else what PTQ noted."""
        return _first(
            self.number("evaluate", "models.ptq.held_out_kl"),
            self.number("qad", "held_out_kl_ptq"),
            self.number("ptq", "held_out_kl"),
        )

    @property
    def kl_qad(self) -> float | None:
        return _first(self.number("evaluate", "models.qad.held_out_kl"), self.number("qad", "held_out_kl"))

    @property
    def kl_fall(self) -> float | None:
        """Fall of the held-out KL, both ends from the same sample of text."""
        for stage, ptq, qad in (
            ("evaluate", "models.ptq.held_out_kl", "models.qad.held_out_kl"),
            ("qad", "held_out_kl_ptq", "held_out_kl"),
        ):
            fall = kl_fall(self.number(stage, ptq), self.number(stage, qad))
            if fall is not None:
                return fall
        return None

    @property
    def perplexity_gap_closed(self) -> float | None:
        bf16, ptq, qad = (self.number("evaluate", f"models.{model}.perplexity") for model in MODELS)
        return gap_closed(bf16, ptq, qad)

    @property
    def kept(self) -> str | None:
        """Which weights QAD handed on: best, last or average."""
        kept = self.value("qad", "kept") or self.value("evaluate", "qad_kept")
        return str(kept) if kept else None

    @property
    def kept_step(self) -> int | None:
        step = _first(self.number("qad", "kept_step"), self.number("evaluate", "qad_kept_step"))
        return None if step is None else int(step)

    @property
    def size_ratio(self) -> float | None:
        """Bytes of the BF16 checkpoint over bytes of the exported one."""
        bf16, export = self.number("export", "bytes_bf16"), self.number("export", "bytes_export")
        return bf16 / export if bf16 and export else None

    @property
    def band(self) -> tuple[float, float]:
        """(low, high) of the median recovery that PTQ aims at."""
        low, high = (as_number(self.setting(f"evaluation.band_{end}")) for end in ("low", "high"))
        return (0.95 if low is None else low, 0.99 if high is None else high)

    def scores(self, model: str) -> dict[str, float]:
        """{task: score in 0..1} of bf16, ptq or qad; empty where it was not evaluated."""
        tasks = self.value("evaluate", f"models.{model}.tasks")
        if not isinstance(tasks, dict):
            return {}
        numbers = {str(task): as_number(score) for task, score in tasks.items()}
        return {task: score for task, score in numbers.items() if score is not None}

    def recovery(self, model: str) -> Recovery | None:
        """Recovery of ptq or qad against bf16; None where one of them was not evaluated."""
        bf16, quantized = self.scores("bf16"), self.scores(model)
        if not bf16 or not quantized:
            return None
        chance = self.value("evaluate", "chance")
        guesses = chance.items() if isinstance(chance, dict) else ()
        return recover(
            bf16,
            quantized,
            chance={str(task): as_number(guess) or 0.0 for task, guess in guesses},
            num_questions=int(self.number("evaluate", "num_questions") or 0),
            num_tokens=int(self.number("evaluate", "num_held_out_tokens") or 0),
        )

    def summary(self) -> dict[str, Any]:
        """The row that a sweep's table shows of this run; JSON-able, None for what is not known."""
        ptq, qad = self.recovery("ptq"), self.recovery("qad")
        seed = as_number(self.setting("seed"))
        coarse = self.is_coarse and self.kl_qad is not None
        sizes = {name: self.number("export", name) for name in ("bytes_bf16", "bytes_export")}
        return {
            "recipe": self.recipe,
            "model": self.model,
            "seed": None if seed is None else int(seed),
            "kl_ptq": self.number("ptq", "held_out_kl") if coarse else self.kl_ptq,
            "kl_qad": None if coarse else self.kl_qad,
            "kl_fall": None if coarse else self.kl_fall,
            "recovery_ptq_median": ptq.median if ptq else None,
            "recovery_ptq_min": ptq.minimum if ptq else None,
            "recovery_qad_median": qad.median if qad else None,
            "recovery_qad_min": qad.minimum if qad else None,
            **{name: None if value is None else int(value) for name, value in sizes.items()},
            "run_dir": str(self.run_dir),
        }


def read_results(run_dir: Path) -> Results:
    """Reads a run folder; whatever is missing or damaged is left empty."""
    stages = {stage: _read_json(run_dir / "stages" / f"{stage}.json") for stage in STAGES}
    return Results(
        run_dir=run_dir,
        config=_read_yaml(run_dir / "config.yaml") or {},
        environment=_read_json(run_dir / "environment.json") or {},
        stages={stage: content for stage, content in stages.items() if content is not None},
        held_out=read_held_out(run_dir / "metrics.jsonl"),
    )


def read_held_out(path: Path) -> list[HeldOutPoint]:
    """QAD's validations from metrics.jsonl, by step.

    A resumed run writes some steps twice and a killed one may leave half a line: the last entry of a step
    counts, and a line that is not JSON is skipped.
    """
    points: dict[int, HeldOutPoint] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or entry.get("stage") != "qad":
            continue
        step, kl = as_number(entry.get("step")), as_number(entry.get("held_out_kl"))
        if step is not None and kl is not None:
            points[int(step)] = HeldOutPoint(int(step), kl, as_number(entry.get("average_held_out_kl")))
    return [points[step] for step in sorted(points)]


def look_up(tree: Any, path: str) -> Any:
    """tree["a"]["b"] for "a.b"; None where a key is missing."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def as_number(value: Any) -> float | None:
    """A finite float, or None: numbers come from files that a person or a crash may have touched."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _read_yaml(path: Path) -> dict[str, Any] | None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None
