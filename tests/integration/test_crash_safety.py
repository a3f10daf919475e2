"""Saves that are killed, full disks, damaged files (I10, I12): benchmarks/faults.py itself, on one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "faults.py"


def test_no_fault_loses_a_checkpoint_or_gives_other_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), "--ranks", "1", "--no-stall"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] >= 40 and not found["lost"] and not found["silent"], done.stdout
    assert done.stdout.count("kill ") == 24 and "during retention, async" in done.stdout
