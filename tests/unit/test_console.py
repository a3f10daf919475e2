"""What is printed: widths, plain text where there is no terminal, one last line."""

from __future__ import annotations

import io
import itertools
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from run_folders import write_run

from nemo_qad.evaluation import console as screen

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def plain() -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, force_terminal=False)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def ticking(monkeypatch) -> None:
    """A clock that is a quarter of a second later every time it is read."""
    moments = itertools.count(0, 0.25)
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: next(moments)))


@pytest.mark.usefixtures("ticking")
def test_loop_without_a_terminal_prints_ten_lines_and_no_control_codes(plain):
    with screen.progress("qad", 400, console=plain) as bar:
        for _ in range(400):
            bar.advance(tokens=2048, kl=0.00412345, held_out_kl=float("nan"))
    lines = _text(plain).splitlines()
    assert len(lines) == 10 and "\x1b" not in _text(plain) and "\r" not in _text(plain)
    assert lines[0] == "qad 40/400  KL 0.00412  8,192 tok/s  1:30 left"
    assert lines[-1] == "qad 400/400  KL 0.00412  8,192 tok/s  took 1:40"


@pytest.mark.parametrize(
    ("total", "start", "expected"), [(3, 0, [1, 2, 3]), (100, 85, [90, 100]), (0, 0, [])]
)
def test_loops_that_are_short_resumed_or_empty(plain, total, start, expected):
    with screen.progress("teacher", total, start, console=plain) as bar:
        for _ in range(total - start):
            bar.advance(loss=1.0)
    assert [int(line.split()[1].split("/")[0]) for line in _text(plain).splitlines()] == expected


@pytest.mark.usefixtures("ticking")
def test_rate_rests_on_the_steps_that_took_tokens(plain):
    with screen.progress("evaluate", 4, console=plain) as bar:
        for tokens in (1000, 0, 0, 2000):
            bar.advance(tokens=tokens)
    first, second, _, last = _text(plain).splitlines()
    assert first == "evaluate 1/4  4,000 tok/s  0:01 left" and "tok/s" not in second
    assert last == "evaluate 4/4  6,000 tok/s  took 0:01"


@pytest.mark.usefixtures("ticking")
def test_loop_on_a_terminal_is_one_bar_that_fits():
    terminal = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)
    with screen.progress("teacher", 1200, 600, console=terminal) as bar:
        for _ in range(599):
            bar.advance(tokens=204800, kl=0.00412345, held_out_kl=0.004)
    seen = [CONTROL.sub("", line) for line in re.split(r"[\r\n]+", _text(terminal))]
    whole = "1199/1200 KL 0.00412  held-out 0.00400  819,200 tok/s  0:00 left"
    assert any(line.startswith("teacher ") and line.rstrip().endswith(whole) for line in seen)
    assert max(map(len, seen)) <= 80


def test_final_table_fits_80_columns_and_ends_with_one_line(tmp_path, plain):
    run_dir = write_run(tmp_path / "run")
    screen.final_table(run_dir, console=plain)
    lines = _text(plain).rstrip("\n").splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1] == f"Done: checkpoint in {run_dir}/export. Next: read {run_dir}/report.md"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["recovery, median"] == ["", "", "", "96.0 %", "99.5 %"]
    assert cells["copy"] == ["90.0 %", "86.4 %", "89.5 %", "96.0 %", "99.5 %"]
    assert cells["held-out KL to BF16"][:3] == ["0", "0.00800", "0.00200"]
    assert "-: left out of the recovery" in _text(plain)
    assert "QAD took away 75 % of the damage" in _text(plain)
    assert _text(plain).isascii()


def test_final_table_of_a_run_without_qad_and_of_an_empty_folder(tmp_path, plain):
    run_dir = write_run(tmp_path / "run", qad=False)
    screen.final_table(run_dir, console=plain)
    last = _text(plain).rstrip("\n").splitlines()[-1]
    assert last.startswith(
        "Not in this run: qad, export. Next: python -m nemo_qad.train +recipe=four_over_six"
    )
    assert "Run QAD" in _text(plain)
    screen.final_table(tmp_path, console=plain)
    assert "finished so far: nothing" in _text(plain)


def test_coverage_table_shows_every_row_within_80_columns(plain):
    long = "with a name that is longer than any that recipes have so far, by far"
    kept = {"kind": "weights", "format": "nvfp4"}
    rows = [{"part": f"part {n} {long}", **kept, "expected": n, "matched": n} for n in range(3)]
    screen.coverage_table([*rows, {"part": "kv cache", "matched": 2}], console=plain)
    lines = _text(plain).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"kv cache\s+\| -\s+\| -\s+\|\s+- \|\s+2 \|", _text(plain))


def test_say_neither_wraps_nor_reads_markup(capsys):
    line = "[bold]" + "x" * 200 + " stages=[ptq,qad]"
    screen.say(line)
    assert capsys.readouterr().out == line + "\n"
