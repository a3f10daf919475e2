"""Every shipped configuration composes, what is computed has a hash, and a sweep goes on after a failure."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_qad import command_line, config, fields, train
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.schema import Format, ModelConfig, RunConfig, Stage
from nemo_qad.sharding import data_parallel_size, sequence_multiple
from nemo_qad.validation import validate

RECIPES = sorted(config.choices("recipe"))
RELEASED = ["model=nemotron_3_5_lightning_30b_a3b", "data=indexed", "data.path=/data"]
# What a file needs beside itself to be valid: long QAD needs a model with long positions.
COMPANIONS = {
    "data=indexed": ["data.path=/data"],
    "calibration=published": RELEASED,
    "qad=published_32k": RELEASED,
    "qad=published_522k": [*RELEASED, "parallel=b300_qad_522k", "evaluation.sequence_length=4096"],
    "qad=published_constant": RELEASED,
    "parallel=b300_ptq": [*RELEASED, "qad=published_32k"],
    "parallel=b300_qad_32k": [*RELEASED, "qad=published_32k"],
    "parallel=b300_qad_522k": [*RELEASED, "qad=published_522k", "evaluation.sequence_length=4096"],
    "experiment=lightning_32k": ["data.path=/data"],
}


def shipped() -> list[str]:
    names = [f"{group}={name}" for group in config.groups() for name in config.choices(group)]
    assert len(names) >= 20
    # model=huggingface needs a folder: tests/integration/test_from_folder.py
    return [name for name in names if not name.startswith("recipe=") and name != "model=huggingface"]


@pytest.fixture(scope="module")
def models() -> dict[str, RunConfig]:
    names = [name for name in config.choices("model") if name != "huggingface"]
    return {name: config.compose(["+recipe=max", f"model={name}"]) for name in names}


@pytest.mark.parametrize("choice", shipped())
def test_every_shipped_file_composes(choice: str) -> None:
    run = config.compose(["+recipe=four_over_six", *COMPANIONS.get(choice, []), choice])
    assert isinstance(run, RunConfig)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_every_model(recipe: str, models: dict[str, RunConfig]) -> None:
    chosen = config.compose([f"+recipe={recipe}"]).recipe
    assert chosen.name == recipe
    assert chosen.description
    for name, run in models.items():
        assert run.model.name == name
        validate(replace(run, recipe=chosen))


def test_released_models_have_the_published_shape() -> None:
    model = config.compose(["+recipe=max", *RELEASED]).model
    assert [model.hybrid_pattern.count(layer) for layer in "ME*"] == [23, 23, 6]
    assert (model.mtp_pattern, model.max_position_embeddings) == ("*E", 1_048_576)
    inner = model.mamba.num_heads * model.mamba.head_dim
    groups = model.mamba.num_groups * model.mamba.state_dim
    assert 2 * inner + 2 * groups + model.mamba.num_heads == 10_304  # rows of Mamba's in_proj
    experts = model.hybrid_pattern.count("E") * model.moe.num_experts
    assert experts * 2 * model.hidden_size * model.moe.ffn_hidden_size == 29_374_808_064


def test_published_settings() -> None:
    run = config.compose(["+recipe=four_over_six", "experiment=lightning_32k", "data.path=/data"])
    assert run.qad.steps * run.qad.global_batch_size * run.qad.sequence_length == 419_430_400
    assert data_parallel_size(run.parallel) == 8
    assert (run.calibration.num_samples, run.calibration.sequence_length) == (1000, 32_768)


def test_the_model_chooses_calibration_and_the_command_line_wins() -> None:
    tiny = config.compose(["+recipe=max"])
    assert (tiny.calibration.num_samples, tiny.calibration.sequence_length) == (128, 128)
    assert config.compose(["+recipe=max", "calibration.num_samples=7"]).calibration.num_samples == 7
    released = config.compose(["+recipe=max", *RELEASED, "calibration.num_samples=7"])
    assert (released.calibration.num_samples, released.calibration.sequence_length) == (7, 32_768)
    assert config.compose(["+recipe=max", *RELEASED, "calibration=tiny"]).calibration.num_samples == 128


def test_hash_names_what_is_computed() -> None:
    base = config.compose(["+recipe=max"])
    digest = config.config_hash(base)
    assert re.fullmatch(r"[0-9a-f]{12}", digest)
    for other in ("output_dir=x", "cache_dir=x", "run_dir=x", "threads=2", "stages=[teacher]"):
        assert config.config_hash(config.compose(["+recipe=max", other])) == digest, other
    for other in ("seed=2", "qad.steps=241", "recipe.mamba=bf16", "data.seed=5"):
        assert config.config_hash(config.compose(["+recipe=max", other])) != digest, other


def test_the_stage_logits_may_stand_alone_for_sparse_losses_only() -> None:
    assert config.compose(["+recipe=max"]).stages == list(Stage)
    assert config.compose(["+recipe=max", "qad.loss=kl", "stages=[logits,qad]"]).stages == [Stage.logits, Stage.qad]
    for loss in ("top_k", "sampled"):
        run = config.compose(["+recipe=max", f"qad.loss={loss}", "stages=[logits]", "qad.sparse_values=4096"])
        assert run.stages == [Stage.logits] and run.qad.loss.is_sparse


def test_the_teacher_may_be_elsewhere_where_only_its_file_is_read() -> None:
    given = ["+recipe=max", "teacher.path=/nowhere"]
    command_line.read([*given, "qad.loss=top_k", "stages=[qad,export,report]"])
    command_line.read([*given, "qad.loss=top_k", "stages=[logits,qad]", "qad.teacher_logits=/tmp"])
    for loss, stages in (("kl", "[qad]"), ("top_k", "[logits]"), ("top_k", "[qad,evaluate]")):
        with pytest.raises(ConfigError, match=r"teacher\.path=/nowhere: no such folder"):
            command_line.read([*given, f"qad.loss={loss}", f"stages={stages}"])


def test_yaml_gives_the_same_run_back() -> None:
    rule = "recipe.extra_rules=[{modules: '*.mixer', format: fp8}]"
    run = config.compose(["+recipe=four_over_six", "qad.learning_rate=1.5e-5", "stages=[ptq,qad]", rule])
    assert run.stages == [Stage.ptq, Stage.qad]
    assert run.recipe.extra_rules[0].format is Format.fp8
    again = config.from_yaml(config.to_yaml(run))
    assert again == run
    assert config.config_hash(again) == config.config_hash(run)


@pytest.mark.parametrize("damage", ["a: [", "just text", "[1, 2]", "", "qad: {steps: 3}", "qda: {}"])
def test_damaged_yaml_is_refused(damage: str) -> None:
    with pytest.raises(ConfigError):
        config.from_yaml(damage)


# (overrides, words that the message must have). max is given where no recipe is.
def test_no_recipe_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([]) == 2
    message = capsys.readouterr().err
    for name, description in config.descriptions("recipe").items():
        assert re.search(rf"^  {name} +{re.escape(description)}$", message, re.MULTILINE)
    assert "python -m nemo_qad.train +recipe=four_over_six" in message


def test_help_names_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    for group in config.groups():
        assert all(name in text for name in config.choices(group)), group


def test_a_mistake_is_reported_before_torch_is_imported() -> None:
    program = "import sys; from nemo_qad.train import main; s = main(); print(s, 'torch' in sys.modules)"
    for arguments in ([], ["+recipe=max", "qad.steps=0"], ["-m", "+recipe=max,mse", "qad.steps=0"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", program, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # CPU time, as other work on the machine must not fail this.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
        assert result.stdout.strip() == "2 False"
        assert result.stderr.count("error: ") == 1


def test_exit_status_of_the_command() -> None:
    command = [sys.executable, "-m", "nemo_qad.train", "recipe=max", "qad.stepz=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: qad.stepz=1: there is no such setting. Did you mean qad.steps?\n"


def test_recipe_with_and_without_plus_are_the_same() -> None:
    with_plus, without = command_line.read(["+recipe=mse"]), command_line.read(["recipe=mse"])
    assert with_plus.runs == without.runs
    assert with_plus.argv == without.argv == ["+recipe=mse"]


def test_options_may_stand_anywhere() -> None:
    for words in (["-m", "recipe=max,mse", "seed=1"], ["recipe=max,mse", "-m", "seed=1"]):
        command = command_line.read(words)
        assert command.multirun
        assert [run.recipe.name for run in command.runs] == ["max", "mse"]


def test_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    mine = tmp_path / "recipe" / "mine.yaml"
    mine.write_text("name: mine\ndescription: own\nmamba: bf16\n")
    command = command_line.read(["--config-dir", str(tmp_path), "recipe=mine"])
    assert command.runs[0].recipe.mamba is Format.bf16
    mine.write_text("name: mine\ndescription: own\nmambo: bf16\n")
    with pytest.raises(ConfigError, match=r"mambo.*Did you mean recipe\.mamba\?"):
        command_line.read(["--config-dir", str(tmp_path), "recipe=mine"])
    mine.write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"recipe\.description"):
        command_line.read(["--config-dir", str(tmp_path), "recipe=mine"])


def test_a_sweep_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pipeline(run: RunConfig, overrides: list[str]) -> dict[str, object]:
        if run.recipe.name == "max":
            raise UserError("disk: full. Free 3 GB.")
        if run.recipe.name == "mse":
            raise ValueError("a defect")
        return {"recipe": run.recipe.name, "seed": run.seed, "given": overrides}

    monkeypatch.setattr(train, "_pipeline", lambda: pipeline)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "it's, a (sweep)"
    quoted = str(folder).replace("'", "\\'")
    arguments = ["-m", "recipe=max,mse,four_over_six", f"hydra.sweep.dir='{quoted}'"]
    assert train.main(arguments) == 1
    records = [json.loads((folder / "jobs" / f"{n:03d}.json").read_text()) for n in range(3)]
    assert [record["status"] for record in records] == ["failed", "failed", "done"]
    assert records[0]["error"] == "disk: full. Free 3 GB."
    assert records[1]["error"] == "ValueError: a defect"
    assert records[2]["summary"] == {"recipe": "four_over_six", "seed": 1234, "given": ["+recipe=four_over_six"]}
    assert records[2]["overrides"] == ["+recipe=four_over_six"]
    assert "2 of 3 jobs failed" in (message := capsys.readouterr().err)
    assert message.count("Traceback") == 1  # of the defect alone
    assert train.main(arguments) == 2  # the folder holds a sweep
    assert train.main(["-m", "recipe=four_over_six", "seed=1,2"]) == 0


def test_statuses_of_a_single_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(error: BaseException | None) -> int:
        def pipeline(run: RunConfig, overrides: list[str]) -> dict[str, object]:
            if error is not None:
                raise error
            return {}

        monkeypatch.setattr(train, "_pipeline", lambda: pipeline)
        return train.main(["recipe=max"])

    monkeypatch.chdir(tmp_path)
    assert ends(None) == 0
    assert ends(UserError("file: gone. Bring it back.")) == 1
    assert capsys.readouterr().err == "error: file: gone. Bring it back.\n"
    assert ends(ValueError("a defect")) == 1
    assert "Traceback" in capsys.readouterr().err
    assert ends(KeyboardInterrupt()) == 130
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "outputs/tiny_hybrid-max-" in message


def test_sequence_multiple() -> None:
    single = config.compose(["+recipe=max"]).parallel
    expected = {(1, 1): 1, (1, 4): 4, (2, 4): 8, (4, 2): 8, (4, 3): 24, (8, 8): 64}
    for (context, tensor), multiple in expected.items():
        assert sequence_multiple(replace(single, context=context, tensor=tensor)) == multiple


def test_scan_that_needs_64_bit_addresses_is_refused() -> None:
    run = config.compose(["+recipe=four_over_six", *RELEASED, "qad=published_32k"])
    longer = replace(run, qad=replace(run.qad, sequence_length=210_944))
    with pytest.raises(ConfigError, match=r"qad\.sequence_length=210944.*parallel\.context of at least 2"):
        validate(longer)


def test_every_setting_says_what_it_expects() -> None:
    assert "model.moe.top_k" in fields.leaves()
    assert fields.expected("qad.keep") == "one of best, last"
    assert all(fields.expected(name) for name in fields.leaves())
    assert isinstance(config.compose(["+recipe=max"]).model, ModelConfig)
