"""The picture of the layers' errors: which one hurts, at a glance, for a handful of layers and for a large model.

Layers from left to right as the model has them, what is not quantised left blank. A linear is a mark; the routed
experts of a layer are a line from the worst to the best, thick where the middle eight tenths are.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator

from nemo_qad.evaluation.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure, save
from nemo_qad.evaluation.layer_errors import STANDS_OUT_DB, LayerErrors, LinearError, Row

MOST_NAMES = 3
MOST_TICKS = 28
BLOCKS_APART_DB = 1.0  # a smaller difference between the two SQNRs is not drawn
BAD = "#B00020"
PURPLE, SKY = "#CC79A7", "#56B4E9"
# part -> colour, mark, label; a part's first linear stands left of its layer's middle, the second right
PARTS = {
    "routed_experts": (ORANGE, "_", "routed experts"),
    "shared_experts": (GREEN, "D", "shared experts"),
    "mamba": (BLUE, "o", "Mamba"),
    "attention": (PURPLE, "s", "attention"),
    "dense_mlp": (SKY, "^", "dense MLP"),
    "output_layer": ("black", "*", "output layer"),
}
OTHER = (GREY, "P", "other")
RIGHT = (".linear_fc2", ".out_proj", ".linear_proj")
_Value = Callable[[LinearError], float | None]


def draw_layers(path: Path, errors: LayerErrors) -> None:
    """Draws SQNR of each linear (above) and its squared error against the best sweep (below).

    Raises:
        ValueError: there are no linears.
    """
    if not errors.linears:
        raise ValueError("errors holds no linear: there is nothing to draw")
    num_layers = max((line.layer + 1 for line in errors.linears if line.layer is not None), default=0)
    swept = any(line.mse_ratio is not None for line in errors.linears)
    with matplotlib.rc_context(STYLE):
        options: dict[str, Any] = {"sharex": True, "height_ratios": [3.4, 1]} if swept else {}
        figure, found = new_figure(5.6 if swept else 4.3, rows=2 if swept else 1, **options)
        above, below = found if swept else (found, found)
        _draw_rows(above, errors.rows, num_layers, lambda line: line.sqnr_db)
        _mark_lost_blocks(above, errors.linears, num_layers)
        _draw_medians(above, errors)
        _name_the_worst(above, errors, num_layers)
        _count_idle(above, errors.rows, num_layers)
        above.set_ylabel("SQNR of the weights, dB\n(higher is better)")
        if swept:
            _draw_rows(below, errors.rows, num_layers, lambda line: line.mse_ratio)
            below.margins(y=0.15)
            below.axhline(1, color=GREY, linewidth=1)
            below.set_ylabel("MSE /\nbest sweep")
            below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
        _set_layers(below, num_layers, any(line.layer is None for line in errors.linears))
        for axes in {above, below}:
            axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        figure.align_ylabels()
        figure.suptitle(_title(errors), x=0.008, ha="left", fontsize=13, fontweight="bold", color=_title_colour(errors))
        figure.legend(handles=_legend(errors), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        save(figure, path)


def _title(errors: LayerErrors) -> str:
    far = errors.standing_out
    if not far:
        return "Error of the quantized weights: no layer stands out"
    layers = list(dict.fromkeys("output" if line.layer is None else str(line.layer) for line in far))
    more = f" and {len(layers) - MOST_NAMES} more" if len(layers) > MOST_NAMES else ""
    which = "layer" if len(layers) == 1 else "layers"
    return f"Error of the quantized weights: look at {which} {', '.join(layers[:MOST_NAMES])}{more}"


def _title_colour(errors: LayerErrors) -> str:
    return BAD if errors.standing_out else "black"


def _place(line: LinearError, num_layers: int) -> float:
    if line.layer is None:
        return num_layers
    if line.part == "routed_experts":
        return line.layer
    return line.layer + (0.22 if line.name.endswith(RIGHT) else -0.22)


def _draw_rows(axes: Axes, rows: list[Row], num_layers: int, value: _Value) -> None:
    size = 5.5 if num_layers <= MOST_TICKS else 4
    for row in rows:
        colour, mark, _ = PARTS.get(row.worst.part, OTHER)
        x = _place(row.worst, num_layers)
        found = sorted(number for line in row.linears if (number := value(line)) is not None)
        if not found:
            continue
        if row.worst.expert is None:
            axes.plot([x], found, mark, color=colour, markersize=size + 4 * (mark == "*"), zorder=3)
            continue
        tenth = len(found) // 10
        axes.vlines(x, found[0], found[-1], color=colour, linewidth=1, zorder=2)
        axes.vlines(x, found[tenth], found[-1 - tenth], color=colour, linewidth=size * 0.9, alpha=0.55, zorder=2)
        axes.plot([x, x], [found[0], found[-1]], "_", color=colour, markersize=size, zorder=3)
        axes.plot([x], [statistics.median(found)], "_", color="black", markersize=size + 2, zorder=4)


def _mark_lost_blocks(axes: Axes, linears: list[LinearError], num_layers: int) -> None:
    """Where blocks counted alike fare worse than values do: a line down to a cross."""
    for line in linears:
        whole, blocks = line.sqnr_db, line.block_sqnr_db
        if whole is not None and blocks is not None and blocks < whole - BLOCKS_APART_DB:
            x = _place(line, num_layers)
            axes.vlines(x, blocks, whole, color=BAD, linestyle=":", linewidth=1, zorder=2)
            axes.plot([x], [blocks], "x", color=BAD, markersize=6, zorder=4)


def _draw_medians(axes: Axes, errors: LayerErrors) -> None:
    """Of each format; and of the commonest, the level of twice its noise."""
    commonest = Counter(line.format for line in errors.linears).most_common(1)[0][0]
    lines = {f"median,\n{chosen}:\n{median:.1f}": median for chosen, median in errors.medians_db.items()}
    if commonest in errors.medians_db:
        lines["twice\nthe noise"] = errors.medians_db[commonest] - STANDS_OUT_DB
    for text, level in lines.items():
        axes.axhline(level, color=GREY, linewidth=0.9, linestyle=(0, (6, 3)), zorder=1)
        axes.annotate(
            text, (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            ha="left", va="center", fontsize=8, color=GREY, annotation_clip=False,
        )  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.12 * (high - low), high + 0.03 * (high - low))


def _name_the_worst(axes: Axes, errors: LayerErrors, num_layers: int) -> None:
    """Rows that stand out, or else the worst, by name."""
    far = [row for row in errors.rows if row.worst in errors.standing_out][:MOST_NAMES]
    low, high = axes.get_ylim()
    named: list[float] = []
    for row in far or errors.rows[:1]:
        line, colour = row.worst, BAD if far else GREY
        x, level = _place(line, num_layers), line.level_db
        if level == float("inf"):
            continue
        left = x > num_layers / 2
        below = -3 - 14 * sum(abs(level - other) < 0.05 * (high - low) for other in named)
        named.append(level)
        axes.annotate(
            f"{line.label}: {level:.1f}", (x, level), xytext=(-9 if left else 9, below), textcoords="offset points",
            ha="right" if left else "left", va="top", fontsize=9, color=colour, fontweight="bold", zorder=6,
        )  # fmt: skip


def _count_idle(axes: Axes, rows: list[Row], num_layers: int) -> None:
    idle = {row.worst.layer: row.num_idle for row in rows if row.num_idle}
    for layer, count in idle.items():
        assert layer is not None
        axes.annotate(
            str(count), (layer, 0.012), xycoords=("data", "axes fraction"), ha="center", va="bottom", color=ORANGE,
            fontsize=9 if num_layers <= MOST_TICKS else 7, fontweight="bold",
        )  # fmt: skip
    if idle:
        axes.annotate(
            "idle experts", (0.004, 0.055), xycoords="axes fraction", fontsize=8, color=ORANGE, ha="left", va="bottom"
        )


def _set_layers(axes: Axes, num_layers: int, has_output: bool) -> None:
    names = {layer: str(layer) for layer in range(num_layers)} | ({num_layers: "out"} if has_output else {})
    every = -(-len(names) // MOST_TICKS)
    shown = [x for x in names if x % every == 0 and not (has_output and num_layers - every < x < num_layers)]
    shown += [num_layers] if has_output and num_layers not in shown else []
    axes.set_xticks(shown, [names[x] for x in shown])
    axes.xaxis.set_minor_locator(MultipleLocator(1))
    axes.set_xlim(-0.7, len(names) - 0.3)
    axes.set_xlabel("layer")


def _legend(errors: LayerErrors) -> list[Line2D]:
    """The parts that are there, and what the marks mean."""
    parts = {line.part for line in errors.linears}
    found = []
    for part in [*PARTS, "other"]:
        colour, mark, label = PARTS.get(part, OTHER)
        if part == "routed_experts" and part in parts:
            label = "routed experts: median, middle 80 %, ends"
            found.append(Line2D([], [], color=colour, marker="|", markersize=8, linewidth=3, alpha=0.7, label=label))
        elif part in parts:
            found.append(Line2D([], [], color=colour, marker=mark, linestyle="", markersize=6, label=label))
    if any(line.block_sqnr_db is not None and line.sqnr_db is not None
           and line.block_sqnr_db < line.sqnr_db - BLOCKS_APART_DB for line in errors.linears):  # fmt: skip
        found.append(Line2D([], [], color=BAD, marker="x", linestyle=":", markersize=6, label="blocks counted alike"))
    return found
