"""The errors of the layers as a person meets them: rows, the printed table, the report's section, the picture."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console
from run_folders import write_run

from nemo_qad.evaluation import plots
from nemo_qad.evaluation.layer_errors import FILE, PICTURE, LayerErrors, LinearError, read_errors, write_errors
from nemo_qad.evaluation.layer_plots import draw_layers
from nemo_qad.evaluation.layer_table import MOST_ROWS, layer_table
from nemo_qad.evaluation.report import write_report

PLAIN = LinearError("", "mamba", "nvfp4", 1000, 20.0, 19.9, 1e-6, 1.15, 0.4, None, None)
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
DEEP, IDLE = "decoder.layers.7.mixer.out_proj", "decoder.layers.1.mlp.experts.local_experts.5"


def model(pattern: str = "ME*ME", experts: int = 8) -> LayerErrors:
    """Errors as a healthy model has them, with an idle expert, number 5, in each layer of experts."""
    made, dice = [], random.Random(1)

    def add(name: str, part: str, **changes: object) -> None:
        db = 20 + 0.1 * dice.gauss(0, 1)
        made.append(replace(PLAIN, name=name, part=part, sqnr_db=db, block_sqnr_db=db - 0.1, **changes))  # type: ignore[arg-type]

    for layer, kind in enumerate(pattern):
        place = f"decoder.layers.{layer}."
        for leaf in ("mixer.in_proj", "mixer.out_proj") if kind == "M" else ():
            add(place + leaf, "mamba")
        for fc in ("linear_fc1", "linear_fc2") if kind == "E" else ():
            for expert in range(experts):
                tokens = 0 if expert == 5 else 90 + expert
                name = f"{place}mlp.experts.local_experts.{expert}.{fc}"
                add(name, "routed_experts", tokens=tokens, idle=tokens == 0)
            add(f"{place}mlp.shared_experts.{fc}", "shared_experts")
    add("output_layer", "output_layer")
    return LayerErrors(made)


def changed(errors: LayerErrors, name: str, **changes: object) -> LayerErrors:
    assert any(line.name == name for line in errors.linears)
    return LayerErrors(replace(line, **changes) if line.name == name else line for line in errors.linears)  # type: ignore[arg-type]


def printed(errors: LayerErrors) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False, force_terminal=False)
    layer_table(errors, Path("outputs/run") / FILE, console=console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]


def test_a_row_is_a_linear_or_the_experts_of_a_layer():
    errors = changed(model(), f"{IDLE}.linear_fc2", sqnr_db=18.0, block_sqnr_db=17.5, mse=4e-6, mse_ratio=2.0)
    assert len(errors.rows) == 2 * 2 + 2 * (1 + 2) + 1
    row = errors.rows[0]
    assert row.label == "1.experts.5.fc2 of 8" and row.worst.level_db == 17.5 and len(row.linears) == 16
    assert 19.9 < row.median_db < 20.1 and row.num_idle == 1
    assert row.mse_ratio == pytest.approx((15 * 1e-6 + 4e-6) / (15 * 1e-6 / 1.15 + 2e-6))
    assert [r.median_db for r in errors.rows if r.worst.expert is None] == [None] * 9


@pytest.mark.parametrize(
    "changes", [{"sqnr_db": 12.0, "block_sqnr_db": 12.1}, {"sqnr_db": 22.0, "block_sqnr_db": 3.0}]
)
def test_the_layer_that_hurts_is_first_everywhere(tmp_path, changes):
    run_dir = write_run(tmp_path / "run")
    errors = changed(model(PATTERN, 128), DEEP, **changes)
    write_errors(run_dir / FILE, errors)
    assert [line.name for line in errors.standing_out] == [DEEP]
    assert cells(printed(errors))[1][0] == "7.mixer.out_proj"
    text = write_report(run_dir).read_text(encoding="utf-8").split("## Which layer hurts")[1]
    assert text.lstrip().startswith("**1 linear stands out") and "7.mixer.out_proj.**" in text
    assert cells(text.splitlines())[2][:2] == ["7.mixer.out_proj", "nvfp4"]


@pytest.mark.parametrize("pattern", ["ME*ME", PATTERN, "E" * 120])
def test_the_table_fits_80_columns_and_a_screen(pattern):
    errors = model(pattern, 128)
    errors = LayerErrors(replace(line, format="fp8") if line.layer == 1 else line for line in errors.linears)
    lines = printed(errors)
    table = [line for line in lines if line[:1] in "|+"]
    assert len(table) == min(MOST_ROWS, len(errors.rows)) + 4 and len(lines) == len(table) + 3
    assert max(map(len, table)) <= 80 and "\x1b" not in "".join(lines) and "".join(lines).isascii()
    experts = 128 * pattern.count("E")
    assert f"{len(errors.linears)} linears: " in lines[-2]
    assert f"idle experts: {pattern.count('E')} of {experts}" in lines[-2]
    assert FILE in lines[-1]


def test_columns_without_a_number_are_left_out():
    errors = LayerErrors(replace(line, format="fp8", block_sqnr_db=None, mse_ratio=None, share_of_fours=None)
                         for line in model("MM").linears)  # fmt: skip
    assert cells(printed(errors))[0] == ["layer.linear", "SQNR"]
    assert printed(LayerErrors([])) == []


def test_errors_come_back_from_their_file(tmp_path):
    errors = changed(model(), "output_layer", sqnr_db=None, block_sqnr_db=None, mse=0.0, mse_ratio=None)
    write_errors(tmp_path / "layers.json", errors)
    json.loads((tmp_path / "layers.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert read_errors(tmp_path / "layers.json").linears == errors.linears
    assert errors.rows[-1].label == "output_layer"


ODD_TYPES = '{"linears": [{"name": "a", "part": 3, "format": "b", "values": 1, "mse": 1}]}'


@pytest.mark.parametrize(
    "content", ["", "{half", "[]", "{}", '{"linears": 3}', '{"linears": [1, {"name": "a"}]}', ODD_TYPES]
)
def test_a_report_of_an_older_or_damaged_run(tmp_path, content):
    run_dir = write_run(tmp_path / "run")
    if content:
        (run_dir / FILE).parent.mkdir()
        (run_dir / FILE).write_text(content, encoding="utf-8")
    assert PICTURE not in {str(path.relative_to(run_dir)) for path in plots.write_plots(run_dir)}
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "Not measured in this run folder" in text.split("## Which layer hurts")[1].split("##")[0]


def test_report_names_idle_experts_and_shows_the_picture(tmp_path):
    run_dir = write_run(tmp_path / "run")
    write_errors(run_dir / FILE, model(PATTERN, 16))
    plots.write_plots(run_dir)
    text = write_report(run_dir).read_text(encoding="utf-8").split("## Which layer hurts")[1].split("\n## ")[0]
    assert text.lstrip().startswith("**No linear stands out**") and f"]({PICTURE})" in text
    layers = PATTERN.count("E")
    assert f"No calibration token reached {layers} of {16 * layers} routed experts" in text
    named = re.search(r"\): (1\.experts\.5, 3\.experts\.5, [^\n]*) and (\d+) more", text)
    assert named and named[1].count("experts") + int(named[2]) == layers
    assert len(cells(text.splitlines())) == 22 and "more rows are better" in text
    everyone = [replace(line, idle=False if line.idle else line.idle) for line in model(PATTERN, 16).linears]
    write_errors(run_dir / FILE, LayerErrors(everyone))
    assert f"reached each of the {16 * layers} routed" in write_report(run_dir).read_text(encoding="utf-8")


def test_picture_is_the_same_bytes_twice_and_shows_other_numbers_otherwise(tmp_path):
    for name, errors in {
        "a": model(), "b": model(), "c": changed(model(), f"{IDLE}.linear_fc1", sqnr_db=15.0),
        "d": changed(model(), f"{IDLE}.linear_fc1", block_sqnr_db=10.0), "e": model(PATTERN, 32),
    }.items():  # fmt: skip
        draw_layers(tmp_path / f"{name}.png", errors)
    found = {name: (tmp_path / f"{name}.png").read_bytes() for name in "abcde"}
    assert found["a"] == found["b"] and len(set(found.values())) == 4
    for name in "ae":
        height, width, _ = matplotlib.image.imread(tmp_path / f"{name}.png").shape
        assert width == 1800 and 800 < height < 1500
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_layers(tmp_path / "f.png", LayerErrors([]))


@pytest.mark.parametrize("changes", [{"sqnr_db": None, "block_sqnr_db": None}, {"mse_ratio": None}])
def test_picture_of_numbers_that_are_missing(tmp_path, changes):
    draw_layers(tmp_path / "a.png", LayerErrors(replace(line, **changes) for line in model("M*-E").linears))
    assert (tmp_path / "a.png").stat().st_size > 10_000
