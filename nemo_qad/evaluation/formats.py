"""Numbers as people read them, in reports and tables. None, an unknown value, is a dash everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

DASH = "-"


def percent(ratio: float | None, digits: int = 1) -> str:
    """0.9876 -> "98.8 %"."""
    return DASH if ratio is None else f"{100 * ratio:.{digits}f} %"


def significant(value: float | None, digits: int = 3) -> str:
    """A number to `digits` significant digits, zeros at the end kept: 0.0041 -> "0.00410"."""
    if value is None:
        return DASH
    return "0" if value == 0 else f"{value:#.{digits}g}".rstrip(".")


def size(num_bytes: float | None) -> str:
    """Bytes in decimal units, as model cards count: 1224120 -> "1.22 MB"."""
    if num_bytes is None:
        return DASH
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """1234.5 -> "20 min 35 s"."""
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: 75 -> "1:15", 4000 -> "1:06:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int = 1) -> str:
    """A Markdown table; the first `text_columns` are text, the others right-aligned. None becomes a dash."""
    rules = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    lines = (
        [DASH if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in line]
        for line in [list(header), rules, *rows]
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
