"""The error that PTQ made in the weights of each linear: records, their file, and the rows that a person reads.

`quantization/layers.py` measures; RUN/ptq/layers.json keeps one record a linear. A table or picture shows one row a
linear, and one for all routed experts of a layer. Rows are ranked by `LinearError.level_db`, the worst first. No torch.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

from nemo_qad.evaluation.results import as_number
from nemo_qad.files import write_json

FILE, PICTURE = "ptq/layers.json", "plots/layers.png"  # in a run folder
STANDS_OUT_DB = 3.0  # below the median of its format: twice its noise
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"^(decoder\.layers\.\d+\.mlp\.experts)\.local_experts\.(\d+)\.")
_SHORTER = (
    ("decoder.layers.", ""), (".mlp.experts.local_experts.", ".experts."), (".mlp.shared_experts.", ".shared_experts."),
    ("self_attention", "attention"), ("linear_", ""),
)  # fmt: skip


@dataclass(frozen=True)
class LinearError:
    """One quantised linear: w its weights, q the values in their place, B blocks of 16 values.

    name: global module name. part, format: as in the recipe. values: number of weights.
    sqnr_db: 10 log10(sum w^2 / sum (w - q)^2); None where q is w.
    block_sqnr_db: 10 log10(B / sum over blocks of |w - q|^2 / |w|^2), blocks of zeros left out; NVFP4 alone. Each block
        counts alike, so one huge value cannot hide that all the others were lost.
    mse: sum (w - q)^2 / values. mse_ratio: to that of the best sweep; NVFP4 alone.
    share_of_fours: blocks whose largest element became 4 instead of 6; four-over-six alone.
    tokens, idle: calibration tokens of a routed expert, and whether there were none; None for other linears.
    """

    name: str
    part: str
    format: str
    values: int
    sqnr_db: float | None
    block_sqnr_db: float | None
    mse: float
    mse_ratio: float | None
    share_of_fours: float | None
    tokens: int | None
    idle: bool | None

    @property
    def level_db(self) -> float:
        """The lower of both SQNRs, by which linears are ranked; infinite where nothing was lost."""
        return min((db for db in (self.sqnr_db, self.block_sqnr_db) if db is not None), default=inf)

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer; None for the output layer."""
        found = _LAYER.match(self.name)
        return int(found[1]) if found else None

    @property
    def expert(self) -> int | None:
        """Index of the routed expert."""
        found = _EXPERT.match(self.name)
        return int(found[2]) if found else None

    @property
    def label(self) -> str:
        """The name without what all names share: "3.experts.17.fc1"."""
        name = self.name
        for long, short in _SHORTER:
            name = name.replace(long, short)
        return name


@dataclass(frozen=True)
class Row:
    """What a table shows in one row: a linear, or all linears of the routed experts of a layer, the worst first."""

    linears: tuple[LinearError, ...]

    @property
    def worst(self) -> LinearError:
        return self.linears[0]

    @property
    def label(self) -> str:
        experts = len({linear.expert for linear in self.linears})
        of = f" of {experts}" if self.worst.expert is not None else ""
        return self.worst.label + of + (" (fp8)" if self.worst.format == "fp8" else "")

    @property
    def median_db(self) -> float | None:
        """Median SQNR of the experts' linears; None for a row of one linear."""
        known = [linear.sqnr_db for linear in self.linears if linear.sqnr_db is not None]
        return statistics.median(known) if len(self.linears) > 1 and known else None

    @property
    def mse_ratio(self) -> float | None:
        """Of the summed errors to the summed errors of the best sweeps."""
        known = [(line.mse * line.values, line.mse_ratio) for line in self.linears if line.mse_ratio]
        best = sum(error / ratio for error, ratio in known)
        return sum(error for error, _ in known) / best if best else None

    @property
    def share_of_fours(self) -> float | None:
        known = [(line.share_of_fours, line.values) for line in self.linears if line.share_of_fours is not None]
        return sum(share * values for share, values in known) / sum(values for _, values in known) if known else None

    @property
    def num_idle(self) -> int | None:
        """Experts that calibration never reached; None where the row has no experts."""
        return len({line.expert for line in self.linears if line.idle}) if self.worst.expert is not None else None


