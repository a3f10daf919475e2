"""What a sweep (`-m`) ends with: one table that compares its runs, also when some failed or never ran.

Every job of a sweep leaves SWEEP_DIR/jobs/NNN.json; the table is made from those files alone, so that
`python -m nemo_qad.sweep SWEEP_DIR` shows it again, for a sweep that is still running or was killed, too.
No torch, no Megatron.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_qad.errors import UserError
from nemo_qad.evaluation.console import WIDTH, say
from nemo_qad.evaluation.formats import DASH, markdown_table, percent, significant, size
from nemo_qad.evaluation.results import as_number
from nemo_qad.files import replace_text

HEADER = ("run", "KL PTQ", "KL QAD", "fall", "PTQ kept", "QAD kept", "size")


@dataclass(frozen=True)
class Job:
    """One run of a sweep. `status`: done, failed, or missing where the job left no readable record."""

    number: int
    status: str
    overrides: tuple[str, ...] = ()
    run_dir: str = DASH
    error: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    def value(self, key: str) -> float | None:
        """A number of the summary, None where it is unknown."""
        return as_number(self.summary.get(key))

    @property
    def recipe(self) -> str:
        if self.summary.get("recipe"):
            return str(self.summary["recipe"])
        chosen = [value for name, value in map(_split, self.overrides) if name == "recipe"]
        return chosen[-1] if chosen else DASH

    @property
    def size_ratio(self) -> float | None:
        bf16, export = self.value("bytes_bf16"), self.value("bytes_export")
        return bf16 / export if bf16 and export else None


def read_jobs(sweep_dir: Path) -> list[Job]:
    """The jobs of a sweep by number; a number without a readable record is a job that is missing.

    Jobs start in order, so a gap before a later record is a job that died or is still running.
    """
    found = {int(path.stem): path for path in (sweep_dir / "jobs").glob("*.json") if path.stem.isdigit()}
    return [_read_job(number, found.get(number)) for number in range(max(found, default=-1) + 1)]


def summary_table(jobs: Sequence[Job]) -> Table:
    """The comparison as a table for the console, 80 columns wide at most."""
    caption = "KL: held-out, nats per token. kept: median / lowest task, % of BF16."
    table = Table(box=box.ASCII2, padding=(0, 0), pad_edge=False, caption=caption, caption_justify="left")
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold", no_wrap=index > 0)
    best = best_job(jobs)
    for job in jobs:
        style = "bold" if job is best else "" if job.status == "done" else "red"
        table.add_row(*map(Text, _cells(job, jobs)), style=style)
    return table


def best_job(jobs: Sequence[Job]) -> Job | None:
    """The finished run with the lowest held-out KL after QAD (without QAD anywhere: after PTQ)."""
    for key in ("kl_qad", "kl_ptq"):
        known = [job for job in jobs if job.status == "done" and job.value(key) is not None]
        if known:
            return min(known, key=lambda job: job.value(key) or 0.0)
    return None


def closing_line(jobs: Sequence[Job], comparison: Path) -> str:
    """How many runs are done, which one is best, and where the table is."""
    counts = {status: sum(job.status == status for job in jobs) for status in ("done", "failed", "missing")}
    text = f"{counts['done']} of {len(jobs)} runs done"
    text += "".join(f", {counts[status]} {status}" for status in ("failed", "missing") if counts[status])
    best = best_job(jobs)
    if best is not None:
        stage = "qad" if best.value("kl_qad") is not None else "ptq"
        kl = significant(best.value(f"kl_{stage}"))
        text += f". Lowest held-out KL after {stage.upper()}: {label(best, jobs)}, {kl}"
    return f"{text}. Next: read {comparison}"


def label(job: Job, jobs: Sequence[Job]) -> str:
    """The recipe and the overrides in which this run differs from the others."""
    different = differing(job, jobs)
    return " ".join([job.recipe, *different])


def differing(job: Job, jobs: Sequence[Job]) -> list[str]:
    """This job's overrides, without the recipe, that not every job of the sweep shares."""
    known = [set(other.overrides) for other in jobs if other.overrides]
    shared = set.intersection(*known) if known else set()
    return [item for item in job.overrides if item not in shared and _split(item)[0] != "recipe"]


