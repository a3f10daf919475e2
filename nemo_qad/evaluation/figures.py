"""The look that the report's pictures share, and how one is saved.

Drawn for a README about 900 pixels wide (twice that is stored, for sharp screens), in the colours of Okabe
and Ito that colour-blind readers tell apart. The same numbers give the same bytes: no pyplot state, no
date or version in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WIDTH_INCHES, DOTS_PER_INCH = 9.0, 200
ORANGE, BLUE, GREEN, GREY = "#D55E00", "#0072B2", "#009E73", "#666666"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "nemo_qad",
}


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure `height` inches high, and its axes; `options` go to `Figure.subplots`."""
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
