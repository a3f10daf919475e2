"""Hydra and OmegaConf end here: YAML and command-line overrides in, a validated `RunConfig` out.

Imports no torch, so a mistake is reported in a second or two, also on a login node.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_qad import fields
from nemo_qad.described import fill
from nemo_qad.errors import ConfigError
from nemo_qad.schema import RunConfig
from nemo_qad.validation import validate

CONF_MODULE = "nemo_qad.conf"
CONFIG_NAME = "train"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# What a run computes does not depend on these, so they may differ between two starts of one run.
NOT_HASHED = ("run_dir", "output_dir", "cache_dir", "stages", "threads", "resume")


def register() -> None:
    """Makes the schema and the YAML files known to Hydra; idempotent.

    An installed package has its YAML files as `nemo_qad.conf`. A source tree that is only on PYTHONPATH
    has them in conf/ beside the package, so that module is made from there.
    """
    ConfigStore.instance().store(name="schema", node=RunConfig)
    if CONF_MODULE in sys.modules or importlib.util.find_spec(CONF_MODULE) is not None:
        return
    folder = Path(__file__).resolve().parent.parent / "conf"
    spec = importlib.util.spec_from_file_location(
        CONF_MODULE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "train.yaml").is_file():
        raise ConfigError("conf", folder, "the configuration files are missing", "Install nemo_qad again.")
    sys.modules[CONF_MODULE] = importlib.util.module_from_spec(spec)


def conf_folder() -> Path:
    """The folder that holds train.yaml and the groups."""
    register()
    spec = importlib.util.find_spec(CONF_MODULE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def choices(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """Names that `group` may take, with their files; `config_dir` is a folder of the user's own."""
    folders = ([Path(config_dir)] if config_dir else []) + [conf_folder()]  # the later wins, as in Hydra
    return {file.stem: file for folder in folders for file in sorted((folder / group).glob("*.yaml"))}


def groups() -> list[str]:
    """The groups of conf/, in alphabetical order."""
    return sorted(folder.name for folder in conf_folder().iterdir() if any(folder.glob("*.yaml")))


def descriptions(group: str, config_dir: str | None = None) -> dict[str, str]:
    """One line for each choice of `group`: its `description`, or its first comment."""
    lines = {}
    for name, file in choices(group, config_dir).items():
        text = file.read_text(encoding="utf-8")
        comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")]
        comments = [line for line in comments if not line.startswith("@package")]
        values = yaml.safe_load(text)
        described = values.get("description") if isinstance(values, dict) else None
        lines[name] = str(described or (comments[0] if comments else ""))
    return lines


@contextmanager
def _composer() -> Iterator[None]:
    """Hydra's compose API over conf/, leaving any Hydra application around it as it was."""
    register()
    instance = GlobalHydra.instance()
    outer = instance.hydra
    instance.clear()
    try:
        with initialize_config_module(CONF_MODULE, version_base="1.3"):
            yield
    finally:
        instance.hydra = outer


