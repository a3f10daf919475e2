"""How much accuracy quantization kept: recovery per task, its median and minimum, and a verdict.

    recovery = quantized score / BF16 score          (a ratio; 1.0 = nothing lost)

The headline is the median over tasks. A median hides damage, so the minimum is always given with its task.
A task on which BF16 itself guesses says nothing about quantization: it is left out, and named.
Standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

NEXT_TOKEN = "next_token_accuracy"
STANDARD_ERRORS_ABOVE_CHANCE = 2.0


class Band(StrEnum):
    """Where a median recovery lies: below, inside or above the band that PTQ aims at before QAD."""

    below = "below"
    inside = "inside"
    above = "above"


@dataclass(frozen=True)
class Verdict:
    """A band, one sentence of what it means, and one sentence of what to do."""

    band: Band
    meaning: str
    advice: str


@dataclass(frozen=True)
class Recovery:
    """Recovery per task as ratios. `excluded` maps a task left out to the reason.

    Without a single usable task, `median`, `minimum` and `minimum_task` are None.
    """

    tasks: dict[str, float]
    excluded: dict[str, str]
    median: float | None
    minimum: float | None
    minimum_task: str | None


def is_at_chance(score: float, chance: float, num_questions: int) -> bool:
    """True where `score` is within two standard errors of `chance`, so that its ratio would be noise.

    The standard error of a proportion over n questions is sqrt(p (1 - p) / n); the larger of those of the
    score and of chance counts, because a chance of 0 (exact match) has none of its own.
    """
    if score <= chance:
        return True
    n = max(1, num_questions)
    error = math.sqrt(max(chance * (1 - chance), score * (1 - score), 0.0) / n)
    return score - chance <= STANDARD_ERRORS_ABOVE_CHANCE * error


def recover(
    bf16: Mapping[str, float],
    quantized: Mapping[str, float],
    *,
    chance: Mapping[str, float] | None = None,
    num_questions: int = 0,
    num_tokens: int = 0,
) -> Recovery:
    """Recovery of `quantized` against `bf16`, both {task: score in 0..1}.

    Args:
        chance: {task: score of a guesser}; a task without an entry has chance 0.
        num_questions: questions a task; `num_tokens`: held-out tokens behind next-token accuracy.
            0 (unknown): a task is at chance only where its score does not exceed chance.
    """
    ratios: dict[str, float] = {}
    excluded: dict[str, str] = {}
    for task, reference in bf16.items():
        guess = (chance or {}).get(task, 0.0)
        count = num_tokens if task == NEXT_TOKEN else num_questions
        score = quantized.get(task)
        if score is None:
            excluded[task] = "no score for the quantized model"
        elif not (math.isfinite(reference) and math.isfinite(score)):
            excluded[task] = "a score is not finite"
        elif reference <= guess or (count > 0 and is_at_chance(reference, guess, count)):
            excluded[task] = f"BF16 scores {100 * reference:.1f} % where guessing gives {100 * guess:.1f} %"
        else:
            ratios[task] = score / reference
    if not ratios:
        return Recovery({}, excluded, None, None, None)
    lowest = min(ratios, key=lambda task: ratios[task])
    return Recovery(ratios, excluded, statistics.median(ratios.values()), ratios[lowest], lowest)


def judge_ptq(median: float, *, low: float = 0.95, high: float = 0.99) -> Verdict:
    """Judges the median recovery of PTQ before QAD; both ends belong to the band."""
    if median < low:
        return Verdict(
            Band.below,
            f"PTQ was pushed too far: below {100 * low:g} % QAD may not win back what is lost.",
            "Use a gentler recipe: keep more parts in BF16 or FP8, or search the scales with four_over_six.",
        )
    if median > high:
        return Verdict(
            Band.above,
            f"PTQ alone keeps more than {100 * high:g} %: QAD has little accuracy left to win.",
            "Ship the PTQ checkpoint, or push compression further with a harder recipe and run QAD on that.",
        )
    return Verdict(
        Band.inside,
        f"PTQ went as far as intended ({100 * low:g}..{100 * high:g} %): a small, measurable loss.",
        "Run QAD: it is made to win back such a loss.",
    )


def kl_fall(kl_ptq: float | None, kl_qad: float | None) -> float | None:
    """1 - KL_QAD / KL_PTQ on held-out text: 1 = back to BF16, 0 = no gain, negative = worse than PTQ.

    None where a KL is unknown or not finite, or PTQ has no KL to win back.
    """
    if kl_ptq is None or kl_qad is None or not (math.isfinite(kl_ptq) and math.isfinite(kl_qad)):
        return None
    return None if kl_ptq <= 0 else 1.0 - kl_qad / kl_ptq


def gap_closed(bf16: float | None, ptq: float | None, qad: float | None) -> float | None:
    """(ptq - qad) / (ptq - bf16) of a perplexity or loss: the part of PTQ's loss that QAD won back.

    None where a value is unknown or not finite, or PTQ is no worse than BF16, so that there is no gap.
    """
    if bf16 is None or ptq is None or qad is None or not all(map(math.isfinite, (bf16, ptq, qad))):
        return None
    return None if ptq <= bf16 else (ptq - qad) / (ptq - bf16)
