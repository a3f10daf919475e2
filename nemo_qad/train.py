"""The whole pipeline: python -m nemo_qad.train +recipe=NAME; --help lists what it takes.

The command line is checked first, then Hydra runs one job, or with -m one job for each combination. A job on several
ranks runs in processes of its own, unless torchrun or Slurm started this process as one of its ranks.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from nemo_qad import command_line, config, launcher, ranks
from nemo_qad.errors import EXIT_FAILURE, EXIT_INTERRUPTED, ConfigError, StoppedElsewhereError, UserError
from nemo_qad.files import read_json, write_json
from nemo_qad.schema import RunConfig
from nemo_qad.signals import handled, stop_at_once

config.register()

PIPELINE = "nemo_qad.stages:run"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process) and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(command_line.help_text())
        return 0
    command = None
    try:
        command = command_line.read(arguments)
        _refuse_sweep_of_ranks(command)
        return _run(command)
    except UserError as error:
        place = _place()
        if place is None or place.local_rank == 0:  # a mistake that every rank of a machine makes alike
            _complain(error)
        return error.exit_status
    except KeyboardInterrupt as stop:
        place = _place()
        if place is None or place.rank == 0:
            print(_interrupted(command, str(stop)), file=sys.stderr)
        return getattr(stop, "exit_status", EXIT_INTERRUPTED)


def _place() -> ranks.Place | None:
    """Of this process among ranks that torchrun or Slurm started; None also where their environment is damaged."""
    with contextlib.suppress(UserError):
        return ranks.found()
    return None


def _complain(error: UserError) -> None:
    if isinstance(error, StoppedElsewhereError):
        return
    place = _place()
    rank = f"rank {place.rank}: " if place and place.rank else ""
    print(f"error: {rank}{error}", file=sys.stderr)


def _refuse_sweep_of_ranks(command: command_line.Command) -> None:
    place = ranks.found()
    if command.multirun and place is not None and place.world_size > 1:
        problem = f"each of the {place.world_size} ranks that were started would run the whole sweep"
        remedy = "Start it without torchrun: each job starts its own ranks. Or start one torchrun or srun a job."
        raise ConfigError("option", "-m", problem, remedy)


def _run(command: command_line.Command) -> int:
    """Hydra takes its arguments from sys.argv alone."""
    path = f"pkg://{config.CONF_MODULE}"
    entry = hydra.main(version_base="1.3", config_path=path, config_name=config.CONFIG_NAME)(job)
    argv, sys.argv = sys.argv, [sys.argv[0], *command.argv]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # a defect keeps its whole traceback
    try:
        entry()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
    return _sweep_status(command) if command.multirun else 0


def job(cfg: Any) -> dict[str, Any] | None:
    """One run of Hydra's composed configuration.

    A single run that fails ends the process; in a sweep the failure is noted and the others go on.
    """
    run = config.to_run_config(cfg, list(HydraConfig.get().overrides.task))
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _sweep_job(run)
    summary, _, status = _attempt(run)
    if status:
        raise SystemExit(status)
    return summary


def _attempt(run: RunConfig) -> tuple[dict[str, Any] | None, str | None, int]:
    """(summary, error, exit status) of a run; what went wrong is on stderr."""
    overrides = list(HydraConfig.get().overrides.task)
    try:
        num_ranks = ranks.local_ranks(run.parallel)
        if num_ranks:
            return launcher.run(PIPELINE, (run, overrides), num_ranks), None, 0
        # A scheduler's signal ends the run as Ctrl-C does; where steps are made they are finished first.
        with handled((signal.SIGTERM, signal.SIGUSR1), stop_at_once):
            return _pipeline()(run, overrides), None, 0
    except UserError as error:
        _complain(error)
        return None, str(error), error.exit_status
    except launcher.RankError as error:
        print(error.report, file=sys.stderr)
        return None, str(error), EXIT_FAILURE
    except Exception as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}", EXIT_FAILURE


def _pipeline() -> Callable[[RunConfig, Sequence[str]], dict[str, Any]]:
    """Imported in the job: this is where torch comes in."""
    return cast(Callable[[RunConfig, Sequence[str]], dict[str, Any]], pkgutil.resolve_name(PIPELINE))


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
        write_json(folder / f"{number:03d}.json", record)
    return summary


def _sweep_status(command: command_line.Command) -> int:
    """0 when every job of the sweep left a record and is done."""
    assert command.sweep_dir is not None
    records = [read_json(path) for path in sorted((command.sweep_dir / "jobs").glob("[0-9]*.json"))]
    failed = sum(record["status"] != "done" for record in records)
    lost = len(command.runs) - len(records) if command.jobs_known else 0
    if failed or lost > 0:
        count = f"{failed + max(lost, 0)} of {max(len(records), len(command.runs))}"
        print(f"error: {count} jobs failed; see {command.sweep_dir}/jobs", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _interrupted(command: command_line.Command | None, how: str) -> str:
    """The last line. how: what was stopped where, if that is known."""
    if command is None or not (command.runs or command.multirun):
        return "interrupted before anything was started"
    if command.multirun:
        return "interrupted: finished jobs and stages are kept; the same command continues with the rest"
    folder = config.run_folder(command.runs[0])
    at = f", {how}" if how else ""
    return f"interrupted{at}: finished stages and saved steps are kept in {folder}; the same command continues"


if __name__ == "__main__":
    # By its import path, not as __main__: a launcher that pickles the job must find it on another machine.
    from nemo_qad.train import main as entry

    sys.exit(entry())
