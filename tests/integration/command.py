"""The main command, started in a folder as a user does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MODULE = ("-m", "nemo_qad.train")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "nemo_qad.train")


def start(
    root: Path, settings: Sequence[str], *overrides: str, program: Sequence[str] = MODULE
) -> subprocess.Popen[str]:
    """Data and teacher are cached in ROOT/cache; stdout and stderr come together."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *program, *settings, f"cache_dir={root / 'cache'}", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=root,
        # A shell starts background jobs with SIGINT ignored, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def run(root: Path, settings: Sequence[str], *overrides: str, program: Sequence[str] = MODULE) -> tuple[int, str]:
    """(exit status, output)"""
    process = start(root, settings, *overrides, program=program)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def interrupt(root: Path, settings: Sequence[str], when: str, *overrides: str) -> tuple[int, str]:
    """Runs until a line holds `when`, then sends what Ctrl-C sends."""
    process, seen = start(root, settings, *overrides), []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if when in line:
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    return process.returncode, "".join(seen) + rest
