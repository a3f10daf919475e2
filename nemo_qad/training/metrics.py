"""Metrics of a run: JSON lines, the record that reports read, and TensorBoard for looking at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nemo_qad import agreement


class MetricsLog:
    """Appends to RUN/metrics.jsonl and RUN/tensorboard. Reopening at a step drops what came after it,
    so that a continued run leaves the same record as an uninterrupted one. Of several ranks the first writes."""

    def __init__(self, run_dir: Path, stage: str, *, start_step: int) -> None:
        self._writes = agreement.is_first()
        if not self._writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._stage = stage
        self._path = run_dir / "metrics.jsonl"
        self._keep_until(start_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)

    def _keep_until(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that a killed process was writing
            # Step 0 is the state before training; it is measured again when training starts anew.
            if entry["stage"] != self._stage or (entry["step"] <= step and step > 0):
                kept.append(line + "\n")
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self._path)

    def write(self, step: int, **values: Any) -> None:
        """One line: {"stage": ..., "step": step, name: value, ...}."""
        if not self._writes:
            return
        self._file.write(json.dumps({"stage": self._stage, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{self._stage}/{name}", value, step)

    def close(self) -> None:
        if not self._writes:
            return
        self._file.close()
        self._board.close()
