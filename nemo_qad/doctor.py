"""Looks at the machine: what is installed, which GPUs there are, and whether the set is known not to work.

    python -m nemo_qad.doctor [--folder FOLDER]

Prints a table, then what is wrong and what is worth knowing. Exit status 1 where something does not work. Nothing is
changed and no GPU is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_qad.errors import EXIT_FAILURE
from nemo_qad.machine import Machine, dotted, findings, look

WIDTH = 80


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_qad.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="where runs will be written (default: here)")
    given = parser.parse_args(argv)
    if not given.folder.is_dir():
        parser.error(f"--folder {given.folder}: no such folder. Give one that exists")
    return show(look(given.folder))


def show(machine: Machine, console: Console | None = None) -> int:
    """Prints facts and findings; the exit status."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH, file=console.file)
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
