"""The report's section about the errors of the layers: a verdict, the picture, the worst rows, idle experts."""

from __future__ import annotations

from nemo_qad.evaluation.formats import DASH, markdown_table, percent
from nemo_qad.evaluation.layer_errors import FILE, PICTURE, STANDS_OUT_DB, LayerErrors, Row, read_errors, shown
from nemo_qad.evaluation.results import Results

MOST_ROWS = 20
HEADER = ["layer.linear", "format", "SQNR, dB", "median", "by block", "MSE / best sweep", "blocks at 4", "idle"]
LEGEND = (
    "SQNR: 10 log10(sum w^2 / sum (w - q)^2) of the weights w and the values q in their place; 3 dB less is twice "
    "the noise. Block by block: the same with every block of 16 counted alike, where one huge value cannot hide that "
    "others were lost. MSE / best sweep: squared error against that of the lower of two sweeps of 12 scales a block, "
    "on the grids of 448 and 256, which is within 0.5 % of trying all 126. Blocks at 4: those whose largest value "
    "became 4 instead of 6. The routed experts of a layer are one row: its worst linear, their median, and how many "
    "experts no calibration token reached. Errors of weights do not say what a layer's inputs make of them: held-out "
    "KL and the tasks judge."
)


def layer_section(results: Results) -> str:
    """Markdown, without the heading; says so where the run has no measurement."""
    errors = read_errors(results.run_dir / FILE)
    if not errors.linears:
        return "Not measured in this run folder: PTQ has not run, or did before it measured layers."
    parts = [layer_verdict(errors)]
    if (results.run_dir / PICTURE).is_file():
        parts.append(f"![Error of the quantized weights, layer by layer]({PICTURE})")
    rows = errors.rows[:MOST_ROWS]
    found = ([row.label.removesuffix(" (fp8)"), row.worst.format, *cells(row)] for row in rows)
    parts.append(markdown_table(HEADER, found, text_columns=2))
    rest = len(errors.rows) - len(rows)
    more = f"{rest} more rows are better than these. " if rest else ""
    parts += [f"{more}Every linear: [{FILE}]({FILE}).", *_idle(errors, results), LEGEND]
    return "\n\n".join(parts)


def layer_verdict(errors: LayerErrors) -> str:
    """Whether a linear stands out, in a sentence or two of Markdown."""
    far = errors.standing_out
    if not far:
        return f"**No linear stands out**: none has twice the noise of the median of its format. {errors.totals()}"
    names = shown([linear.label for linear in far])
    are = "linear stands" if len(far) == 1 else "linears stand"
    return (
        f"**{len(far)} {are} out, with more than twice the noise ({STANDS_OUT_DB:g} dB) of the median of their "
        f"format: {names}.** {errors.totals()}"
    )


def _idle(errors: LayerErrors, results: Results) -> list[str]:
    idle = errors.idle_experts
    if not errors.experts:
        return []
    if not idle:
        return [f"Calibration reached each of the {len(errors.experts)} routed experts."]
    policy = results.setting("calibration.idle_experts") or DASH
    return [
        f"No calibration token reached {len(idle)} of {len(errors.experts)} routed experts "
        f"(`calibration.idle_experts={policy}`): {shown(idle)}. Raise `calibration.num_samples` to reach more."
    ]


def cells(row: Row) -> list[str]:
    """A row's numbers as people read them: SQNR, median of the experts, block by block, MSE / best, at 4, idle."""
    worst = row.worst
    return [
        decibel(worst.sqnr_db),
        decibel(row.median_db) if row.median_db is not None else DASH,
        decibel(worst.block_sqnr_db) if worst.block_sqnr_db is not None else DASH,
        DASH if row.mse_ratio is None else f"{row.mse_ratio:.2f}",
        percent(row.share_of_fours, 0),
        DASH if row.num_idle is None else str(row.num_idle),
    ]


def decibel(value: float | None) -> str:
    """20.4123 -> "20.4"; None, nothing lost, is "exact"."""
    return "exact" if value is None else f"{value:.1f}"
