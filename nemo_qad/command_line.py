"""The command line of a Hydra entry, checked before Hydra runs anything and before torch is imported.

`read` turns argv into overrides, one list for each job of a sweep, each of them composed and validated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from nemo_qad import config, fields
from nemo_qad.errors import ConfigError
from nemo_qad.schema import RunConfig
from nemo_qad.validation import check_inputs

SEE_HELP = "See python -m nemo_qad.train --help."


@dataclass(frozen=True)
class Command:
    """What a command line asks for. `shows` is set for Hydra's own listings, which run no job."""

    argv: list[str]
    multirun: bool = False
    shows: bool = False
    sweep_dir: Path | None = None
    runs: list[RunConfig] = field(default_factory=list)
    jobs_known: bool = True  # False under a sweeper that chooses its jobs as it goes


def read(argv: Sequence[str]) -> Command:
    """Raises ConfigError for the first mistake; within about a second, for each job of a sweep."""
    args = _parse_arguments(argv)
    overrides = with_group([_normalised(override) for override in args.overrides])
    parsed = _parse_overrides(overrides)
    for override in parsed:
        _check_override(override, args.config_dir)
    multirun = args.multirun or any(o.input_line == "hydra.mode=MULTIRUN" for o in parsed)
    shows = bool(args.cfg or args.info or args.hydra_help or args.shell_completion)
    flags = _flags(args)
    if not multirun and not shows:
        _refuse_sweeps(parsed)
    if shows:
        return Command([*flags, *overrides], shows=True)
    if multirun:
        return _read_sweep(parsed, flags, overrides, args.config_dir)
    return Command([*flags, *overrides], runs=[_checked(overrides, args.config_dir)])


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = get_args_parser()
    args, unknown = parser.parse_known_args(list(argv))
    flags = [word for word in unknown if word.startswith("-") and "=" not in word]
    if flags:
        name = flags[0].lstrip("-")
        known = [word for action in parser._actions for word in action.option_strings]
        meant = fields.closest(flags[0], known)
        if fields.is_known(name) or name in config.groups():
            meant = f"Settings have no dashes: {'+' if name == 'recipe' else ''}{name}=VALUE. "
        raise ConfigError("option", flags[0], "there is no such option", meant + SEE_HELP)
    args.overrides = [*args.overrides, *unknown]  # argparse stops at the first option between overrides
    if args.config_name or args.config_path:
        problem = "this program has one configuration, train.yaml"
        remedy = "Add your own files with --config-dir FOLDER."
        raise ConfigError("option", "--config-name/--config-path", problem, remedy)
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError("--config-dir", args.config_dir, "no such folder", "Give an existing folder.")
    return args


def _flags(args: argparse.Namespace) -> list[str]:
    """The options of Hydra, given back in an order that its parser takes."""
    flags = [f"--{name}" for name in ("multirun", "resolve", "run", "hydra_help") if getattr(args, name)]
    flags = [flag.replace("_", "-") for flag in flags]
    flags += ["--shell-completion"] if args.shell_completion else []
    for name in ("cfg", "package", "config_dir"):
        if getattr(args, name):
            flags += [f"--{name.replace('_', '-')}", getattr(args, name)]
    return flags + ([f"--info={args.info}"] if args.info else [])


def _normalised(override: str) -> str:
    """`recipe=NAME` is taken as `+recipe=NAME`: Hydra wants the plus as no recipe is chosen by default."""
    return "+" + override if override.startswith("recipe=") else override


def with_group(overrides: list[str]) -> list[str]:
    """model.path=FOLDER means model=huggingface, unless a model was chosen."""
    starts = [override.partition("=")[0] for override in overrides]
    return ["model=huggingface", *overrides] if "model.path" in starts and "model" not in starts else overrides


def _parse_overrides(overrides: list[str]) -> list[Override]:
    parsed = []
    for override in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([override])
        except HydraException as error:
            detail = str(error).splitlines()[0]
            remedy = f"Write NAME=VALUE, and quote a value that has spaces, commas or brackets. {SEE_HELP}"
            raise ConfigError("override", override, detail, remedy) from error
    return parsed


def _values(override: Override) -> list[Any]:
    """The single value, or each value of a sweep; none for what only Hydra can enumerate."""
    if override.is_delete():
        return []
    if not override.is_sweep_override():
        return [override.value()]
    if override.is_choice_sweep() and override.value_type.name != "GLOB_CHOICE_SWEEP":
        return [Override._convert_value(value) for value in override.sweep_iterator()]
    return []


def _check_override(override: Override, config_dir: str | None) -> None:
    """The key exists, and a value that must be one of several names is one of them."""
    key = override.key_or_group
    if override.is_hydra_override():
        return
    values = _values(override)
    shown = override.input_line.partition("=")[2] if override.input_line else "..."
    names = list(config.choices(key, config_dir))
    if names:
        for value in values:
            _check_group(key, value, names, config_dir)
        if override.is_add() and key != "recipe":
            remedy = f"Write it without the plus: {key}={shown}."
            raise ConfigError(f"+{key}", shown, "this group is chosen already", remedy)
    elif not fields.is_known(key):
        raise fields.unknown(key, shown)
    elif override.is_add() and not override.is_delete():
        remedy = f"Write it without the plus: {key}={shown}."
        raise ConfigError(f"+{key}", shown, "this setting exists already", remedy)
    for value in values:
        fields.check_choice(key, value)


