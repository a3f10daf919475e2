"""One run from its configuration to its report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_qad.config import run_folder
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.evaluation.console import final_table, last_line, say
from nemo_qad.evaluation.plots import write_plots
from nemo_qad.evaluation.report import write_report
from nemo_qad.evaluation.results import read_results
from nemo_qad.files import write_json
from nemo_qad.ranks import is_first_rank
from nemo_qad.runtime import identity, process_groups
from nemo_qad.schema import RunConfig, Stage
from nemo_qad.stage_order import OPTIONAL, applies, made, needed
from nemo_qad.stages import evaluate, export, logits, ptq, qad, teacher
from nemo_qad.stages.folder import RunFolder
from nemo_qad.stages.session import Session
from nemo_qad.validation import reads_teacher

PACKAGES = ("torch", "megatron-core", "nvidia-modelopt", "hydra-core", "omegaconf", "transformers",
            "tokenizers", "safetensors", "numpy")  # fmt: skip

Runner = Callable[[Session], tuple[dict[str, Any], list[Path]]]
RUNNERS: dict[Stage, Runner] = {
    Stage.ptq: ptq.run,
    Stage.logits: lambda session: (logits.run(session), []),  # in the cache, so not of this folder
    Stage.qad: qad.run,
    Stage.evaluate: lambda session: (evaluate.run(session), []),
    Stage.export: export.run,
}


def run(run: RunConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the configured stages and returns the summary that a sweep's table shows; nothing on ranks after the first.

    Args:
        overrides: the command line that gave `run`, recorded so that reports can name the next command.

    Raises:
        UserError: with what to do about it; finished stages stay finished.
    """
    _refuse_unsupported(run)
    first = is_first_rank()
    folder = RunFolder(run_folder(run), run, owner=first)
    try:
        if first:
            for remark in folder.remarks:
                say(f"{folder.path}: {remark}")
            write_json(folder.path / "environment.json", {**_environment(), "overrides": list(overrides)})
        with process_groups(run.parallel, seed=run.seed, threads=run.threads, identity=identity(run)):
            folder.share()
            torch.use_deterministic_algorithms(run.deterministic)
            session = Session(run, folder, say)
            _run_teacher(session)
            for stage in RUNNERS:
                if stage in run.stages and applies(stage, run):
                    _run_stage(session, stage)
        if not first:
            return {}
        if Stage.report in run.stages:
            _report(folder)
        else:
            say(last_line(read_results(folder.path)))
        return read_results(folder.path).summary()
    finally:
        folder.close()


def _refuse_unsupported(run: RunConfig) -> None:
    if run.teacher.path is None and run.model.name != "tiny_hybrid" and run.model.hidden_size > 1024:
        raise ConfigError(
            "teacher.path", None, f"model={run.model.name} is too large to train from scratch",
            "Give the folder of its BF16 Hugging Face checkpoint: teacher.path=FOLDER",
        )  # fmt: skip


def _environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cores": os.cpu_count(),
        "versions": versions,
    }


def _run_teacher(session: Session) -> None:
    """Always first: every later stage compares with the teacher or starts from it.

    Where its digest is known and no stage reads its weights, the teacher itself may be on another machine.
    """
    before = session.folder.result(Stage.teacher)
    if before is not None and not reads_teacher(session.run):
        session.know_teacher(before)
        return
    result = teacher.run(session)
    if before is None:
        session.folder.finish(Stage.teacher, result, {}, [])
    elif before["digest"] != result["digest"]:
        raise UserError(
            f"teacher: {result['path']} has other weights than when {session.folder.path} was started. "
            "Choose another run_dir, or bring the first teacher back"
        )


def _run_stage(session: Session, stage: Stage) -> None:
    folder = session.folder
    inputs = {}
    for need in needed(stage, session.run):
        result = folder.result(need)
        if result is None and need not in OPTIONAL:
            raise UserError(
                f"stage {stage.value} needs stage {need.value}, which is not finished in {folder.path}. "
                f"Add it: stages=[{need.value},{stage.value}]"
            )
        folder.check_files(need)
        inputs[need.value] = made(result)
    known = folder.result(stage)
    if known is not None and known["inputs"] == inputs:
        folder.check_files(stage)
        session.say(f"{stage.value}: finished before, skipped")
        return
    if known is not None:
        session.say(f"{stage.value}: made from other weights than those now in {folder.path}; runs again")
    result, files = RUNNERS[stage](session)
    folder.finish(stage, result, inputs, files)


def _report(folder: RunFolder) -> None:
    write_plots(folder.path)
    write_report(folder.path)
    final_table(folder.path)
