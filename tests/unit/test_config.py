"""Every shipped configuration composes; every kind of mistake ends in one message that names the remedy."""

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
    "qad=published_522k": RELEASED,
    "qad=published_constant": RELEASED,
    "parallel=b300_ptq": [*RELEASED, "qad=published_32k"],
    "parallel=b300_qad_32k": [*RELEASED, "qad=published_32k"],
    "parallel=b300_qad_522k": [*RELEASED, "qad=published_522k", "evaluation.sequence_length=4096"],
    "experiment=lightning_32k": ["data.path=/data"],
}


def shipped() -> list[str]:
    names = [f"{group}={name}" for group in config.groups() for name in config.choices(group)]
    assert len(names) >= 20
    return [name for name in names if not name.startswith("recipe=")]


@pytest.fixture(scope="module")
def models() -> dict[str, RunConfig]:
    return {name: config.compose(["+recipe=max", f"model={name}"]) for name in config.choices("model")}


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
MISTAKES: list[tuple[list[str], list[str]]] = [
    (["recipe=maxx"], ["recipe=maxx", "Did you mean max?", "four_over_six"]),
    (["qad.lerning_rate=1e-5"], ["qad.lerning_rate=1e-5", "Did you mean qad.learning_rate?"]),
    (["qda.steps=3"], ["qda.steps", "Did you mean qad.steps?"]),
    (["steps=3"], ["steps=3", "qad.steps", "teacher.steps"]),
    (["+typo=1"], ["typo=1", "no such setting"]),
    (["++qad.typo=1"], ["qad.typo=1", "no such setting"]),
    (["+qad.steps=20"], ["+qad.steps", "without the plus"]),
    (["+model=tiny_hybrid"], ["+model", "without the plus"]),
    (["model=tiny"], ["model=tiny", "Choices", "tiny_hybrid"]),
    (["qad.steps=many"], ["qad.steps=many", "whole number"]),
    (["qad.steps=1.5"], ["qad.steps=1.5", "whole number"]),
    (["qad.learning_rate=fast"], ["qad.learning_rate=fast", "a number"]),
    (["qad.steps=null"], ["qad.steps=null", "whole number"]),
    (["qad=3"], ["qad=3", "published_32k"]),
    (["deterministic=perhaps"], ["deterministic=perhaps", "true or false"]),
    (["model.precision=fp16"], ["model.precision=fp16", "bf16", "fp32"]),
    (["recipe.mamba=fp4"], ["recipe.mamba=fp4", "nvfp4"]),
    (["stages=[train]"], ["stages=train", "teacher", "report"]),
    (["stages=[]"], ["stages=[]", "at least one"]),
    (["stages=[ptq,ptq]"], ["stages=ptq", "twice"]),
    (["stages=ptq"], ["stages=ptq", "a list such as"]),
    (["stages=[logits]"], ["stages=[logits]", "nothing to do", "qad.loss=linear_kl", "qad.loss=top_k"]),
    (["qad.loss=topk"], ["qad.loss=topk", "top_k", "linear_kl"]),
    (["qad.loss=modelopt", "qad.reverse=true"], ["qad.reverse=true", "qad.loss=modelopt", "qad.loss=kl"]),
    (["qad.loss=top_k", "qad.reverse=true"], ["qad.reverse=true", "qad.loss=top_k", "qad.loss=kl"]),
    (["qad.loss=top_k", "qad.sparse_values=4097"], ["qad.sparse_values=4097", "model.vocab_size=4096"]),
    (["qad.loss=sampled", "qad.sparse_values=4097"], ["qad.sparse_values=4097", "model.vocab_size=4096"]),
    (["qad.sparse_values=0"], ["qad.sparse_values=0", "at least 1"]),
    (["qad.loss_memory_mib=0"], ["qad.loss_memory_mib=0", "at least 1"]),
    (["qad.teacher_logits=/tmp"], ["qad.teacher_logits=/tmp", "qad.loss=linear_kl", "qad.loss=sampled"]),
    (["qad.loss=top_k", "qad.teacher_logits=''"], ["qad.teacher_logits=''", "leave it out"]),
    (["qad.loss=top_k", "qad.teacher_logits=/nowhere"], ["qad.teacher_logits=/nowhere", "no such folder"]),
    (["qad.steps=20,30"], ["qad.steps=20,30", "Add -m"]),
    (["qad.steps=[1,2"], ["qad.steps=[1,2", "quote"]),
    (["qad.steps"], ["qad.steps", "NAME=VALUE"]),
    (["~qad"], ["qad=", "published_32k"]),
    (["--recipe", "max"], ["--recipe", "+recipe=VALUE"]),
    (["--multrun"], ["--multrun", "Did you mean --multirun?"]),
    (["--config-name=other"], ["--config-name", "--config-dir"]),
    (["--config-dir=/nowhere"], ["--config-dir=/nowhere", "no such folder"]),
    (["hydra/launcher=nowhere"], ["hydra/launcher=nowhere", "--help"]),
    (["qad.steps=0"], ["qad.steps=0", "at least 1"]),
    (["seed=-1"], ["seed=-1", "at least 0"]),
    (["seed=99999999999"], ["seed=99999999999", "at most"]),
    (["qad.learning_rate=-1e-5"], ["qad.learning_rate", "above 0"]),
    (["qad.learning_rate=nan"], ["qad.learning_rate=nan", "finite"]),
    (["qad.temperature=0"], ["qad.temperature", "above 0"]),
    (["qad.warmup_steps=160"], ["qad.warmup_steps=160", "qad.steps=160"]),
    (["teacher.warmup_steps=1000"], ["teacher.warmup_steps=1000", "teacher.steps=1000"]),
    (["qad.min_learning_rate=1"], ["qad.min_learning_rate=1", "qad.learning_rate"]),
    (["qad.average_decay=1"], ["qad.average_decay=1", "[0, 1)"]),
    (["data.held_out_fraction=0"], ["data.held_out_fraction=0", "(0, 1)"]),
    (["evaluation.band_low=0.995"], ["evaluation.band_low=0.995", "band_high=0.99"]),
    (["qad.global_batch_size=20"], ["qad.global_batch_size=20", "Give 32"]),
    (["qad.sequence_length=1024"], ["qad.sequence_length=1024", "max_position_embeddings=512"]),
    (["evaluation.sequence_length=1024"], ["evaluation.sequence_length=1024", "512"]),
    (["teacher.sequence_length=1024"], ["teacher.sequence_length=1024", "512"]),
    (["calibration.sequence_length=1024"], ["calibration.sequence_length=1024", "512"]),
    (["model.hybrid_pattern=MX"], ["model.hybrid_pattern=MX", "'X'", "Mamba-2"]),
    (["model.hybrid_pattern=''"], ["model.hybrid_pattern=", "no layers"]),
    (["model.mtp_num_layers=1"], ["model.mtp_num_layers=1", "mtp_pattern"]),
    (["model.attention.num_heads=5"], ["model.attention.num_heads=5", "Try 4 or 6"]),
    (["model.mamba.num_heads=5"], ["model.mamba.num_heads=5", "Try 4 or 6"]),
    (["model.moe.top_k=9"], ["model.moe.top_k=9", "num_experts=8"]),
    (["model.vocab_size=100"], ["model.vocab_size=100", "512"]),
    (["model.hidden_size=120"], ["model.hidden_size=120", "nvfp4", "multiple of 16"]),
    (["model.moe.ffn_hidden_size=100"], ["model.moe.ffn_hidden_size=100", "routed_experts=bf16"]),
    (["model.moe.shared_expert_ffn_hidden_size=8"], ["_ffn_hidden_size=8", "shared_experts=bf16"]),
    (["model.mamba.head_dim=31"], ["model.mamba.head_dim=31", "recipe.mamba=bf16"]),
    (["model.tied_output=true"], ["recipe.output_layer=nvfp4", "recipe.output_layer=bf16"]),
    (["recipe.kv_cache=nvfp4", "model.attention.head_dim=24"], ["head_dim=24", "recipe.kv_cache=fp8"]),
    (["recipe.scale_search=mse"], ["recipe.scale_search=mse", "recipe.weight_scales=static"]),
    (["recipe.qad_scales=frozen"], ["recipe.qad_scales=frozen", "recipe.weight_scales=static"]),
    (["recipe.weight_scales=static"], ["recipe.qad_scales=dynamic", "recipe.qad_scales=frozen"]),
    (["recipe.name=a/b"], ["recipe.name=a/b", "folder name"]),
    (["data=indexed"], ["data.path=None", "data.path=FOLDER"]),
    (["data=indexed", "data.path=/nowhere"], ["data.path=/nowhere", "no such folder"]),
    (["teacher.path=/nowhere"], ["teacher.path=/nowhere", "no such folder"]),
    (["model=nemotron_3_nano_30b_a3b"], ["teacher.path=None", "teacher.path=FOLDER"]),
    (["parallel.tensor=2"], ["parallel.tensor=2", "does not divide the 1 ranks"]),
    (["parallel.nodes=4", "parallel.tensor=4"], ["parallel.tensor=4", "model.mamba.num_groups (2)", "1, 2"]),
    (["parallel.nodes=3", "parallel.pipeline=3"], ["parallel.pipeline=3", "hybrid_pattern (5)", "1, 5"]),
    (["parallel.nodes=3", "parallel.expert=3"], ["parallel.expert=3", "1, 2, 4, 8"]),
    (["parallel.nodes=2", "parallel.context=2", "qad.sequence_length=126"], ["length=126", "Give 128"]),
    (["-m", "qad.steps=5,20"], ["qad.warmup_steps=10", "qad.steps=5"]),
    (["-m", "recipe=max,mxe"], ["recipe=mxe", "Choices"]),
    (["-m", "seed=1,1"], ["run_dir=", "two jobs"]),
    (["-m", "seed=1,2", "run_dir=same"], ["run_dir=", "two jobs"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_each_mistake_has_its_message(
    overrides: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(command: command_line.Command) -> int:
        raise AssertionError("the mistake was not noticed")

    monkeypatch.setattr(train, "_run", started)
    given = overrides if any("recipe=" in o for o in overrides) else ["+recipe=max", *overrides]
    assert train.main(given) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert [word for word in words if word not in message] == [], message
    assert "Traceback" not in message


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
    run = config.compose(["+recipe=four_over_six", *RELEASED, "qad=published_522k"])
    longer = replace(run, qad=replace(run.qad, sequence_length=524_288))
    with pytest.raises(ConfigError, match=r"qad\.sequence_length=524288.*parallel\.context of at least 2"):
        validate(longer)


def test_every_setting_says_what_it_expects() -> None:
    assert "model.moe.top_k" in fields.leaves()
    assert fields.expected("qad.keep") == "one of best, last"
    assert all(fields.expected(name) for name in fields.leaves())
    assert isinstance(config.compose(["+recipe=max"]).model, ModelConfig)