class LayerErrors:
    """All quantised linears of a model."""

    def __init__(self, linears: Iterable[LinearError]) -> None:
        self.linears = list(linears)

    @cached_property
    def rows(self) -> list[Row]:
        """The worst first; equal ones in the model's order."""
        together: dict[str, list[LinearError]] = {}
        for linear in self.linears:
            found = _EXPERT.match(linear.name)
            together.setdefault(found[1] if found else linear.name, []).append(linear)
        rows = [Row(tuple(sorted(linears, key=lambda linear: linear.level_db))) for linears in together.values()]
        return sorted(rows, key=lambda row: row.worst.level_db)

    @cached_property
    def standing_out(self) -> list[LinearError]:
        """Linears with more than twice the noise of the median linear of their format, the worst first."""
        medians = self.medians_db
        far = [line for line in self.linears if line.level_db < medians.get(line.format, -inf) - STANDS_OUT_DB]
        return sorted(far, key=lambda linear: linear.level_db)

    @cached_property
    def medians_db(self) -> dict[str, float]:
        """Median SQNR of the linears of each format."""
        known: dict[str, list[float]] = {}
        for linear in self.linears:
            if linear.sqnr_db is not None:
                known.setdefault(linear.format, []).append(linear.sqnr_db)
        return {chosen: statistics.median(found) for chosen, found in known.items()}

    @cached_property
    def experts(self) -> list[str]:
        """Names of the routed experts, as calibration has them."""
        return list(dict.fromkeys(_expert_name(line) for line in self.linears if line.expert is not None))

    @cached_property
    def idle_experts(self) -> list[str]:
        return list(dict.fromkeys(_expert_name(line) for line in self.linears if line.idle))

    def totals(self) -> str:
        """One line: how many linears, their SQNR, and the idle experts."""
        found = [line.sqnr_db for line in self.linears if line.sqnr_db is not None]
        medians = ", ".join(f"{chosen} {median:.1f}" for chosen, median in self.medians_db.items())
        sqnr = f"lowest {min(found):.1f} dB, median {medians} dB" if found else "nothing was lost"
        idle = f"; idle experts: {len(self.idle_experts)} of {len(self.experts)}" if self.experts else ""
        return f"{len(self.linears)} linears: {sqnr}{idle}."


def write_errors(path: Path, errors: LayerErrors) -> None:
    write_json(path, {"linears": [asdict(linear) for linear in errors.linears]})


def read_errors(path: Path) -> LayerErrors:
    """What `write_errors` wrote; empty where the file is missing or damaged, as in older runs."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return LayerErrors([])
    found = content.get("linears") if isinstance(content, dict) else None
    read = [_read(entry) for entry in (found if isinstance(found, list) else [])]
    return LayerErrors(linear for linear in read if linear is not None)


def shown(names: Sequence[str], most: int = 5) -> str:
    """The first names and how many more there are, without what all names share."""
    short = [name.replace("decoder.layers.", "").replace(".mlp.experts.local_experts.", ".experts.") for name in names]
    return ", ".join(short[:most]) + (f" and {len(short) - most} more" if len(short) > most else "")


def _expert_name(linear: LinearError) -> str:
    return linear.name.rpartition(".")[0]


def _read(entry: Any) -> LinearError | None:
    if not isinstance(entry, dict):
        return None
    names = [entry.get(key) for key in ("name", "part", "format")]
    numbers = {key: as_number(entry.get(key)) for key in (
        "values", "sqnr_db", "block_sqnr_db", "mse", "mse_ratio", "share_of_fours", "tokens")}  # fmt: skip
    values, mse, tokens = numbers.pop("values"), numbers.pop("mse"), numbers.pop("tokens")
    if not all(isinstance(name, str) for name in names) or values is None or mse is None or not isfinite(mse):
        return None
    name, part, chosen = (str(name) for name in names)
    idle = entry.get("idle")
    return LinearError(
        name=name, part=part, format=chosen, values=int(values), mse=mse,
        tokens=None if tokens is None else int(tokens), idle=idle if isinstance(idle, bool) else None, **numbers,
    )  # fmt: skip
