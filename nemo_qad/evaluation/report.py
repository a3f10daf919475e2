"""report.md: what a run kept and what it lost, verdict first, made from the run folder alone.

Works for a run that skipped or has not reached some stages; it then says what is missing and how to get it.
No torch, no Megatron.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from nemo_qad.evaluation.formats import DASH, duration, markdown_table, percent, significant, size
from nemo_qad.evaluation.layer_report import layer_section
from nemo_qad.evaluation.recovery import NEXT_TOKEN, Recovery, judge_ptq
from nemo_qad.evaluation.results import MODELS, Results, as_number, read_results
from nemo_qad.files import replace_text

PLOTS = {
    "plots/recovery.png": "Accuracy kept by PTQ and by QAD, per task",
    "plots/held_out_kl.png": "Held-out KL over QAD steps",
}
HIGHLIGHTS = (
    "model.name", "model.hybrid_pattern", "model.hidden_size", "model.vocab_size", "model.precision",
    "recipe.name", "recipe.scale_search", "recipe.weight_scales", "recipe.qad_scales", "recipe.kv_cache",
    "calibration.num_samples", "calibration.sequence_length", "data.name",
    "qad.loss", "qad.learning_rate", "qad.min_learning_rate", "qad.schedule", "qad.steps", "qad.global_batch_size",
    "qad.sequence_length", "qad.keep", "parallel.name", "evaluation.num_questions", "seed",
)  # fmt: skip
WEIGHTS = {
    "best": "the weights with the lowest held-out KL",
    "last": "the weights of the last step",
    "average": "the moving average of the weights",
}


def write_report(run_dir: Path) -> Path:
    """Writes RUN/report.md in one step, so that a reader never sees half of it; returns its path."""
    path = run_dir / "report.md"
    replace_text(path, render(read_results(run_dir)))
    return path


def render(results: Results) -> str:
    """The report as Markdown; the plots that exist in the run folder are linked relatively."""
    sections = [f"# {results.model}, recipe {results.recipe}", *verdict(results)]
    sections += [f"![{title}]({path})" for path, title in PLOTS.items() if (results.run_dir / path).is_file()]
    for title, body in (
        ("Accuracy", _accuracy(results)),
        ("Size on disk", _sizes(results)),
        ("What was quantized", _coverage(results)),
        ("Which layer hurts", layer_section(results)),
        ("Time and memory", _costs(results)),
        ("Configuration", _configuration(results)),
        ("Versions", _versions(results)),
        ("Next", _next(results)),
    ):
        sections.append(f"## {title}\n\n{body}")
    return "\n\n".join(sections) + "\n"


def verdict(results: Results) -> list[str]:
    """The paragraphs that open the report, in Markdown: what happened, then what it means."""
    ptq, qad = results.recovery("ptq"), results.recovery("qad")
    paragraphs = [f"**{headline(results)}**"]
    if ptq is not None and ptq.median is not None:
        low, high = results.band
        judged = judge_ptq(ptq.median, low=low, high=high)
        text = f"PTQ kept {kept_accuracy(ptq)}. {judged.meaning}"
        paragraphs.append(text if qad is not None else f"{text} {judged.advice}")
    if qad is not None and qad.median is not None:
        paragraphs.append(f"After QAD: {kept_accuracy(qad)}.")
    if results.kept:
        step = DASH if results.kept_step is None else results.kept_step
        kept = WEIGHTS.get(results.kept, f"`{results.kept}`")
        paragraphs.append(f"QAD handed on {kept}: step {step} of {results.value('qad', 'steps') or DASH}.")
    missing = missing_stages(results)
    if missing:
        paragraphs.append(
            f"Missing in this run folder: {', '.join(missing)}. What they would tell is shown as `{DASH}`; "
            "the last section says how to get it."
        )
    return paragraphs


def headline(results: Results) -> str:
    """One or two sentences of plain text: what this run achieved."""
    ptq, qad, fall, ratio = results.kl_ptq, results.kl_qad, results.kl_fall, results.size_ratio
    smaller = f" The exported checkpoint is {ratio:.2f}x smaller than BF16." if ratio else ""
    if fall is None:
        known = f" PTQ stands at a held-out KL of {significant(ptq)} nats per token." if ptq is not None else ""
        done = ", ".join(s for s in results.expected_stages if s in results.stages and s != "report")
        return f"No QAD result to judge; finished so far: {done or 'nothing'}.{known}{smaller}"
    change = f"held-out KL to BF16 {significant(ptq)} -> {significant(qad)} nats per token"
    if results.is_coarse:
        change += f", a lower bound by {results.setting('qad.sparse_values') or DASH} words a token"
    if fall <= 0:
        return f"QAD did not help: {change}. Lower qad.learning_rate.{smaller}"
    return f"QAD took away {percent(fall, 0)} of the damage that PTQ did ({change}).{smaller}"


def kept_accuracy(recovery: Recovery) -> str:
    """For example "98.2 % of BF16's accuracy (median of 5 tasks; lowest 95.7 %, copy)"."""
    if recovery.median is None:
        return "an unknown part of BF16's accuracy (no task is usable)"
    tasks = f"{len(recovery.tasks)} task" + ("s" if len(recovery.tasks) != 1 else "")
    return (
        f"{percent(recovery.median)} of BF16's accuracy "
        f"(median of {tasks}; lowest {percent(recovery.minimum)}, {recovery.minimum_task})"
    )


def missing_stages(results: Results) -> list[str]:
    """Stages without a result, in order; the report itself does not count."""
    return [stage for stage in results.expected_stages if stage not in results.stages and stage != "report"]


def next_command(results: Results) -> tuple[str, str]:
    """(what it does, shell command): finish the run, run QAD gentler, or compare the recipes.

    The command repeats the overrides that environment.json recorded, because a run folder refuses another
    configuration; without a record it gives the recipe alone.
    """
    overrides = _overrides(results)
    missing = missing_stages(results)
    if missing:
        what = f"Get what is missing ({', '.join(missing)}); finished stages are not run again"
        return what, command_of(results)
    rate, fall = as_number(results.setting("qad.learning_rate")), results.kl_fall
    if rate and fall is not None and fall <= 0:
        gentler = [item for item in overrides if not item.startswith("qad.learning_rate=")]
        return "Distil with a lower learning rate", _command([*gentler, f"qad.learning_rate={rate / 3:.1e}"])
    same = [item for item in overrides if not item.lstrip("+").startswith("recipe=")]
    return "Compare the recipes", _command(["-m", "+recipe=max,mse,four_over_six", *same])


def _overrides(results: Results) -> list[str]:
    recorded = results.environment.get("overrides")
    overrides = (
        [str(item) for item in recorded]
        if isinstance(recorded, list)
        else [f"+recipe={results.recipe if results.recipe != DASH else 'NAME'}"]
    )
    return [item for item in overrides if item.lstrip("+").split("=")[0] not in ("run_dir", "stages")]


def command_of(results: Results) -> str:
    """The command that takes this run to its end."""
    return _command([*_overrides(results), f"run_dir={results.run_dir}"])


def _command(arguments: list[str]) -> str:
    return " ".join(["python -m nemo_qad.train", *map(shlex.quote, arguments)])


def _accuracy(results: Results) -> str:
    if "evaluate" not in results.stages:
        return "Not evaluated yet."
    ptq, qad = results.recovery("ptq"), results.recovery("qad")
    scores = {model: results.scores(model) for model in MODELS}
    ratios = [found.tasks if found else {} for found in (ptq, qad)]
    medians, minima = (
        [percent(getattr(found, end) if found else None) for found in (ptq, qad)] for end in ("median", "minimum")
    )
    rows = [
        ["**recovery, median**", DASH, DASH, DASH, *(f"**{ratio}**" for ratio in medians)],
        ["**recovery, lowest task**", DASH, DASH, DASH, *minima],
    ]
    for task in scores["bf16"]:
        values = [percent(scores[model].get(task), 2) for model in MODELS]
        rows.append([task, *values, *(percent(ratio.get(task)) for ratio in ratios)])
    for name, key in (
        ("held-out KL to BF16, nats per token", "held_out_kl"),
        ("held-out loss, nats per token", "held_out_loss"),
        ("held-out perplexity", "perplexity"),
    ):
        numbers = [significant(results.number("evaluate", f"models.{model}.{key}"), 4) for model in MODELS]
        rows.append([name, *numbers, DASH, DASH])
    header = ["measure", "BF16", "PTQ", "QAD", "PTQ / BF16", "QAD / BF16"]
    return "\n\n".join([markdown_table(header, rows), *_accuracy_notes(results, ptq or qad)])


def _accuracy_notes(results: Results, recovery: Recovery | None) -> list[str]:
    notes = []
    if results.kl_fall is not None:
        closed = results.perplexity_gap_closed
        notes.append(
            f"Fall of the held-out KL by QAD: {percent(results.kl_fall)}. Perplexity gap closed by QAD: "
            + (percent(closed) if closed is not None else "none to close, PTQ is no worse than BF16")
            + ". Table and plot rest on different held-out text: the plot's chose the weights."
        )
    if results.is_sparse:
        notes.append(
            f"QAD read its teacher from a file of sparse logits. The KL of its validations, and of the plot, counts "
            f"the {results.setting('qad.sparse_values') or DASH} most likely words of a token and all others as one: "
            "it is a lower bound of the KL of the table, which is exact."
        )
    if recovery is not None:
        reasons = "; ".join(f"{task} ({reason})" for task, reason in recovery.excluded.items())
        notes += [f"Left out of the median and the minimum: {reasons}."] if reasons else []
    questions = results.number("evaluate", "num_questions")
    if questions:
        error = 100 * math.sqrt(0.25 / questions)
        notes.append(
            f"{questions:.0f} questions a task: the standard error of a score is at most {error:.1f} points, "
            f"so small differences between tasks are noise. {NEXT_TOKEN} and KL rest on "
            f"{results.number('evaluate', 'num_held_out_tokens') or 0:,.0f} held-out tokens."
        )
    return notes


def _sizes(results: Results) -> str:
    if "export" not in results.stages:
        return "Not exported yet."
    bf16, export = results.number("export", "bytes_bf16"), results.number("export", "bytes_export")
    ratio = results.size_ratio
    table = markdown_table(
        ["checkpoint", "size", "BF16 / this"],
        [["BF16", size(bf16), "1.00x"], ["exported", size(export), f"{ratio:.2f}x" if ratio else DASH]],
    )
    verified, tensors = results.number("export", "verified_tensors"), results.number("export", "num_tensors")
    place = f"`{results.value('export', 'folder') or DASH}`, {results.value('export', 'quant_algo') or DASH}"
    checked = "It was not decoded again to check it."
    if verified:
        checked = f"{verified:.0f} weights, decoded from its files again, equal the evaluated ones bit for bit."
    return f"{table}\n\n{place}, {DASH if tensors is None else int(tensors)} tensors. {checked}"


def _coverage(results: Results) -> str:
    rows = results.value("ptq", "coverage")
    if not isinstance(rows, list) or not rows:
        return "PTQ has not run yet."
    keys = ("part", "kind", "format", "expected", "matched")
    cells = [[row.get(key) for key in keys] for row in rows if isinstance(row, dict)]
    return markdown_table(["part", "what", "format", "expected", "quantized"], cells, text_columns=3)


def _costs(results: Results) -> str:
    rows, total = [], 0.0
    for stage in results.expected_stages[:-1]:
        seconds, peak = results.number(stage, "seconds"), results.number(stage, "peak_gib")
        total += seconds or 0.0
        note = " (reused)" if results.value(stage, "reused") is True else ""
        rows.append([stage + note, duration(seconds), DASH if peak is None else f"{peak:.2f} GiB"])
    rows.append(["**total**", f"**{duration(total)}**", DASH])
    table = markdown_table(["stage", "time", "peak memory"], rows)
    tokens = results.number("qad", "tokens")
    return table + (f"\n\nQAD saw {tokens:,.0f} tokens." if tokens else "")


def _configuration(results: Results) -> str:
    rows = [[f"`{path}`", results.setting(path)] for path in HIGHLIGHTS if results.setting(path) is not None]
    if not rows:
        return "No readable config.yaml in this run folder."
    return markdown_table(["setting", "value"], rows) + "\n\nAll of it: [config.yaml](config.yaml)."


def _versions(results: Results) -> str:
    rows = []
    for key, value in results.environment.items():
        if isinstance(value, dict):
            rows += [[name, version] for name, version in value.items()]
        elif not isinstance(value, list):
            rows.append([key, value])
    return markdown_table(["what", "version"], rows, text_columns=2) if rows else "No readable environment.json."


def _next(results: Results) -> str:
    what, command = next_command(results)
    known = isinstance(results.environment.get("overrides"), list)
    also = "" if known else " (add what else this run was started with)"
    text = f"{what}{also}:\n\n```bash\n{command}\n```"
    folder = results.value("export", "folder")
    return f"The checkpoint for inference engines is in `{folder}`.\n\n{text}" if folder else text
