"""A model that its folder describes: config.json fills what model=huggingface leaves open. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_qad.errors import ConfigError, UserError
from nemo_qad.huggingface.architectures import model_of_folder
from nemo_qad.schema import MISSING, ModelConfig

FREE = {"name", "precision", "init_std", "vocab_divisible_by", "source", "path"}  # not the checkpoint's to say
FREE |= {"moe.aux_loss_coeff", "moe.bias_update_rate"}


def fill(plain: dict[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The composed configuration with the model, the teacher and the tokenizer of model.path, where that is given.

    Args:
        overrides: of the command line, which tell a value that was given from the schema's default.

    Raises:
        ConfigError: a model that has a shape already, or a field that contradicts config.json.
    """
    given = plain.get("model")
    if not isinstance(given, dict):
        return plain
    if given.get("path") is None:
        if given.get("name") == MISSING:  # model=huggingface, the only one without a name of its own
            remedy = "Give the folder of a Hugging Face checkpoint."
            raise ConfigError("model.path", MISSING, "no value was given", remedy)
        return plain
    path = str(given["path"])
    try:
        described = asdict(model_of_folder(Path(path)))
    except UserError as error:
        raise ConfigError("model.path", path, str(error), "Give the folder of a supported checkpoint.") from None
    defaults = asdict(ModelConfig())
    spoken = {override.partition("=")[0].lstrip("+").removeprefix("model.") for override in overrides}
    unsaid = {name for name, value in leaves(given) if value in (MISSING, _lookup(defaults, name))}
    open_ = unsaid - spoken
    for name, value in leaves(given):
        said = _lookup(described, name)
        unties = name == "tied_output" and not value  # an output layer of its own, which may be quantised
        if name not in open_ | FREE and str(value) != str(said) and not unties:
            problem = f"model.path={path} has {said}"
            remedy = "Leave it out, and choose the group with model=huggingface."
            raise ConfigError(f"model.{name}", value, problem, remedy)
    model = _merged(given, described, open_, "")
    teacher, data = dict(plain["teacher"]), dict(plain["data"])
    if teacher.get("path") is None:
        teacher["path"] = path
    if data.get("tokenizer") is None and str(data.get("source")) in ("stdlib", "Source.stdlib"):
        data["tokenizer"] = teacher["path"]
    return {**plain, "model": model, "teacher": teacher, "data": data}


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value)"""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _lookup(node: dict[str, Any], name: str) -> Any:
    value: Any = node
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _merged(given: dict[str, Any], described: dict[str, Any], open_: set[str], prefix: str) -> dict[str, Any]:
    merged = dict(given)
    for name, value in described.items():
        if isinstance(value, dict):
            merged[name] = _merged(given[name], value, open_, f"{prefix}{name}.")
        elif prefix + name in open_ and prefix + name not in FREE - {"name", "init_std"}:
            merged[name] = value
    return merged
