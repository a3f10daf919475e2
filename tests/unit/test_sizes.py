"""The size of an export from its configuration, against published figures and against a file that was written."""

from __future__ import annotations

import pytest

from nemo_qad import export
from nemo_qad.config import compose
from nemo_qad.huggingface.names import carried, shapes
from nemo_qad.huggingface.sizes import export_size

LIGHTNING = "nemotron_3_5_lightning_30b_a3b"


@pytest.mark.parametrize(
    ("recipe", "gigabytes"), [("four_over_six", 21.15), ("mamba_fp8_max", 21.54), (None, 65.83)]
)
def test_exports_of_the_30b_model_have_their_published_sizes(recipe: str | None, gigabytes: float) -> None:
    run = compose([f"+recipe={recipe or 'max'}", f"model={LIGHTNING}"])
    size = export_size(run.model, run.recipe if recipe else None)
    assert size.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_the_prediction_block_has_its_published_size() -> None:
    model = compose(["+recipe=max", f"model={LIGHTNING}"]).model
    assert len([name for m in carried(model) for name in m.hf]) == 270
    assert export_size(model, None).num_values == 32_913_266_240 and len(shapes(model)) == 6_243
    assert export_size(model, None).num_tensors == 6_513


def test_the_command_prints_them_and_where_ranks_would_cut_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", f"model={LIGHTNING}", "+recipe=four_over_six"]
    assert export.main([*arguments, "--tensor-parallel", "8"]) == 0
    output = capsys.readouterr().out
    assert "21.15" in output and "65.83" in output and "mamba_fp8_max" not in output
    assert "1856 columns over 8 ranks are 232 each, which cuts a block of 16" in output
    assert export.main([*arguments, "--tensor-parallel", "4"]) == 0
    assert "cuts a block" not in capsys.readouterr().out
    assert max(len(line) for line in output.splitlines() if line.startswith(("+", "|"))) <= 80


def test_a_model_that_does_not_exist_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--size", "model=nothing"]) == 2
    assert "model" in capsys.readouterr().err
