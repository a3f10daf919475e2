"""The wheel holds the configuration files, and a program in another folder works from the wheel alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("conf", "nemo_qad", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    build += ["--disable-pip-version-check", "--wheel-dir", str(out), str(source)]
    result = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_every_source_and_yaml_is_inside(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    yamls = {f"nemo_qad/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "nemo_qad").rglob("*.py")}
    assert len(yamls) > 15
    assert (yamls | sources | {"nemo_qad/conf/__init__.py"}) - names == set()
    assert [name for name in names if name.startswith(("tests/", "conf/"))] == []


@pytest.mark.parametrize("arguments", [["--cfg", "job", "+recipe=max"], ["--help"]])
def test_it_runs_from_another_folder(wheel: Path, tmp_path: Path, arguments: list[str]) -> None:
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    program = "import sys; from nemo_qad import __file__, train; print(__file__); sys.exit(train.main())"
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    where, _, shown = result.stdout.partition("\n")
    assert where == str(unpacked / "nemo_qad" / "__init__.py")
    assert "four_over_six" in shown if arguments == ["--help"] else "name: tiny_hybrid" in shown
