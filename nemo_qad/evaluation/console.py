"""What a person sees: progress of the loops, the coverage of PTQ, and the final table with one last line.

Everything fits 80 columns and is plain ASCII. Where stdout is not a terminal (a file, Slurm's log, CI),
progress is a line about every tenth of the way instead of control codes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from nemo_qad.evaluation.formats import DASH, clock, percent, significant
from nemo_qad.evaluation.recovery import judge_ptq
from nemo_qad.evaluation.report import headline, missing_stages, next_command
from nemo_qad.evaluation.results import MODELS, Results, read_results
from nemo_qad.ranks import is_first_rank

LINES_PER_LOOP = 10
WIDTH = 80
SHORT = {"held_out_kl": "held-out", "kl": "KL"}


def say(text: str) -> None:
    """Prints one line, never wrapped or cut, so that a path or command in it can be copied."""
    default_console().print(Text(text), soft_wrap=True)


class Loop:
    """Progress of one loop: on a terminal a bar, else a line about every tenth of the way."""

    def __init__(
        self, description: str, total: int, start: int, bar: Progress | None, console: Console
    ) -> None:
        self._description, self._total, self._start, self._done = description, total, start, start
        self._began = self._now = time.monotonic()
        self._tokens, self._token_seconds = 0, 0.0
        self._bar, self._console = bar, console
        self._task: TaskID | None = None
        if bar is not None:
            self._task = bar.add_task(description, total=total, completed=start, note="")

    def advance(self, steps: int = 1, *, tokens: int = 0, **values: float) -> None:
        """Counts `steps` more; `tokens`: tokens they took; `values`: numbers to show, such as loss or kl."""
        before, self._done = self._done, self._done + steps
        last, self._now = self._now, time.monotonic()
        if tokens:
            self._tokens, self._token_seconds = self._tokens + tokens, self._token_seconds + self._now - last
        note = self._note(values, show_rate=tokens > 0)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, note=note)
        elif self._is_due(before):
            place = f"{self._done}/{self._total}"
            self._console.print(Text(f"{self._description} {place}  {note}"), soft_wrap=True)

    def _is_due(self, before: int) -> bool:
        """True where this advance crossed a tenth of the way, or reached the end."""
        total = max(1, self._total)
        return self._done * LINES_PER_LOOP // total > before * LINES_PER_LOOP // total

    def _note(self, values: Mapping[str, float], *, show_rate: bool) -> str:
        shown = [
            f"{SHORT.get(name, name)} {significant(v)}" for name, v in values.items() if not math.isnan(v)
        ]
        elapsed, steps = self._now - self._began, self._done - self._start
        if show_rate and self._token_seconds > 0:
            shown.append(f"{self._tokens / self._token_seconds:,.0f} tok/s")
        if steps > 0 and self._done < self._total:
            shown.append(f"{clock(elapsed / steps * (self._total - self._done))} left")
        elif self._done >= self._total:
            shown.append(f"took {clock(elapsed)}")
        return "  ".join(shown)


@contextmanager
def progress(
    description: str, total: int, start: int = 0, *, console: Console | None = None
) -> Iterator[Loop]:
    """Shows the progress of a loop from `start` to `total` steps; yields what to call `advance` on.

    Time left rests on the mean time of a step since the loop was entered, tokens per second on the steps
    that said how many tokens they took.
    """
    console = console or default_console()
    if not console.is_terminal:
        yield Loop(description, total, start, None, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=6),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield Loop(description, total, start, bar, console)


def coverage_table(rows: Sequence[Mapping[str, Any]], *, console: Console | None = None) -> None:
    """Prints which parts PTQ quantized: rows of part, kind, format, expected, matched."""
    table = Table(title="What PTQ quantized", title_justify="left", box=box.ASCII2, title_style="bold")
    for name in ("part", "what", "format"):
        table.add_column(name, overflow="fold")
    for name in ("expected", "quantized"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            DASH if row.get(key) is None else str(row[key]).replace("_", " ")
            for key in ("part", "kind", "format", "expected", "matched")
        ]
        table.add_row(*cells, style="" if row.get("expected") == row.get("matched") else "bold red")
    (console or default_console()).print(table)


def final_table(run_dir: Path, *, console: Console | None = None) -> None:
    """Prints the run's result: scores, recovery, held-out KL, and one last line that says what to do next."""
    console = console or default_console()
    results = read_results(run_dir)
    if results.scores("bf16"):
        console.print()
        console.print(_result_table(results))
        excluded = recovery.excluded if (recovery := results.recovery("ptq")) else {}
        if excluded:
            console.print(
                Text("-: left out of the recovery, BF16 itself scores no better than chance there.")
            )
    verdict = band_line(results)
    if verdict:
        console.print(Text(verdict))
    console.print(Text(headline(results)), style="bold")
    console.print(Text(last_line(results)), soft_wrap=True)


def band_line(results: Results) -> str | None:
    """What PTQ's median recovery means and, before QAD, what to do; None without an evaluation."""
    ptq = results.recovery("ptq")
    if ptq is None or ptq.median is None:
        return None
    low, high = results.band
    judged = judge_ptq(ptq.median, low=low, high=high)
    return judged.meaning if results.recovery("qad") else f"{judged.meaning} {judged.advice}"


def last_line(results: Results) -> str:
    """What happened and where to look next, in one line that never wraps."""
    missing = missing_stages(results)
    if missing:
        return f"Not in this run: {', '.join(missing)}. Next: {next_command(results)[1]}"
    folder = results.value("export", "folder") or DASH
    return f"Done: checkpoint in {folder}. Next: read {results.run_dir / 'report.md'}"


def _result_table(results: Results) -> Table:
    recoveries = [results.recovery(model) for model in ("ptq", "qad")]
    title = f"{results.model}, recipe {results.recipe}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ASCII2)
    table.add_column("", overflow="fold")
    for name in ("BF16", "PTQ", "QAD", "PTQ kept", "QAD kept"):
        table.add_column(name, justify="right", no_wrap=True)
    medians = [percent(found.median if found else None) for found in recoveries]
    minima = [percent(found.minimum if found else None) for found in recoveries]
    table.add_row("recovery, median", "", "", "", *medians, style="bold")
    table.add_row("recovery, lowest task", "", "", "", *minima, end_section=True)
    scores = [results.scores(model) for model in MODELS]
    for task in scores[0]:
        kept = [percent(found.tasks.get(task) if found else None) for found in recoveries]
        table.add_row(task.replace("_", " "), *(percent(score.get(task)) for score in scores), *kept)
    table.add_section()
    for name, key in (("held-out KL to BF16", "held_out_kl"), ("held-out perplexity", "perplexity")):
        numbers = [results.number("evaluate", f"models.{model}.{key}") for model in MODELS]
        table.add_row(name, *(significant(number) for number in numbers), "", "")
    return table


def default_console() -> Console:
    """The console of this moment's stdout; 80 columns wide where there is no terminal to ask.

    Of several ranks the first alone prints.
    """
    if not is_first_rank():
        return Console(quiet=True, force_terminal=False)
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)
