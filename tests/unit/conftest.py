"""Prepared data of a small part of the standard library, made once for all unit tests that need text."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_qad.data import corpus
from nemo_qad.data.prepare import PreparedData, prepare
from nemo_qad.schema import DataConfig, Source

VOCAB_SIZE = 1024


def small_data_config(**changes: object) -> DataConfig:
    return DataConfig(**{"name": "stdlib", "source": Source.stdlib, "held_out_fraction": 0.1, **changes})


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first files of the standard library that fill one and a half megabytes, files of medium size."""
    folder = tmp_path_factory.mktemp("library")
    num_bytes = 0
    for file in corpus.list_files():
        if 2_000 < file.size < 20_000 and num_bytes < 1_500_000:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.name).write_bytes((corpus.stdlib_folder() / file.name).read_bytes())
            num_bytes += file.size
    return folder


@pytest.fixture(scope="session")
def small_prepared(small_library: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_folder", lambda: small_library)
        return prepare(small_data_config(), VOCAB_SIZE, tmp_path_factory.mktemp("cache"), lambda text: None)
