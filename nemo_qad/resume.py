"""What may differ between two starts of one run. No torch.

    free     how the work is laid out, saved or shown: no number of the result depends on it, but by rounding
    asked    what training does from here on: needs resume.allow=[FIELD], and says what it costs
    fixed    what finished stages were made from: another run_dir
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nemo_qad.config import NOT_HASHED, to_plain
from nemo_qad.described import leaves
from nemo_qad.errors import show
from nemo_qad.schema import RunConfig, Stage

FREE = (
    *NOT_HASHED, "deterministic", "parallel.*", "export.*",
    "teacher.path", "data.path", "data.name", "data.tokenizer", "model.path",  # digests tell whether it is the same
    "qad.name", "qad.micro_batch_size", "qad.save_every", "qad.validate_every", "qad.keep_checkpoints",
    "qad.async_save", "qad.max_skipped_steps", "qad.max_loss_jump", "qad.loss_memory_mib", "qad.quantize_weights",
    "qad.teacher_logits", "qad.keep",
    "calibration.micro_batch_size", "evaluation.name", "evaluation.num_questions", "evaluation.micro_batch_size",
    "evaluation.band_low", "evaluation.band_high",
)  # fmt: skip
ASKED = ("qad.*", "data.*", "seed", "evaluation.*")
# The held-out KL before and after such a change are of different texts or settings: the best so far is forgotten.
INCOMPARABLE = ("data.*", "qad.validation_samples", "qad.loss", "qad.sparse_values", "evaluation.sequence_length")
# With other values of these the loss of the same samples is another number.
OF_THE_LOSS = (
    "qad.loss", "qad.reverse", "qad.temperature", "qad.sparse_values", "qad.global_batch_size", "qad.sequence_length",
    "data.*",
)  # fmt: skip
# Stages that are made again when one of these has changed.
REMADE = {
    Stage.logits: (
        "qad.steps", "qad.global_batch_size", "qad.sequence_length", "qad.loss", "qad.sparse_values", "qad.temperature",
        "qad.validation_samples", "qad.teacher_logits", "seed", "data.*", "evaluation.sequence_length",
    ),
    Stage.qad: ("qad.*", "seed", "data.*"),
    Stage.evaluate: ("evaluation.*", "data.*"),
    Stage.export: ("export.*",),
}  # fmt: skip
_NOT_REMADE = ("qad.name", "data.name", "data.path", "data.tokenizer", "evaluation.name")
_OF_QAD = ("qad.keep", "qad.teacher_logits")  # free, and yet another result


@dataclass(frozen=True)
class Change:
    """One field: its value in the run folder and the one that was given."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.before} there, {self.now} now"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_free(name: str) -> bool:
    """Whether a field may differ without being asked for."""
    return _matches(name, FREE)


def changes(before: RunConfig, now: RunConfig) -> list[Change]:
    """Every field that differs and that a result may depend on, by dotted name."""
    old, new = (dict(leaves(to_plain(run))) for run in (before, now))
    names = sorted(name for name in old.keys() | new.keys() if name.split(".")[0] not in NOT_HASHED)
    return [Change(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]


def refusal(found: Iterable[Change], allow: Iterable[str]) -> str | None:
    """Why a run folder may not be continued with these changes, with the remedy; None if it may."""
    allowed = [pattern for name in allow for pattern in (name, f"{name}.*")]
    fixed = [c for c in found if not _matches(c.name, (*FREE, *ASKED))]
    asked = [c for c in found if not _matches(c.name, FREE) and _matches(c.name, ASKED)]
    asked = [c for c in asked if not _matches(c.name, allowed)]
    if fixed:
        return (
            f"belongs to another configuration ({show(list(map(str, fixed)))}), which finished stages were made from. "
            "Choose another run_dir, or leave run_dir out to get a folder for this configuration"
        )
    if asked:
        names = ",".join(c.name for c in asked)
        return (
            f"belongs to another configuration ({show(list(map(str, asked)))}). Choose another run_dir, or give "
            f"resume.allow=[{names}] to continue this run with it"
        )
    return None


def remade(found: Iterable[Change]) -> list[Stage]:
    """Stages whose results no longer belong to the configuration."""
    telling = [c.name for c in found if not _matches(c.name, _NOT_REMADE)]
    telling = [n for n in telling if n in _OF_QAD or not (n.startswith("qad.") and _matches(n, FREE))]
    return [stage for stage, fields in REMADE.items() if any(_matches(name, fields) for name in telling)]


def breaks_comparison(found: Iterable[Change]) -> bool:
    """Whether held-out numbers from before the changes cannot be compared with those after."""
    return any(_matches(c.name, INCOMPARABLE) and not _matches(c.name, _NOT_REMADE) for c in found)


def changes_loss(found: Iterable[Change]) -> bool:
    """Whether the loss of the last step's samples cannot be compared with the one before the changes."""
    return any(_matches(c.name, OF_THE_LOSS) for c in found)


def listed(found: Iterable[Change]) -> list[dict[str, Any]]:
    """For a record in JSON."""
    return [{"field": c.name, "before": c.before, "now": c.now} for c in found]
