"""The standard library as text: what is taken, how it is split, what is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_qad.data import corpus
from nemo_qad.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def stdlib() -> corpus.Corpus:
    return corpus.read(corpus.stdlib_folder(), corpus.list_files(), held_out_fraction=0.05, seed=7)


def write_library(folder: Path, num_modules: int = 120, shared: str = "") -> None:
    for module in range(num_modules):
        lines = "\n".join(f"value_{module}_{line} = {module * line}  # {'x' * 60}" for line in range(120))
        (folder / f"mod{module:03}.py").write_text(f'"""Module {module}."""\n{shared}{lines}\n')


def test_no_run_of_lines_is_in_both_parts(stdlib: corpus.Corpus) -> None:
    train = {window for text in stdlib.train for window in corpus.windows(text)}
    held_out = [window for text in stdlib.held_out for window in corpus.windows(text)]
    assert len(held_out) > 1000
    assert not train.intersection(held_out)


def test_held_out_share_is_near_what_is_asked(stdlib: corpus.Corpus) -> None:
    files = corpus.list_files()
    held = sum(file.size for file in files if file.module in stdlib.held_out_modules)
    assert 0.04 < held / sum(file.size for file in files) < 0.06


def test_no_file_of_a_held_out_module_is_trained_on(stdlib: corpus.Corpus) -> None:
    train = set(stdlib.train)
    for file in corpus.list_files():
        source = (corpus.stdlib_folder() / file.name).read_text(errors="replace")
        if source.strip() and file.module in stdlib.held_out_modules:
            assert source not in train


def test_tests_and_installed_packages_are_left_out() -> None:
    names = [file.name for file in corpus.list_files()]
    assert "argparse.py" in names and "asyncio/events.py" in names
    assert not [name for name in names if "site-packages" in name or name.startswith(("test/", "encodings/"))]


def test_the_split_is_a_function_of_the_seed(tmp_path: Path) -> None:
    write_library(tmp_path)
    files = corpus.list_files(tmp_path)
    first, again, other = (corpus.read(tmp_path, files, held_out_fraction=0.1, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.held_out_modules != other.held_out_modules
    assert first.digest == other.digest


def test_shared_header_is_cut_from_held_out_text_only(tmp_path: Path) -> None:
    licence = "".join(f"# licence line {line}\n" for line in range(8))
    write_library(tmp_path, shared=licence)
    text = corpus.read(tmp_path, corpus.list_files(tmp_path), held_out_fraction=0.1, seed=3)
    assert any("licence line" in document for document in text.train)
    assert not any("licence line" in document for document in text.held_out)
    assert all("value_" in document for document in text.held_out if "Module" not in document)


def test_a_module_that_is_mostly_a_copy_is_never_held_out(tmp_path: Path) -> None:
    write_library(tmp_path)
    (tmp_path / "copied.py").write_text((tmp_path / "mod001.py").read_text())
    files = corpus.list_files(tmp_path)
    texts = {file.name: (tmp_path / file.name).read_text() for file in files}
    chosen = set().union(*(corpus.choose_held_out(files, texts, 0.3, seed) for seed in range(20)))
    assert len(chosen) > 100
    assert not chosen & {"copied", "mod001"}


def test_two_implementations_of_one_thing_are_one_module() -> None:
    names = ("decimal.py", "_pydecimal.py", "_strptime.py", "asyncio/events.py", "__future__.py")
    modules = [corpus.SourceFile(name, 1).module for name in names]
    assert modules == ["decimal", "decimal", "strptime", "asyncio", "future__"]


def test_docstrings_are_dedented_and_in_order() -> None:
    source = '"""One."""\nif True:\n    class A:\n        """Two\n\n        more."""\n'
    source += '        def f(self):\n            "Three"\n'
    assert corpus.docstrings(source) == "One.\n\nTwo\n\nmore.\n\nThree\n"
    assert corpus.docstrings("def broken(:") == ""


def test_fingerprint_sees_names_and_sizes() -> None:
    files = [corpus.SourceFile("a.py", 1), corpus.SourceFile("b.py", 2)]
    prints = {
        corpus.fingerprint(files),
        corpus.fingerprint([files[0], corpus.SourceFile("b.py", 3)]),
        corpus.fingerprint([files[0], corpus.SourceFile("c.py", 2)]),
        corpus.fingerprint(files[:1]),
    }
    assert len(prints) == 4


def test_zipped_python_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0 usable \.py files.*data\.source=indexed"):
        corpus.list_files(tmp_path / "python312.zip")


@pytest.mark.parametrize("fraction", [0.0, -0.1, 0.6, 1e-5])
def test_bad_held_out_fraction_is_refused(tmp_path: Path, fraction: float) -> None:
    write_library(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.held_out_fraction"):
        corpus.read(tmp_path, corpus.list_files(tmp_path), held_out_fraction=fraction, seed=0)
