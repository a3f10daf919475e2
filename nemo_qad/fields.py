"""The schema's fields by dotted name: which exist, what each expects, and what a misspelling meant."""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from nemo_qad.errors import ConfigError
from nemo_qad.schema import RunConfig


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Field names of a dataclass with their types, `| None` removed."""
    hints = typing.get_type_hints(cls)
    return {field.name: _without_none(hints[field.name]) for field in fields(cls)}


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


@cache
def leaves() -> dict[str, Any]:
    """Every dotted name that holds a value, with its type: `{"qad.steps": int, ...}`."""

    def walk(cls: type, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, hint in _hints(cls).items():
            nested = isinstance(hint, type) and is_dataclass(hint)
            found |= walk(hint, f"{prefix}{name}.") if nested else {prefix + name: hint}
        return found

    return walk(RunConfig, "")


def is_known(key: str) -> bool:
    """Whether `key` is a value or a node of the schema."""
    return key in leaves() or any(leaf.startswith(key + ".") for leaf in leaves())


def expected(key: str) -> str:
    """What a value of `key` looks like, for a message: "a whole number", "one of max, mse, ..."."""
    hint = leaves().get(key)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        names = ",".join(m.name for m in item) if issubclass(item, Enum) else "{modules: GLOB, format: bf16}"
        return f"a list such as {key}=[{names}]"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "single values, " + key + ".NAME=VALUE") if hint else f"{key}.NAME=VALUE"


def given(key: str, overrides: list[str]) -> str:
    """The value that the command line gives for `key`, "..." when it comes from a file."""
    for override in reversed(overrides):
        name, _, value = override.lstrip("+~").partition("=")
        if name == key:
            return value
    return "..."


def unknown(key: str, value: object) -> ConfigError:
    """The error for a dotted name that the schema does not have, with the nearest names it has."""
    parent, _, name = key.rpartition(".")
    prefix = parent + "." if parent else ""
    siblings = _children(prefix)
    same_name = [leaf for leaf in leaves() if leaf.rpartition(".")[2] == name][:3]
    meant = same_name if not parent else []
    meant = meant or [prefix + near for near in difflib.get_close_matches(name, siblings, n=1)]
    meant = meant or difflib.get_close_matches(key, list(leaves()), n=1) or same_name
    if meant:
        remedy = f"Did you mean {' or '.join(meant)}?"
    elif siblings:
        remedy = f"{parent or 'The top level'} has: {', '.join(siblings)}."
    else:
        remedy = "python -m nemo_qad.train --cfg job +recipe=max shows all settings."
    return ConfigError(key, value, "there is no such setting", remedy)


def _children(prefix: str) -> list[str]:
    names = [leaf[len(prefix) :].split(".")[0] for leaf in leaves() if leaf.startswith(prefix)]
    return list(dict.fromkeys(names))


def closest(word: str, known: list[str]) -> str:
    """The sentence "Did you mean X?", or nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]}? " if near else ""


def check_choice(key: str, value: object) -> None:
    """Raises ConfigError when `key` takes one of a set of names and `value` is not among them."""
    hint = leaves().get(key)
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        values = value if isinstance(value, list) else []
    else:
        item, values = hint, [value]
    if not (isinstance(item, type) and issubclass(item, Enum)):
        return
    names = [member.name for member in item]
    for each in values:
        if each not in names:
            remedy = f"{closest(str(each), names)}Choices: {', '.join(names)}."
            raise ConfigError(key, each, "not one of the choices", remedy)
