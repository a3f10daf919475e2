"""What the ptq stage prints of the layers' errors: the worst rows in 80 columns, then one line of totals."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_qad.evaluation.console import default_console
from nemo_qad.evaluation.formats import DASH
from nemo_qad.evaluation.layer_errors import LayerErrors
from nemo_qad.evaluation.layer_report import cells

MOST_ROWS = 12
COLUMNS = ("SQNR", "median", "block", "/ best", "at 4", "idle")  # of `cells`


def layer_table(errors: LayerErrors, path: Path, *, console: Console | None = None) -> None:
    """Prints the worst linears first, the experts of a layer in one row.

    Args:
        path: the file that holds every linear, named in the last line.
    """
    console = console or default_console()
    if not errors.linears:
        return
    rows = errors.rows[:MOST_ROWS]
    title = "Error of the quantized weights, dB, worst first"
    table = Table(title=title, title_justify="left", box=box.ASCII2, title_style="bold")
    table.add_column("layer.linear", overflow="fold")
    used = [index for index in range(len(COLUMNS)) if any(cells(row)[index] != DASH for row in rows)]
    for index in used:
        table.add_column(COLUMNS[index], justify="right", no_wrap=True)
    for row in rows:
        found = cells(row)
        bad = row.worst in errors.standing_out
        table.add_row(row.label, *(found[index] for index in used), style="bold red" if bad else "")
    console.print(table)
    rest = len(errors.rows) - len(rows)
    more = f" {rest} more rows are better than these." if rest else ""
    console.print(Text(f"{errors.totals()}{more}"), soft_wrap=True)
    console.print(Text(f"All of them, and what the columns mean: {path}, report.md"), soft_wrap=True)