def _hydra_config(overrides: list[str], config_dir: str | None, *, with_hydra: bool = False) -> DictConfig:
    extra = [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []
    try:
        return hydra_compose(CONFIG_NAME, [*overrides, *extra], return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise _translated(error, overrides) from error


def compose(overrides: list[str], config_dir: str | None = None) -> RunConfig:
    """The validated configuration for command-line overrides such as `["+recipe=max", "qad.steps=20"]`.

    `config_dir` is a folder of the user's own files, searched beside conf/. Raises ConfigError.
    """
    with _composer():
        return to_run_config(_hydra_config(overrides, config_dir), overrides)


@dataclass(frozen=True)
class SweepSettings:
    """Hydra's multirun settings: `basic` is its own sweeper, which knows all its jobs beforehand."""

    folder: Path
    basic: bool
    params: list[str]


def sweep_settings(overrides: list[str], config_dir: str | None = None) -> SweepSettings:
    """What `overrides` make of hydra.sweep and hydra.sweeper. Raises ConfigError."""
    with _composer():
        settings = _hydra_config(overrides, config_dir, with_hydra=True).hydra
        params = [f"{key}={value}" for key, value in (settings.sweeper.get("params") or {}).items()]
        basic = settings.sweeper.get("_target_") == BASIC_SWEEPER
        return SweepSettings(Path(str(settings.sweep.dir)), basic, params)


def to_run_config(cfg: DictConfig, overrides: Sequence[str] = (), *, frozen: bool = False) -> RunConfig:
    """Merges `cfg` onto the strict schema and validates it; `frozen`: as a run folder has it, with everything said.

    Raises ConfigError.
    """
    run = _to_schema(cfg, overrides, frozen=frozen)
    validate(run)
    return run


def _to_schema(cfg: DictConfig, overrides: Sequence[str], *, frozen: bool) -> RunConfig:
    """Unknown keys, wrong types and missing values end here.

    Hydra composes onto the schema already, but an added key (`+typo=1`) survives as a phantom attribute:
    only a second merge of the plain values shows it.
    """
    try:
        plain = OmegaConf.to_container(cfg)
        assert isinstance(plain, dict)
        plain = plain if frozen else fill(cast(dict[str, Any], plain), overrides)
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        raise _translated(error, []) from error
    assert isinstance(merged, DictConfig)
    missing = sorted(OmegaConf.missing_keys(merged), key=lambda key: (key != "recipe", key))
    if missing:
        raise _missing(missing)
    return cast(RunConfig, OmegaConf.to_object(merged))


def _missing(keys: list[str]) -> ConfigError:
    if keys[0] == "recipe":
        return no_recipe()
    group = keys[0].split(".")[0]
    remedy = f"Set it with {keys[0]}=VALUE"
    if keys[0] == group and choices(group):
        remedy = f"Pick one with {group}=NAME: {', '.join(choices(group))}"
    elif choices(group):
        remedy += f", or in the file that {group}=NAME picks"
    return ConfigError(keys[0], "???", "no value was given", remedy + ".")


def no_recipe(config_dir: str | None = None) -> ConfigError:
    """The message that lists the recipes."""
    lines = describe("recipe", config_dir)
    return ConfigError(
        "recipe",
        "???",
        "no recipe was picked",
        f"Pick one:\n{lines}\nfor example: python -m nemo_qad.train +recipe=four_over_six",
    )


def describe(group: str, config_dir: str | None = None) -> str:
    """An indented table of a group's choices and what each is."""
    lines = descriptions(group, config_dir)
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in lines.items())


def _translated(error: BaseException, overrides: list[str]) -> ConfigError:
    """Hydra's and OmegaConf's exceptions in this program's words: the key, the value, the remedy."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    summary = summary.rstrip(".")
    if not isinstance(cause, OmegaConfBaseException):
        remedy = "See python -m nemo_qad.train --help."
        if "submitit" in " ".join(overrides):
            remedy = "Submitting to Slurm from here needs pip install 'nemo_qad[slurm]'."
        return ConfigError("overrides", " ".join(overrides), summary, remedy)
    key = str(cause.full_key or cause.key or "configuration")
    if fields.is_known(key):
        problem = str(cause.msg or cause).splitlines()[0].rstrip(".")
        return ConfigError(key, fields.given(key, overrides), problem, f"Give {fields.expected(key)}.")
    value = fields.given(key, overrides)
    if "not in" in str(cause) or "not a valid" in str(cause):
        return fields.unknown(key, value)
    return ConfigError(key, value, summary, "See python -m nemo_qad.train --help.")


def config_hash(run: RunConfig) -> str:
    """12 hex digits that name what a run computes; see NOT_HASHED for what is left out."""
    values = {key: value for key, value in to_plain(run).items() if key not in NOT_HASHED}
    text = json.dumps(values, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_folder(run: RunConfig) -> Path:
    """Where the run lives: `run_dir`, or OUTPUT_DIR/MODEL-RECIPE-HASH."""
    if run.run_dir:
        return Path(run.run_dir)
    return Path(run.output_dir) / f"{run.model.name}-{run.recipe.name}-{config_hash(run)}"


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass of the schema as JSON-able dictionaries, enums by name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return cast(dict[str, Any], plain(asdict(config)))


def to_yaml(run: RunConfig) -> str:
    """The frozen configuration as it is written in a run folder."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(run)))


def from_yaml(text: str, *, check: bool = True) -> RunConfig:
    """The inverse of `to_yaml`. Raises ConfigError.

    Args:
        check: that its values can work together; not where it is only compared with another.
    """
    try:
        cfg = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError("config.yaml", "...", f"not YAML ({error})", "Restore the file.") from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError("config.yaml", "...", "not a mapping", "Restore the file.")
    return to_run_config(cfg, frozen=True) if check else _to_schema(cfg, (), frozen=True)
