"""Prepares the data of a run: training and held-out text as .bin/.idx pairs, and the tokenizer's files.

Text from the standard library is prepared once and cached under `cache_dir/data-KEY`. The key covers what
made it: the Python build, the names and sizes of the source files, the settings, the vocabulary size and
`FORMAT`. Source files are not read again to find the cached data (that would take longer than all the rest),
so an edit inside the standard library that keeps a file's size goes unnoticed by the key; `digest`, taken
over the bytes that were written, always tells what a run really read. A cached folder is used when the
sizes in its manifest match; a folder that is damaged is made again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nemo_qad.data import corpus, generated, indexed, tokenizer
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.files import flush
from nemo_qad.schema import DataConfig, Source

FORMAT = 3  # raise it when anything here changes what is written
MANIFEST = "manifest.json"
WORD_REPEATS = 2000  # how often the tokenizer sees each word of the answers, and how many documents
MAX_CHECKED_TOKENS = 1 << 30  # ids checked up front; every batch is checked again when it is read

Progress = Callable[[str], None]


@dataclass(frozen=True)
class PreparedData:
    """What the other stages need to know of the data.

    `digest`: SHA-256, hex, that changes whenever the tokens or the tokenizer do. `statistics`: JSON-able.
    """

    folder: Path
    tokenizer_folder: Path
    train_prefix: Path
    held_out_prefix: Path
    vocab_size: int
    digest: str
    statistics: dict[str, Any]


def prepare(data: DataConfig, vocab_size: int, cache_dir: Path, progress: Progress) -> PreparedData:
    """Prepares the data, or finds it prepared.

    Args:
        vocab_size: V of the model; for `source=stdlib` also the size of the tokenizer to train.
        progress: called with a short text before each step that takes long.
    Raises:
        ConfigError: a setting is out of range. UserError: the text or its files are missing or damaged.
    """
    if data.source == Source.indexed:
        return _open_indexed(data, vocab_size)
    if not 0 <= data.generated_fraction <= 0.9:
        raise ConfigError(
            "data.generated_fraction", data.generated_fraction, "not a share of the tokens", "Give 0 to 0.9."
        )
    files = corpus.list_files()
    key = cache_key(data, vocab_size, corpus.fingerprint(files))
    folder = cache_dir / f"data-{key}"
    if folder.exists():
        if problem := _damage(folder):
            progress(f"Cached data {folder} is damaged ({problem}): preparing it again")
            shutil.rmtree(folder)
        else:
            return _open_cached(folder, vocab_size)
    _make(folder, data, vocab_size, files, progress)
    return _open_cached(folder, vocab_size)


def _make(folder: Path, data: DataConfig, vocab_size: int, files: list[corpus.SourceFile], progress: Progress) -> None:
    """Writes into a hidden folder beside `folder`, then renames it: `folder` is whole or absent."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(work, data, vocab_size, files, progress)
            os.chmod(work, 0o755)  # mkdtemp makes it private; a shared cache is read by others
            _publish(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cache_dir={folder.parent}: cannot write the prepared data there ({error}). Free some space "
            "(about 20 MB), or name another folder with cache_dir."
        ) from error


def cache_key(data: DataConfig, vocab_size: int, fingerprint: str) -> str:
    """Twelve hex digits over everything that makes the data; `fingerprint` is that of the source files."""
    what = {
        "format": FORMAT,
        "text": fingerprint,
        "vocab_size": vocab_size,
        "held_out_fraction": data.held_out_fraction,
        "generated_fraction": data.generated_fraction,
        "seed": data.seed,
    }
    if data.tokenizer:
        what["tokenizer"] = _digest([Path(data.tokenizer) / "tokenizer.json"])
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _write(folder: Path, data: DataConfig, vocab_size: int, files: list[corpus.SourceFile], progress: Progress) -> None:
    progress(f"Reading {len(files)} files of Python's standard library")
    text = corpus.read(corpus.stdlib_folder(), files, held_out_fraction=data.held_out_fraction, seed=data.seed)
    bpe, end = _tokenizer(folder / "tokenizer", data, vocab_size, text.train, progress)
    progress("Tokenising")
    natural = tokenizer.encode(bpe, text.train, end)
    num_natural = sum(map(len, natural))
    wanted = round(num_natural * data.generated_fraction / (1 - data.generated_fraction))
    made = generated_tokens(bpe, wanted, data.seed, end)
    held_out = tokenizer.encode(bpe, text.held_out, end)
    progress("Writing .bin and .idx files")
    indexed.write(folder / "train", [*natural, *made], vocab_size)
    indexed.write(folder / "held_out", held_out, vocab_size)
    statistics = {
        "source": str(data.source.value),
        "num_source_files": len(files),
        "source_sha256": text.digest,
        "held_out_modules": text.held_out_modules,
        "num_train_documents": len(natural) + len(made),
        "num_train_tokens": num_natural + sum(map(len, made)),
        "num_generated_tokens": sum(map(len, made)),
        "num_held_out_documents": len(held_out),
        "num_held_out_tokens": sum(map(len, held_out)),
        "tokenizer_size": bpe.get_vocab_size(),
    }
    _write_manifest(folder, statistics)


