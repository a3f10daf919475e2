"""Looks at an exported checkpoint: python -m nemo_qad.export --verify FOLDER.

Exports are made by the stage of that name (python -m nemo_qad.train ... stages=[export]); this command reads a finished
folder again, wherever it came from. It needs no torch, no GPU and no model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_qad.errors import EXIT_FAILURE, UserError
from nemo_qad.huggingface.engines import ENGINES
from nemo_qad.huggingface.inspect import Inspection, inspect_folder

WIDTH = 80
MOST_SHOWN = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 1 where something is wrong with the folder."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_qad.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", metavar="FOLDER", type=Path, required=True, help="the exported checkpoint")
    parser.add_argument("--source", metavar="FOLDER", type=Path, help="the BF16 checkpoint that it was made from")
    parser.add_argument("--engine", choices=ENGINES, help="checks what this engine asks for, too")
    parser.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help="ranks over which it will be cut")
    given = parser.parse_args(argv)
    if given.tensor_parallel < 1:
        parser.error(f"--tensor-parallel {given.tensor_parallel}: give at least 1")
    try:
        for folder in (given.verify, given.source):
            if folder is not None and not folder.is_dir():
                raise UserError(f"{folder}: no such folder. Give that of a checkpoint")
        found = inspect_folder(
            given.verify, source=given.source, engine=given.engine, tensor_parallel=given.tensor_parallel
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    show(found)
    return EXIT_FAILURE if found.problems else 0


def show(found: Inspection, console: Console | None = None) -> None:
    """A table of what is there, what is wrong, and one last line."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH, file=console.file)
    table = Table(title=str(found.folder), title_justify="left", box=box.ASCII2, show_header=False)
    table.add_row("tensors", f"{found.num_tensors:,} of {found.num_bytes / 1e9:.3f} GB")
    for name, count in found.linears.items():
        bits = f", {found.bits[name]:.2f} bits a weight with scales" if name in found.bits else ""
        table.add_row(f"{name} linears", f"{count:,}{bits}")
    table.add_row("KV cache scales", f"{found.num_kv_scales:,}")
    console.print(table)
    for title, lines in (("Remark", found.remarks), ("Wrong", found.problems)):
        for line in lines[:MOST_SHOWN]:
            console.print(Text(f"{title}: {line}"), soft_wrap=True)
        if len(lines) > MOST_SHOWN:
            console.print(Text(f"{title}: {len(lines) - MOST_SHOWN} more"))
    last = f"{len(found.problems)} problems: export it again, or ask for another layout"
    console.print(Text(last if found.problems else "All of it is as it should be."))


if __name__ == "__main__":
    sys.exit(main())
