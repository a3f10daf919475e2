"""The whole pipeline: python -m nemo_qad.train +recipe=NAME; --help lists what it takes.

The command line is checked first, then Hydra runs one job, or with -m one job for each combination.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from nemo_qad import command_line, config
from nemo_qad.errors import EXIT_FAILURE, EXIT_INTERRUPTED, UserError
from nemo_qad.schema import RunConfig

config.register()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process) and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(command_line.help_text())
        return 0
    command = None
    try:
        command = command_line.read(arguments)
        return _run(command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(_interrupted(command), file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(command: command_line.Command) -> int:
    """Hydra takes its arguments from sys.argv alone."""
    entry = hydra.main(version_base="1.3", config_path=f"pkg://{config.CONF_MODULE}", config_name="train")(job)
    argv, sys.argv = sys.argv, [sys.argv[0], *command.argv]
    full_error = os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # a defect keeps its whole traceback
    assert full_error
    try:
        entry()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
    return _sweep_status(command) if command.multirun else 0


def job(cfg: DictConfig) -> dict[str, Any] | None:
    """One run. Ends a single run that fails; in a sweep the failure is noted and the others go on."""
    run = config.to_run_config(cfg)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _sweep_job(run)
    summary, _, status = _attempt(run)
    if status:
        raise SystemExit(status)
    return summary


def _attempt(run: RunConfig) -> tuple[dict[str, Any] | None, str | None, int]:
    """(summary, error, exit status) of a run; what went wrong is on stderr."""
    try:
        return _pipeline()(run), None, 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return None, str(error), error.exit_status
    except Exception as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}", EXIT_FAILURE


def _pipeline() -> Callable[[RunConfig], dict[str, Any]]:
    """Imported in the job: this is where torch comes in."""
    from nemo_qad import stages

    return stages.run


def _sweep_job(run: RunConfig) -> dict[str, Any] | None:
    settings = HydraConfig.get()
    number, overrides = int(settings.job.num), list(settings.overrides.task)
    folder = Path(settings.sweep.dir) / "jobs"
    print(f"job {number}: {' '.join(overrides)}", flush=True)
    record: dict[str, Any] = {
        "overrides": overrides,
        "run_dir": str(config.run_folder(run)),
        "status": "failed",
        "error": "interrupted",
        "summary": None,
    }
    try:
        summary, error, status = _attempt(run)
        record |= {"status": "failed" if status else "done", "error": error, "summary": summary}
    finally:
        _write(folder / f"{number:03d}.json", record)
    return summary


def _write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all: a reader of the sweep never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _sweep_status(command: command_line.Command) -> int:
    """0 when every job of the sweep left a record and is done."""
    assert command.sweep_dir is not None
    records = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((command.sweep_dir / "jobs").glob("[0-9]*.json"))
    ]
    failed = sum(record["status"] != "done" for record in records)
    lost = len(command.runs) - len(records) if command.jobs_known else 0
    if failed or lost > 0:
        total = max(len(records), len(command.runs))
        print(f"error: {failed + max(lost, 0)} of {total} jobs failed; see {command.sweep_dir}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _interrupted(command: command_line.Command | None) -> str:
    if command is None or not (command.runs or command.multirun):
        return "interrupted before anything was started"
    if command.multirun:
        return "interrupted: finished jobs and stages are kept; the same command continues with the rest"
    folder = config.run_folder(command.runs[0])
    return f"interrupted: finished stages and saved steps are kept in {folder}; the same command continues"


if __name__ == "__main__":
    # By its import path, not as __main__: a launcher that pickles the job must find it on another machine.
    from nemo_qad.train import main as entry

    sys.exit(entry())
