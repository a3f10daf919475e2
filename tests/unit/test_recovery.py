"""Recovery, its exclusions, the verdicts and the two measures of what QAD won back."""

from __future__ import annotations

import math

import pytest

from nemo_qad.evaluation.recovery import Band, gap_closed, is_at_chance, judge_ptq, kl_fall, recover


def test_published_column_of_recoveries():
    """Nemotron 3 Nano, BF16 and QAD scores of five benchmarks; the published median is 97.9 %."""
    bf16 = {"aa_lcr": 35.9, "aime25": 89.1, "gpqa": 73.0, "lcb": 72.1, "scicode": 33.0}
    qad = {"aa_lcr": 34.3, "aime25": 87.9, "gpqa": 72.7, "lcb": 68.9, "scicode": 32.3}
    found = recover(bf16, qad)
    assert found.tasks == {task: qad[task] / bf16[task] for task in bf16}
    assert found.median == pytest.approx(32.3 / 33.0)
    assert (found.minimum_task, found.minimum) == ("aa_lcr", pytest.approx(34.3 / 35.9))
    assert found.median is not None and round(100 * found.median, 1) == 97.9


def test_median_of_an_even_number_is_the_mean_of_the_middle_two():
    found = recover({"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}, {"a": 0.1, "b": 0.4, "c": 0.45, "d": 0.6})
    assert found.median == pytest.approx((0.8 + 0.9) / 2)
    assert found.minimum == pytest.approx(0.2)


def test_tasks_at_chance_are_left_out_and_named():
    bf16 = {"good": 0.8, "guess": 0.27, "below": 0.2, "zero": 0.0}
    quantized = {"good": 0.76, "guess": 0.1, "below": 0.3, "zero": 0.0}
    chance = {"good": 0.25, "guess": 0.25, "below": 0.25}
    found = recover(bf16, quantized, chance=chance, num_questions=400)
    assert found.tasks == {"good": pytest.approx(0.95)}
    assert set(found.excluded) == {"guess", "below", "zero"}
    assert "27.0 %" in found.excluded["guess"] and "25.0 %" in found.excluded["guess"]
    assert found.median == found.minimum == pytest.approx(0.95)


def test_next_token_accuracy_counts_tokens_not_questions():
    scores = {"next_token_accuracy": 0.02}
    assert recover(scores, scores, num_questions=10).excluded == {}
    assert "next_token_accuracy" in recover(scores, scores, num_questions=10, num_tokens=20).excluded
    assert recover(scores, scores, num_questions=10, num_tokens=20000).excluded == {}


@pytest.mark.parametrize(
    ("score", "chance", "questions", "expected"),
    [
        (0.30, 0.25, 400, False),  # standard error 0.0229
        (0.29, 0.25, 400, True),
        (0.29, 0.25, 4000, False),
        (1 / 400, 0.0, 400, True),  # one lucky answer
        (0.10, 0.0, 400, False),
        (1.00, 0.5, 10, False),
    ],
)
def test_chance_is_two_standard_errors_wide(score, chance, questions, expected):
    assert is_at_chance(score, chance, questions) is expected


def test_nothing_usable_and_scores_that_are_missing_or_not_finite():
    found = recover({"a": 0.5, "b": 0.5, "c": math.nan}, {"b": math.inf, "c": 0.5})
    assert (found.median, found.minimum, found.minimum_task) == (None, None, None)
    assert found.excluded["a"] == "no score for the quantized model"
    assert found.excluded["b"] == found.excluded["c"] == "a score is not finite"


@pytest.mark.parametrize(
    ("median", "band"),
    [
        (0.9499, Band.below),
        (0.95, Band.inside),
        (0.97, Band.inside),
        (0.99, Band.inside),
        (0.9901, Band.above),
    ],
)
def test_bands_of_the_median(median, band):
    verdict = judge_ptq(median)
    assert verdict.band is band
    assert verdict.meaning.endswith(".") and verdict.advice.endswith(".")


def test_verdicts_say_what_to_do_and_follow_the_configured_band():
    assert "gentler recipe" in judge_ptq(0.9).advice
    assert "Run QAD" in judge_ptq(0.97).advice
    assert "Ship" in judge_ptq(0.995).advice
    assert judge_ptq(0.9, low=0.85, high=0.92).band is Band.inside
    assert "85..92 %" in judge_ptq(0.9, low=0.85, high=0.92).meaning


def test_fall_of_the_kl():
    assert kl_fall(0.008, 0.002) == pytest.approx(0.75)
    assert kl_fall(0.008, 0.012) == pytest.approx(-0.5)
    assert kl_fall(0.0, 0.0) is None and kl_fall(None, 0.1) is None and kl_fall(0.1, math.nan) is None


def test_perplexity_gap():
    assert gap_closed(10.0, 12.0, 10.5) == pytest.approx(0.75)
    assert gap_closed(10.0, 12.0, 9.0) == pytest.approx(1.5)
    assert gap_closed(10.0, 9.9, 9.8) is None and gap_closed(10.0, None, 9.8) is None
