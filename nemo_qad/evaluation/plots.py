"""The report's pictures: recovery per task, held-out KL over QAD steps, and the comparison of a sweep.

`layer_plots.py` has that of the layers' errors, `figures.py` what all share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nemo_qad.evaluation import layer_errors, layer_plots
from nemo_qad.evaluation.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure, save
from nemo_qad.evaluation.recovery import Recovery
from nemo_qad.evaluation.results import HeldOutPoint, read_results

LABELS = {"ptq": "PTQ", "qad": "QAD"}
COLOURS = {"ptq": ORANGE, "qad": BLUE}


def write_plots(run_dir: Path) -> list[Path]:
    """Draws what the run folder has numbers for into RUN/plots; returns the pictures, most telling first."""
    results = read_results(run_dir)
    written = []
    recoveries = {model: results.recovery(model) for model in ("ptq", "qad")}
    usable = {model: found for model, found in recoveries.items() if found is not None and found.tasks}
    if usable:
        low, high = results.band
        written.append(run_dir / "plots" / "recovery.png")
        draw_recovery(written[-1], usable, low=low, high=high)
    if results.held_out:
        written.append(run_dir / "plots" / "held_out_kl.png")
        draw_held_out_kl(
            written[-1],
            results.held_out,
            kl_ptq=results.number("qad", "held_out_kl_ptq"),
            kept=results.kept,
            kept_step=results.kept_step,
        )
    errors = layer_errors.read_errors(run_dir / layer_errors.FILE)
    if errors.linears:
        written.append(run_dir / layer_errors.PICTURE)
        layer_plots.draw_layers(written[-1], errors)
    return written


def draw_recovery(path: Path, recoveries: Mapping[str, Recovery], *, low: float, high: float) -> None:
    """Draws recovery per task and its median as bars that hang from 100 % (BF16), `low`..`high` shaded.

    A bar's length is what was lost, so the axis may start near the lowest bar without misleading.

    Args:
        recoveries: {"ptq": ..., "qad": ...}, either alone or both, each with at least one task.
    """
    models = [model for model in ("ptq", "qad") if model in recoveries and recoveries[model].tasks]
    if not models:
        raise ValueError("recoveries holds no task: there is nothing to draw")
    tasks = list(recoveries[models[0]].tasks)
    rows = [("median", [100 * (recoveries[model].median or 0) for model in models])]
    rows += [
        (task, [100 * recoveries[model].tasks.get(task, float("nan")) for model in models]) for task in tasks
    ]
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(1.6 + (0.26 * len(models) + 0.12) * len(rows))
        _hanging_bars(axes, rows, models)
        aim = axes.axvspan(
            100 * low, 100 * high, color=GREEN, alpha=0.16, linewidth=0, zorder=0,
            label=f"aim of PTQ: {100 * low:g}..{100 * high:g} %",
        )  # fmt: skip
        axes.annotate(
            "BF16", (100, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", va="bottom", fontsize=9, fontweight="bold",
        )  # fmt: skip
        axes.set_title("Accuracy kept, task by task", pad=30)
        axes.set_xlabel("recovery: score in % of the BF16 score (the shorter the bar, the less was lost)")
        figure.legend(
            handles=[*axes.containers[: len(models)], aim], loc="upper right", ncols=3, frameon=False,
            bbox_to_anchor=(0.995, 0.995), columnspacing=1.2, handlelength=1.6, fontsize=10,
        )  # fmt: skip
        save(figure, path)


def draw_held_out_kl(
    path: Path,
    points: Sequence[HeldOutPoint],
    *,
    kl_ptq: float | None,
    kept: str | None,
    kept_step: int | None,
) -> None:
    """Draws held-out KL over QAD steps, PTQ's level dashed, the weights that were kept marked.

    Args:
        points: at least one, by step; step 0 is PTQ and gives its level where `kl_ptq` is None.
        kept: best, last or average; `kept_step`: the step they belong to.
    """
    if not points:
        raise ValueError("points is empty: there is nothing to draw")
    level = points[0].kl if kl_ptq is None and points[0].step == 0 else kl_ptq
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.9)
        steps, kls = [point.step for point in points], [point.kl for point in points]
        axes.plot(
            steps, kls, "o-", color=BLUE, markersize=4, linewidth=2, label="weights of the step", zorder=3
        )
        averages = [(point.step, point.average_kl) for point in points if point.average_kl is not None]
        if averages:
            axes.plot(*zip(*averages, strict=True), "--", color=GREY, linewidth=1.8, label="averaged weights")
            axes.legend(loc="lower left", frameon=False)
        if level is not None:
            axes.axhline(level, color=ORANGE, linestyle=(0, (6, 3)), linewidth=1.8)
            axes.annotate(
                f"PTQ, before QAD: {level:.3g}", (1, level), xycoords=("axes fraction", "data"),
                xytext=(-4, 5), textcoords="offset points", ha="right", va="bottom",
                color=ORANGE, fontweight="bold",
            )  # fmt: skip
        _mark_kept(axes, points, level, kept, kept_step)
        axes.set_title("Distance to BF16 on held-out text during QAD (lower is better)", pad=12)
        axes.set_xlabel("QAD step")
        axes.set_ylabel("KL(teacher || student)\nnats per token, validation text")
        _set_kl_axis(axes, kls + [kl for _, kl in averages] + ([] if level is None else [level]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        save(figure, path)


def draw_comparison(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws a sweep: for each run held-out KL (left) and median recovery down to its minimum (right).

    Args:
        rows: {"label", "kl_ptq", "kl_qad", "recovery_ptq_median", "recovery_ptq_min", "recovery_qad_median",
            "recovery_qad_min"}, at least one; a value that is None is left out.
    """
    if not rows:
        raise ValueError("rows is empty: there is nothing to draw")
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = new_figure(1.5 + 0.62 * len(rows), columns=2)
        for offset, model in ((-0.2, "ptq"), (0.2, "qad")):
            positions = [index + offset for index in range(len(rows))]
            kls = [_or_nan(row.get(f"kl_{model}")) for row in rows]
            bars = left.barh(positions, kls, 0.36, color=COLOURS[model], label=LABELS[model])
            left.bar_label(
                bars, ["" if math.isnan(kl) else f"{kl:#.3g}" for kl in kls], padding=3, fontsize=9
            )
            medians = [100 * _or_nan(row.get(f"recovery_{model}_median")) for row in rows]
            minima = [100 * _or_nan(row.get(f"recovery_{model}_min")) for row in rows]
            right.hlines(positions, minima, medians, color=COLOURS[model], linewidth=2)
            right.plot(medians, positions, "o", color=COLOURS[model], markersize=7)
            right.plot(minima, positions, "|", color=COLOURS[model], markersize=9, markeredgewidth=2)
        left.set_yticks(range(len(rows)), [str(row["label"]) for row in rows])
        right.set_yticks(range(len(rows)), [""] * len(rows))
        for axes in (left, right):
            axes.set_ylim(len(rows) - 0.45, -0.55)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        left.margins(x=0.16)
        right.axvline(100, color="black", linewidth=1.2)
        left.set_title("Held-out KL\n(lower is better)")
        right.set_title("Recovery, % of BF16\n(dot: median, tick: lowest task)")
        # Below the axis: inside, it would cover a bar or its figure.
        left.legend(loc="upper left", bbox_to_anchor=(0, -0.09), ncols=2, frameon=False, fontsize=10)
        save(figure, path)