def _tokenizer(
    folder: Path, data: DataConfig, vocab_size: int, texts: list[str], progress: Progress
) -> tuple[Tokenizer, int]:
    """The tokenizer, trained or the one that data.tokenizer names, and the id that ends a document; in `folder` too."""
    if data.tokenizer:
        source = Path(data.tokenizer)
        bpe = tokenizer.load(source)
        end = tokenizer.end_of_document(bpe, source)
        if end is None:
            raise UserError(f"data.tokenizer={source}: tokenizer_config.json names no eos_token, which ends documents")
        if bpe.get_vocab_size() > vocab_size:
            problem = f"smaller than the {bpe.get_vocab_size()} ids of {source / 'tokenizer.json'}"
            raise ConfigError("model.vocab_size", vocab_size, problem, "Use the tokenizer of this model.")
        tokenizer.copy_files(source, folder)
        return bpe, end
    progress(f"Training a tokenizer with {vocab_size} ids")
    # Often enough that each word and sign becomes one token before the vocabulary is full.
    words = [" " + " ".join(generated.VOCABULARY)] * WORD_REPEATS
    stream = generated.training_documents(data.seed)
    bpe = tokenizer.train([*texts, *words, *itertools.islice(stream, WORD_REPEATS)], vocab_size)
    generated.check_words(bpe, vocab_size)
    tokenizer.save(bpe, folder)
    own_end = bpe.token_to_id(tokenizer.END_OF_DOCUMENT)
    assert own_end is not None
    return bpe, own_end


def generated_tokens(bpe: Tokenizer, num_tokens: int, seed: int, end: int) -> list[np.ndarray]:
    """Encoded training documents made by rule, at least `num_tokens` tokens in all (none for 0)."""
    stream = generated.training_documents(seed)
    made: list[np.ndarray] = []
    while num_tokens > 0:
        batch = tokenizer.encode(bpe, [next(stream) for _ in range(1000)], end)
        for document in batch:
            if num_tokens <= 0:
                break
            made.append(document)
            num_tokens -= len(document)
    return made


def _write_manifest(folder: Path, statistics: dict[str, Any]) -> None:
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    digest = _digest(folder / name for name in names)
    sizes = {name: (folder / name).stat().st_size for name in names}
    for name in names:
        flush(folder / name)
    manifest = {"format": FORMAT, "digest": digest, "sizes": sizes, "statistics": statistics}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    flush(folder / MANIFEST)


def _publish(work: Path, folder: Path) -> None:
    try:
        os.rename(work, folder)
    except OSError:
        # Another process was quicker. What it wrote came from the same inputs, so it serves as well.
        if not folder.exists() or _damage(folder):
            raise
    flush(folder.parent)


def _damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, by its manifest's sizes; None where nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = dict(manifest["sizes"])
        digest, statistics = manifest["digest"], manifest["statistics"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error!r}"
    if not isinstance(digest, str) or not isinstance(statistics, dict) or not sizes:
        return f"{MANIFEST} is incomplete"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _open_cached(folder: Path, vocab_size: int) -> PreparedData:
    manifest = json.loads((folder / MANIFEST).read_text())
    return PreparedData(
        folder=folder,
        tokenizer_folder=folder / "tokenizer",
        train_prefix=folder / "train",
        held_out_prefix=folder / "held_out",
        vocab_size=vocab_size,
        digest=manifest["digest"],
        statistics=manifest["statistics"],
    )


def _open_indexed(data: DataConfig, vocab_size: int) -> PreparedData:
    """Checks a folder of the user's own pairs and points there; nothing is copied or cached."""
    if not data.path:
        raise ConfigError(
            "data.path",
            data.path,
            "missing for data.source=indexed",
            "Name a folder with train.bin, train.idx, held_out.bin, held_out.idx and tokenizer.json.",
        )
    folder = Path(data.path)
    if not folder.is_dir():
        raise UserError(f"data.path={folder} is not a folder: name the one that holds train.bin and the rest.")
    if not (folder / "tokenizer.json").is_file() and not list(folder.glob("*.bin")):
        raise UserError(
            f"data.path={folder} holds no .bin files and no tokenizer.json. It must hold train.bin, train.idx, "
            "held_out.bin, held_out.idx and tokenizer.json; other layouts are not supported."
        )
    pairs = {name: indexed.check(folder / name) for name in ("train", "held_out")}
    bpe = tokenizer.load(folder)
    if bpe.get_vocab_size() > vocab_size:
        raise ConfigError(
            "model.vocab_size",
            vocab_size,
            f"smaller than the {bpe.get_vocab_size()} ids of {folder / 'tokenizer.json'}",
            "Use the tokenizer that the model was made with.",
        )
    for pair in pairs.values():
        indexed.check_ids(pair, vocab_size, MAX_CHECKED_TOKENS)
    statistics = {"source": str(data.source.value), "tokenizer_size": bpe.get_vocab_size()}
    for name, pair in pairs.items():
        statistics[f"num_{name}_documents"] = len(pair.lengths)
        statistics[f"num_{name}_tokens"] = pair.num_tokens
    files = [indexed.path_of(folder / name, ending) for name in pairs for ending in (".bin", ".idx")]
    return PreparedData(
        folder=folder,
        tokenizer_folder=folder,
        train_prefix=folder / "train",
        held_out_prefix=folder / "held_out",
        vocab_size=vocab_size,
        digest=_digest([*files, folder / "tokenizer.json"]),
        statistics=statistics,
    )


def _digest(paths: Iterable[Path]) -> str:
    """SHA-256 over names, sizes and contents; of files over 4 GiB, the first MiB of every 64 MiB."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        step = 1 << 20 if size <= 4 << 30 else 64 << 20
        with path.open("rb") as stream:
            for start in range(0, size, step):
                stream.seek(start)
                digest.update(stream.read(1 << 20))
    return digest.hexdigest()
