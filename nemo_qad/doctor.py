"""Looks at a run folder, or without one at the machine.

    python -m nemo_qad.doctor RUN [--quick]
    python -m nemo_qad.doctor [--folder FOLDER]

RUN: reads every file of a run through, compares it with the digest that was written, and says what the next start will
do. It can be asked while the run is at work. Without RUN: what is installed, which GPUs there are, and whether the set
is known not to work. Prints a table, then what is wrong and what is worth knowing. Exit status 1 where something is
wrong. Nothing is changed and no GPU is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from nemo_qad import run_state
from nemo_qad.errors import EXIT_FAILURE, UserError
from nemo_qad.evaluation.formats import size
from nemo_qad.evaluation.report import command_of
from nemo_qad.evaluation.results import read_results
from nemo_qad.machine import Machine, dotted, findings, look
from nemo_qad.next_start import next_start
from nemo_qad.run_state import Part, RunState
from nemo_qad.schema import Stage
from nemo_qad.stage_order import applies

WIDTH = 80
SHOWN = [stage for stage in Stage if stage is not Stage.report]  # which leaves no done-marker


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_qad.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="the folder of a run, its run_dir")
    parser.add_argument("--quick", action="store_true", help="of RUN: compare names and sizes, read no weights through")
    parser.add_argument("--folder", type=Path, default=Path(), help="where runs will be written (default: here)")
    given = parser.parse_args(argv)
    if given.run is not None:
        try:
            return show_run(given.run, quick=given.quick)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_FAILURE
    if given.quick:
        parser.error("--quick: it shortens the look at a run. Give the folder of one")
    if not given.folder.is_dir():
        parser.error(f"--folder {given.folder}: no such folder. Give one that exists")
    return show(look(given.folder))


def show(machine: Machine, console: Console | None = None) -> int:
    """Prints facts and findings; the exit status."""
    console = _fitting(console)
    table = Table(title="This machine", title_justify="left", box=box.ASCII2, show_header=False)
    for name, value in _rows(machine):
        table.add_row(name, value)
    console.print(table)
    found = findings(machine)
    for finding in found:
        console.print(Text(f"{'Wrong' if finding.bad else 'Remark'}: {finding.text}."), soft_wrap=True)
    bad = sum(finding.bad for finding in found)
    things = f"{bad} thing{'s' if bad > 1 else ''}"
    last = f"{things} to put right before a run." if bad else "Nothing known to be wrong. Next: make demo"
    console.print(Text(last))
    return EXIT_FAILURE if bad else 0


def _fitting(console: Console | None) -> Console:
    console = console or Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH, file=console.file)


def show_run(folder: Path, console: Console | None = None, *, quick: bool = False) -> int:
    """Prints what the folder of a run holds and what the next start does; the exit status.

    Raises:
        UserError: it is not a run folder.
    """
    console = _fitting(console)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=run_state.size(folder))
        state = run_state.look(folder, quick=quick, read=lambda num_bytes: bar.advance(task, num_bytes))
    console.print(_run_table(state))
    for text in state.damage:
        console.print(Text(f"Wrong: {text.rstrip('.')}."), soft_wrap=True)
    for text in _run_remarks(state):
        console.print(Text(f"Remark: {text}."), soft_wrap=True)
    after = next_start(state)
    if after.pending:
        console.print(Text(f"The command: {command_of(read_results(folder))}"), soft_wrap=True)
    if state.is_busy:
        begun = "A process works in it. Once it has ended, the same command"
    elif state.damage:
        begun = f"{len(state.damage)} damaged. The same command"
    else:
        begun = f"{'No file is missing' if quick else 'All as it was written'}. The same command"
    console.print(Text(f"{begun} {after.text.rstrip('.')}."), soft_wrap=True)
    return EXIT_FAILURE if state.damage or after.stops else 0


def _run_table(state: RunState) -> Table:
    table = Table(title=f"{state.folder}", title_justify="left", box=box.ASCII2)
    for heading in ("what", "state"):
        table.add_column(heading)
    for heading in ("files", "size"):
        table.add_column(heading, justify="right")
    unfinished = [s for s in (state.run.stages if state.run else Stage) if s not in state.stages and s in SHOWN]
    for stage in SHOWN:
        if stage in state.stages:
            _add(table, state.stages[stage])
        elif stage in unfinished and (state.run is None or applies(stage, state.run)):
            table.add_row(f"stage {stage.value}", "not finished", "", "")
    for step, part in state.checkpoints.items():
        _add(table, part, ", newest whole" if step == state.newest_whole else "")
    if state.best:
        of = state.best.found.get("step")
        _add(table, state.best, "" if of is None else f", of step {of}")
    return table


def _add(table: Table, part: Part, more: str = "") -> None:
    held = (str(part.num_files), size(part.num_bytes)) if part.num_files else ("", "")
    sound = "whole" if part.num_files else "finished"  # which has left numbers alone
    table.add_row(part.name, (sound if part.is_whole else "DAMAGED") + more, *held)


def _run_remarks(state: RunState) -> Iterator[str]:
    if state.latest is not None and state.latest not in state.checkpoints:
        yield f"latest names step {state.latest}, which is not there; a start looks at the folders themselves"
    for path in state.unfinished:
        yield f"{path} is what a killed save left; the next save removes it"
    for path in state.set_aside:
        yield f"{path} was set aside by resume.restart; delete it when it is not wanted any more"


def _rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "Python", dotted(machine.python)
    for name, installed in machine.packages.items():
        yield name, installed or "not installed"
    for name, number in (("CUDA of torch", machine.cuda), ("NCCL", machine.nccl), ("ptxas of Triton", machine.ptxas)):
        yield name, dotted(number) if number else "none"
    yield "driver", machine.driver or "none"
    for gpu in dict.fromkeys(machine.gpus):
        count = machine.gpus.count(gpu)
        yield "GPU", f"{count} x {gpu.name}, compute capability {dotted(gpu.capability)}, {gpu.memory / 2**30:.0f} GiB"
    if not machine.gpus:
        yield "GPU", "none"
    yield "CPU cores", str(machine.cpus)
    yield "memory", f"{machine.memory / 2**30:.0f} GiB"
    yield "disk", f"{machine.free_disk / 1e9:,.0f} GB free"


if __name__ == "__main__":
    sys.exit(main())