def write_comparison(sweep_dir: Path, jobs: Sequence[Job]) -> Path:
    """Writes SWEEP_DIR/comparison.png, where a run has numbers, and comparison.md; returns the latter."""
    picture = sweep_dir / "comparison.png"
    rows = [
        {"label": "\n".join([job.recipe, *differing(job, jobs)]), **job.summary}
        for job in jobs
        if job.value("kl_ptq") is not None
    ]
    if rows:
        from nemo_qad.evaluation.plots import draw_comparison  # matplotlib takes a second to import

        draw_comparison(picture, rows)
    path = sweep_dir / "comparison.md"
    replace_text(path, render(jobs, path, picture.name if rows else None))
    return path


def render(jobs: Sequence[Job], path: Path, picture: str | None) -> str:
    """The comparison as Markdown."""
    sections = [
        "# Comparison of the runs of this sweep",
        f"**{closing_line(jobs, path).split('. Next:')[0]}.**",
    ]
    if picture:
        sections.append(f"![Held-out KL and recovery of each run]({picture})")
    rows = [
        [label(job, jobs), *_cells(job, jobs)[1:], size(job.value("bytes_export")), f"`{job.run_dir}`"]
        for job in jobs
    ]
    sections.append(markdown_table([*HEADER, "on disk", "run folder"], rows))
    sections.append(
        "KL: held-out KL(teacher || student), nats per token. kept: median recovery over tasks / lowest "
        "task, in % of the BF16 score. size: bytes of the BF16 checkpoint / bytes of the exported one."
    )
    failures = [
        f"- {label(job, jobs)}: {job.error or 'no reason recorded'}" for job in jobs if job.status == "failed"
    ]
    if failures:
        sections.append("\n".join(["## Failed", "", *failures]))
    return "\n\n".join(sections) + "\n"


def show(sweep_dir: Path, *, console: Console | None = None) -> None:
    """Prints the table, the errors and one last line; writes comparison.md and comparison.png.

    Raises UserError where no job of the sweep has left a record.
    """
    jobs = read_jobs(sweep_dir)
    if not jobs:
        raise UserError(
            f"{sweep_dir}: holds no jobs/*.json, so there is nothing to compare yet. Give a sweep's folder"
        )
    comparison = write_comparison(sweep_dir, jobs)
    terminal = console or Console(highlight=False)
    terminal = terminal if terminal.is_terminal or console else Console(highlight=False, width=WIDTH)
    terminal.print()
    terminal.print(summary_table(jobs))
    for job in jobs:
        if job.status == "failed":
            terminal.print(Text(f"failed: {label(job, jobs)}: {job.error or 'no reason recorded'}"))
    terminal.print(Text(closing_line(jobs, comparison)), soft_wrap=True)


class SweepTable(Callback):
    """Hydra's callback: after the last job of a sweep it shows how the runs compare."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Never raises: a table that cannot be made must not turn a finished sweep into a failure."""
        try:
            show(Path(config.hydra.sweep.dir))
        except UserError as error:
            say(f"No comparison: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m nemo_qad.sweep SWEEP_DIR`; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0].startswith("-"):
        print("usage: python -m nemo_qad.sweep SWEEP_DIR", file=sys.stderr)
        return 2
    try:
        show(Path(given[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _cells(job: Job, jobs: Sequence[Job]) -> list[str]:
    name = "\n".join([job.recipe, *(f"  {item}" for item in differing(job, jobs))])
    if job.status != "done":
        return [name, job.status.upper(), *[DASH] * (len(HEADER) - 2)]
    kept = []
    for model in ("ptq", "qad"):
        ends = [job.value(f"recovery_{model}_{end}") for end in ("median", "min")]
        kept.append(" / ".join(DASH if end is None else f"{100 * end:.1f}" for end in ends))
    ratio = job.size_ratio
    kls = [significant(job.value(key)) for key in ("kl_ptq", "kl_qad")]
    return [name, *kls, percent(job.value("kl_fall"), 0), *kept, f"{ratio:.2f}x" if ratio else DASH]


def _split(override: str) -> tuple[str, str]:
    """ "+recipe=max" -> ("recipe", "max")."""
    name, _, value = override.lstrip("+").partition("=")
    return name, value


def _read_job(number: int, path: Path | None) -> Job:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        return Job(number, "missing")
    summary = content.get("summary")
    return Job(
        number=number,
        status="done" if content.get("status") == "done" else "failed",
        overrides=tuple(map(str, content.get("overrides") or ())),
        run_dir=str(content.get("run_dir") or DASH),
        error=content.get("error"),
        summary=summary if isinstance(summary, dict) else {},
    )


if __name__ == "__main__":
    sys.exit(main())
