"""Looks at an exported checkpoint, or says what one will be.

    python -m nemo_qad.export --verify FOLDER [--source FOLDER] [--engine vllm] [--tensor-parallel 4]
    python -m nemo_qad.export --size model=NAME [+recipe=NAME] [--tensor-parallel 4]

Exports are made by the stage of that name (python -m nemo_qad.train ... stages=[export]). --verify reads a finished
folder again, wherever it came from; --size counts from the configuration, for every recipe or the one that is named.
Neither needs a GPU or a model in memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_qad.errors import EXIT_FAILURE, UserError
from nemo_qad.huggingface.engines import ENGINES, cut_problems
from nemo_qad.huggingface.inspect import Inspection, inspect_folder

if TYPE_CHECKING:
    from nemo_qad.schema import RunConfig

WIDTH = 80
MOST_SHOWN = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 1 where something is wrong with the folder."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_qad.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--verify", metavar="FOLDER", type=Path, help="the exported checkpoint")
    what.add_argument("--size", metavar="OVERRIDE", nargs="+", help="a model, as for nemo_qad.train")
    parser.add_argument("--source", metavar="FOLDER", type=Path, help="the BF16 checkpoint that it was made from")
    parser.add_argument("--engine", choices=ENGINES, help="checks what this engine asks for, too")
    parser.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help="ranks over which it will be cut")
    given = parser.parse_args(argv)
    if given.tensor_parallel < 1:
        parser.error(f"--tensor-parallel {given.tensor_parallel}: give at least 1")
    try:
        return _show_sizes(given) if given.size else _verify(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _verify(given: argparse.Namespace) -> int:
    for folder in (given.verify, given.source):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{folder}: no such folder. Give that of a checkpoint")
    found = inspect_folder(
        given.verify, source=given.source, engine=given.engine, tensor_parallel=given.tensor_parallel
    )
    show(found)
    return EXIT_FAILURE if found.problems else 0


def _show_sizes(given: argparse.Namespace) -> int:
    from nemo_qad.config import choices  # torch comes with these
    from nemo_qad.huggingface.sizes import export_size, quantised_weights

    recipes = [item.partition("=")[2] for item in given.size if item.lstrip("+").startswith("recipe=")]
    rest = [item for item in given.size if not item.lstrip("+").startswith("recipe=")]
    runs = {name: composed([f"+recipe={name}", *rest]) for name in recipes or choices("recipe")}
    model = next(iter(runs.values())).model
    plain = export_size(model, None)
    table = Table(title=f"{model.name}, {plain.num_values:,} values", title_justify="left", box=box.ASCII2)
    for heading in ("checkpoint", "GB", "of BF16", "bits a value", "tensors"):
        table.add_column(heading, justify="left" if heading == "checkpoint" else "right")
    odd: dict[str, list[str]] = {}
    for name, size in {"BF16": plain, **{n: export_size(run.model, run.recipe) for n, run in runs.items()}}.items():
        share = f"{100 * size.num_bytes / plain.num_bytes:.1f} %"
        table.add_row(name, f"{size.num_bytes / 1e9:.2f}", share, f"{size.bits:.2f}", f"{size.num_tensors:,}")
    console = _console(None)
    console.print(table)
    for name, run in runs.items():
        for lines in cut_problems(quantised_weights(run.model, run.recipe), given.tensor_parallel):
            for line in lines:
                odd.setdefault(line, []).append(name)
    for line, names in odd.items():
        console.print(Text(f"{', '.join(names)}: {line}"), soft_wrap=True)
    console.print(Text("Nothing was made. GB are 10^9 bytes of tensors, without their names."))
    return 0


def composed(overrides: list[str]) -> RunConfig:
    """The configuration for a model and a recipe; model.path=FOLDER takes the model from there."""
    from nemo_qad.command_line import with_group
    from nemo_qad.config import compose

    return compose(with_group(overrides))


def _console(console: Console | None) -> Console:
    console = console or Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH, file=console.file)


def show(found: Inspection, console: Console | None = None) -> None:
    """A table of what is there, what is wrong, and one last line."""
    console = _console(console)
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
