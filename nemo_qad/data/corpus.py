"""Text that every machine with Python has: the standard library, split into training and held-out modules.

A module is a top-level package or file; `_pyfoo`, `_foo` and `foo` count as one, because they are two
implementations of one thing. The held-out part consists of whole modules, and no run of `WINDOW` consecutive
non-blank lines of the held-out text occurs anywhere in the training text: modules that share much with
others are never held out, and what little is shared (licence headers, common idioms) is cut out of the
held-out text.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import random
import sys
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_qad.errors import ConfigError, UserError

WINDOW = 4  # consecutive non-blank lines, stripped, that make two passages the same
MAX_SHARED = 0.2  # a module that shares more of its windows than this with others is not held out
MIN_FILES = 100
MIN_BYTES = 1_000_000
MIN_PIECE_LINES = 6  # shorter remains of a held-out text are dropped

# Test suites, other people's packages, generated tables, and pictures drawn in code.
# fmt: off
SKIPPED_FOLDERS = frozenset({
    "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo", "tkinter",
    "ensurepip", "lib-dynload", "site-packages", "dist-packages", "__pycache__",
})
# fmt: on
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class SourceFile:
    """A file of the standard library: its path relative to the library, with /, and its size in bytes."""

    name: str
    size: int

    @property
    def module(self) -> str:
        top = self.name.split("/")[0].removesuffix(".py")
        return top.removeprefix("_py") if top.startswith("_py") else top.lstrip("_") or top


@dataclass(frozen=True)
class Corpus:
    """Documents of both parts; `digest` is the SHA-256 of every source text that went in."""

    train: list[str]
    held_out: list[str]
    held_out_modules: list[str]
    digest: str


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def list_files(folder: Path | None = None) -> list[SourceFile]:
    """The .py files that serve as text, sorted by name.

    Raises:
        UserError: the folder holds too little text (a zipped or stripped Python).
    """
    folder = stdlib_folder() if folder is None else folder
    files = sorted(_walk(folder), key=lambda file: file.name)
    num_bytes = sum(file.size for file in files)
    if len(files) < MIN_FILES or num_bytes < MIN_BYTES:
        raise UserError(
            f"data.source=stdlib: Python's standard library at {folder} has {len(files)} usable .py files, "
            f"{num_bytes} bytes; at least {MIN_FILES} files and {MIN_BYTES} bytes are needed. This Python is "
            "zipped, stripped or compiled only: use a full Python, or data.source=indexed with your own text."
        )
    return files


def _walk(folder: Path) -> Iterator[SourceFile]:
    for where, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(SKIPPED_PREFIXES)]
        for name in names:
            if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES):
                path = Path(where, name)
                yield SourceFile(path.relative_to(folder).as_posix(), path.stat().st_size)


def fingerprint(files: list[SourceFile]) -> str:
    """A quick identity of the text, hex: the Python build and every file's name and size, no content.

    Contents are not read, so an edit that keeps a file's size is not seen; `Corpus.digest` records what was
    really read. Modification times are left out, because reinstalling the same Python changes them.
    """
    what = [platform.python_implementation(), sys.version, *(f"{file.name}:{file.size}" for file in files)]
    return hashlib.sha256("\n".join(what).encode()).hexdigest()


def read(folder: Path, files: list[SourceFile], *, held_out_fraction: float, seed: int) -> Corpus:
    """Reads, splits and cleans the text. Each file is one document, its docstrings another.

    Args:
        held_out_fraction: share of the bytes that whole modules hold back, 0 < share <= 0.5.
        seed: chooses the modules; the same Python and seed give the same split.
    Raises:
        ConfigError: `held_out_fraction` is out of range, or no module is small enough for it, or what is held out is
            training text too.
    """
    texts = {file.name: text for file in files if (text := _read_text(folder / file.name)) is not None}
    files = [file for file in files if file.name in texts]
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{text}\0".encode("utf-8", "replace"))
    held_out_modules = choose_held_out(files, texts, held_out_fraction, seed)
    train: list[str] = []
    held_out: list[str] = []
    for file in files:
        part = held_out if file.module in held_out_modules else train
        part.extend(text for text in (texts[file.name], docstrings(texts[file.name])) if text.strip())
    seen: set[tuple[str, ...]] = set()
    for text in train:
        seen.update(windows(text))
    held_out = [piece for text in held_out for piece in cut_shared(text, seen)]
    if not held_out:
        problem = "no held-out text is left, as all of it is in the training text too"
        raise ConfigError("data.held_out_fraction", held_out_fraction, problem, "Give 0.05, or another data.seed.")
    return Corpus(train, held_out, sorted(held_out_modules), digest.hexdigest())


def _read_text(path: Path) -> str | None:
    """The file's text by its declared encoding, or None where it has none that can be read."""
    try:
        with tokenize.open(path) as stream:
            return stream.read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def docstrings(source: str) -> str:
    """All docstrings of a source text, dedented, in order, separated by blank lines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    return "\n\n".join(_docstrings_of(tree)) + "\n"


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    # Docstrings sit in statements only; not walking into expressions makes this several times faster.
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstrings_of(child)


def windows(text: str) -> Iterable[tuple[str, ...]]:
    """Every run of `WINDOW` consecutive non-blank lines, stripped."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    return zip(*(lines[offset:] for offset in range(WINDOW)), strict=False)


def choose_held_out(files: list[SourceFile], texts: dict[str, str], held_out_fraction: float, seed: int) -> set[str]:
    """Names of the modules to hold out: drawn at random until their bytes make up the share asked for."""
    if not 0 < held_out_fraction <= 0.5:
        raise ConfigError(
            "data.held_out_fraction", held_out_fraction, "not a share of the text", "Give 0 < share <= 0.5."
        )
    sizes: Counter[str] = Counter()
    module_windows: dict[str, set[tuple[str, ...]]] = {}
    for file in files:
        sizes[file.module] += file.size
        module_windows.setdefault(file.module, set()).update(windows(texts[file.name]))
    owners = Counter(window for found in module_windows.values() for window in found)
    target = held_out_fraction * sum(sizes.values())
    chosen: set[str] = set()
    taken = 0
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    for module in order:
        found = module_windows[module]
        num_shared = sum(owners[window] > 1 for window in found)
        if found and num_shared <= MAX_SHARED * len(found) and taken + sizes[module] <= 1.1 * target:
            chosen.add(module)
            taken += sizes[module]
        if taken >= 0.9 * target:
            return chosen
    if not chosen:
        raise ConfigError("data.held_out_fraction", held_out_fraction, "smaller than the smallest module", "Give 0.05.")
    return chosen


def cut_shared(text: str, seen: set[tuple[str, ...]]) -> list[str]:
    """The text without the lines of any window in `seen`: the pieces between them, each one document."""
    lines = text.splitlines(keepends=True)
    filled = [number for number, line in enumerate(lines) if line.strip()]
    shared: set[int] = set()
    for first, window in enumerate(windows(text)):
        if window in seen:
            shared.update(filled[first : first + WINDOW])
    pieces: list[list[str]] = [[]]
    for number, line in enumerate(lines):
        if number in shared:
            pieces.append([])
        else:
            pieces[-1].append(line)
    if not shared:
        return [text]
    return ["".join(p).strip("\n") + "\n" for p in pieces if sum(bool(x.strip()) for x in p) >= MIN_PIECE_LINES]