def _hanging_bars(axes: Axes, rows: list[tuple[str, list[float]]], models: list[str]) -> None:
    height = 0.8 / len(models)
    for column, model in enumerate(models):
        values = [values[column] for _, values in rows]
        positions = [row + (column - (len(models) - 1) / 2) * height for row in range(len(rows))]
        axes.barh(
            positions, [value - 100 for value in values], height * 0.92, left=100,
            color=COLOURS[model], label=LABELS[model],
        )  # fmt: skip
        for position, value in zip(positions, values, strict=True):
            if not math.isnan(value):
                side = -1 if value <= 100 else 1
                axes.annotate(
                    f"{value:.1f}", (value, position), xytext=(4 * side, 0), textcoords="offset points",
                    ha="right" if side < 0 else "left", va="center", fontsize=10,
                    fontweight="bold" if position < 0.5 else "normal",
                )  # fmt: skip
    known = [value for _, values in rows for value in values if not math.isnan(value)]
    low, high = min([*known, 95.0]), max([*known, 100.0])
    margin = 0.09 * (high - low)
    axes.set_xlim(low - margin, high + (margin if high > 100 else 0.25 * margin))
    axes.axvline(100, color="black", linewidth=1.4, zorder=4)
    axes.axhline(0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name, _ in rows])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)


def _mark_kept(
    axes: Axes, points: Sequence[HeldOutPoint], level: float | None, kept: str | None, step: int | None
) -> None:
    """Puts a star on the point that was handed on, with its value and its fall from PTQ's level."""
    point = next((point for point in points if point.step == step), None)
    if point is None:
        return
    kl = point.average_kl if kept == "average" and point.average_kl is not None else point.kl
    fall = f" ({100 * (kl / level - 1):+.0f} %)" if level else ""
    axes.plot([point.step], [kl], "*", color="black", markersize=15, zorder=5)
    share = (point.step - points[0].step) / max(1, points[-1].step - points[0].step)
    axes.annotate(
        f"kept ({kept or 'QAD'}, step {point.step}): {kl:.3g}{fall}", (point.step, kl), xytext=(0, -12),
        textcoords="offset points", va="top", color=BLUE, fontweight="bold", zorder=6,
        ha="left" if share < 0.3 else "center" if share < 0.7 else "right",
    )  # fmt: skip


def _set_kl_axis(axes: Axes, values: Sequence[float]) -> None:
    """From zero where that shows the curve; logarithmic where the largest value would flatten the rest."""
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(positive) > 8 * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(min(positive) / 1.8, max(positive) * 1.6)
    else:
        axes.set_ylim(0, 1.18 * max([*values, 1e-12]))


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