def _check_group(group: str, value: object, names: list[str], config_dir: str | None) -> None:
    if value in names or (value is None and group == "experiment") or isinstance(value, dict):
        return
    remedy = f"{fields.closest(str(value), names)}Choices:\n{config.describe(group, config_dir)}"
    raise ConfigError(group, value, "not one of the choices", remedy)


def _refuse_sweeps(parsed: list[Override]) -> None:
    for override in parsed:
        if override.is_sweep_override():
            shown = (override.input_line or "").partition("=")[2]
            remedy = f"Add -m to run one job for each, or write {override.key_or_group}=[{shown}] for a list."
            raise ConfigError(override.key_or_group, shown, "several values for one run", remedy)


def _checked(overrides: list[str], config_dir: str | None) -> RunConfig:
    run = config.compose(overrides, config_dir)
    check_inputs(run)
    return run


def _combinations(parsed: list[Override]) -> list[list[str]]:
    try:
        return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    except HydraException as error:
        raise ConfigError("override", "...", str(error).splitlines()[0], SEE_HELP) from error


def _read_sweep(
    parsed: list[Override], flags: list[str], overrides: list[str], config_dir: str | None
) -> Command:
    """Every combination is checked; the sweep's folder is fixed here, so that it can be read afterwards."""
    jobs = _combinations(parsed)
    sweep = config.sweep_settings(jobs[0], config_dir)
    argv = _sweep_arguments(flags, overrides, sweep.folder)
    if not sweep.basic:
        return Command(argv, multirun=True, sweep_dir=sweep.folder, jobs_known=False)
    if sweep.params:
        jobs = _combinations([*_parse_overrides([_normalised(p) for p in sweep.params]), *parsed])
    runs = [_checked(job, config_dir) for job in jobs]
    _refuse_shared_folders(runs, jobs)
    return Command(argv, multirun=True, sweep_dir=sweep.folder, runs=runs)


def _sweep_arguments(flags: list[str], overrides: list[str], folder: Path) -> list[str]:
    if (folder / "jobs").exists():
        remedy = "Choose another folder, or leave hydra.sweep.dir out."
        raise ConfigError("hydra.sweep.dir", folder, "holds another sweep", remedy)
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    flags = flags if "--multirun" in flags else ["--multirun", *flags]
    kept = [override for override in overrides if not override.startswith("hydra.sweep.dir=")]
    return [*flags, *kept, f"hydra.sweep.dir='{quoted}'"]


def _refuse_shared_folders(runs: list[RunConfig], jobs: list[list[str]]) -> None:
    seen: dict[Path, list[str]] = {}
    for run, job in zip(runs, jobs, strict=True):
        folder = config.run_folder(run).absolute()
        if folder in seen:
            problem = f"two jobs of the sweep would share it ({' '.join(seen[folder])}; {' '.join(job)})"
            raise ConfigError("run_dir", folder, problem, "Leave run_dir out, and name each value once.")
        seen[folder] = job


def help_text() -> str:
    """What --help prints."""
    others = [group for group in config.groups() if group not in ("recipe",)]
    choices = "\n".join(f"  {group + '=':<14}{', '.join(config.choices(group))}" for group in others)
    return f"""Turn a BF16 language model into an NVFP4 checkpoint that keeps its accuracy.

Runs teacher, ptq, qad, evaluate, export and report in one run folder, and continues where it stopped. With
qad.loss=sampled or top_k, a stage logits before qad writes what the teacher says to disk, and qad loads no teacher.

usage: python -m nemo_qad.train [-m] +recipe=NAME [GROUP=NAME ...] [SETTING=VALUE ...]

recipes (one is needed, recipe=NAME works too):
{config.describe("recipe")}

groups:
{choices}

examples:
  python -m nemo_qad.train +recipe=four_over_six
  python -m nemo_qad.train +recipe=four_over_six experiment=quick qad.steps=40
  python -m nemo_qad.train -m +recipe=max,mse,four_over_six          one job for each recipe
  python -m nemo_qad.train +recipe=max 'stages=[teacher,ptq,evaluate]'
  python -m nemo_qad.train +recipe=four_over_six qad.loss=sampled    QAD without the teacher in memory
  python -m nemo_qad.train +recipe=max model.path=FOLDER             a Hugging Face checkpoint, as it is
  python -m nemo_qad.train +recipe=max parallel=local_tp2            starts two ranks here; so does torchrun or srun
  python -m nemo_qad.train +recipe=max --cfg job                     shows every setting, runs nothing

options:
  -m, --multirun      one job for each combination of comma-separated values
  -c, --cfg job       print the composed configuration and stop
  --config-dir DIR    a folder of your own with recipe/NAME.yaml, model/NAME.yaml and so on
  --hydra-help        the other options, which are Hydra's

exit status: 0 done, 1 a run failed, 2 the configuration is wrong,
75 saved and stopped by SIGTERM or SIGUSR1 (the same command continues), 130 the same by Ctrl-C"""
