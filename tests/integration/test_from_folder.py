"""From a Hugging Face folder to a Hugging Face NVFP4 folder in one command: model, teacher, tokenizer are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from nemo_qad.config import compose, from_yaml
from nemo_qad.data import tokenizer
from nemo_qad.errors import ConfigError

SHORT = [
    "+recipe=four_over_six", "experiment=quick", "qad.steps=4", "qad.warmup_steps=1", "qad.validate_every=2",
    "calibration.num_samples=16", "evaluation.num_questions=10", "evaluation.held_out_samples=16",
    "qad.validation_samples=16", "data.generated_fraction=0", "threads=1",
]  # fmt: skip
CONFIG: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a tokenizer that was trained on some lines."""
    folder = tmp_path_factory.mktemp("hub") / "Qwen3-tiny"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)
    text = [Path(json.__file__).read_text(), Path(__file__).read_text()]
    tokenizer.save(tokenizer.train(text, 1000), folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_one_command_makes_the_checkpoint(folder: Path) -> None:
    root = folder.parent
    status, output = command.run(root, SHORT, f"model.path={folder}", f"run_dir={root / 'run'}")
    assert status == 0, output
    assert "Training a tokenizer" not in output and "weights decoded again, all equal bit for bit" in output
    export = root / "run/export"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (export / name).read_bytes() == (folder / name).read_bytes()
    ours, theirs = (AutoTokenizer.from_pretrained(source).encode("import json") for source in (export, folder))
    assert ours == theirs
    stored, source = load_file(export / "model.safetensors"), load_file(folder / "model.safetensors")
    assert {name for name in stored if name.endswith(".weight")} == set(source)
    layer = "model.layers.1.mlp"
    assert stored[f"{layer}.gate_proj.weight"].dtype == torch.uint8
    assert torch.equal(stored[f"{layer}.gate_proj.weight_scale_2"], stored[f"{layer}.up_proj.weight_scale_2"])
    attention = "model.layers.0.self_attn"
    assert stored[f"{attention}.q_proj.weight"].dtype == torch.bfloat16
    assert f"{attention}.k_proj.k_scale" in stored and f"{attention}.v_proj.v_scale" in stored
    settings = json.loads((export / "config.json").read_text())
    assert settings["model_type"] == "qwen3" and settings["architectures"] == ["Qwen3ForCausalLM"]
    ignored = settings["quantization_config"]["ignore"]
    assert f"{attention}.q_proj" in ignored and f"{layer}.gate_proj" not in ignored
    frozen = from_yaml((root / "run/config.yaml").read_text())
    assert frozen.teacher.path == frozen.data.tokenizer == frozen.model.path == str(folder)


def test_two_ranks_make_the_same_students_table(folder: Path) -> None:
    root = folder.parent
    extra = [f"model.path={folder}", "stages=[ptq]"]
    assert command.run(root, SHORT, *extra, f"run_dir={root / 'one'}")[0] == 0
    status, output = command.run(root, SHORT, *extra, f"run_dir={root / 'tp2'}", "parallel=local_tp2")
    assert status == 0, output
    ours, theirs = (json.loads((root / name / "stages/ptq.json").read_text()) for name in ("tp2", "one"))
    assert ours["held_out_kl"] == pytest.approx(theirs["held_out_kl"], rel=1e-2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=/nowhere"], ["model.path=/nowhere", "no config.json"]),
        (["model.path=FOLDER", "model.layernorm_epsilon=1e-5"], ["layernorm_epsilon=1e-05", "has 1e-06"]),
        (["model.path=FOLDER", "model.hidden_size=96"], ["model.hidden_size=96", "has 64", "Leave it out"]),
        (["model=tiny_hybrid", "model.path=FOLDER"], ["model.hybrid_pattern=ME*ME", "has *-*-", "model=huggingface"]),
        (["model=huggingface"], ["model.path", "no value was given"]),
        (["model.path=FOLDER", "qad.sequence_length=512"], ["max_position_embeddings=256"]),
        (["model.path=FOLDER", "parallel=local_tp2", "parallel.tensor=4"], ["parallel.tensor=4"]),
    ],
)
def test_what_contradicts_the_folder_is_refused(folder: Path, overrides: list[str], words: list[str]) -> None:
    given = [override.replace("FOLDER", str(folder)) for override in overrides]
    if not any(override.startswith("model=") for override in given):
        given = ["model=huggingface", *given]
    with pytest.raises(ConfigError) as error:
        compose(["+recipe=four_over_six", *given])
    assert all(word in str(error.value) for word in words), error.value
