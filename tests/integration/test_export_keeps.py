"""What an export keeps of the checkpoint it was made from: prediction blocks, dtypes, the fields of config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.errors import UserError
from nemo_qad.huggingface.architectures import hf_config
from nemo_qad.huggingface.export import Origin, expected_weights, export_student
from nemo_qad.huggingface.inspect import inspect_folder
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.names import carried, mappings
from nemo_qad.huggingface.save import hf_tensors, save_bf16, write_folder
from nemo_qad.huggingface.sizes import export_size
from nemo_qad.huggingface.verify import verify_folder
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import ModelConfig, ParallelConfig, Precision

MTP = {"mtp_pattern": "*E", "mtp_num_layers": 1}
MODEL = replace(small_model(), **MTP)  # type: ignore[arg-type]
FP32 = ("gate.weight", "A_log", "D", "dt_bias", "e_score_correction_bias")


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def blocks(model: ModelConfig) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    named = [(name, shape) for m in carried(model) for name, shape in zip(m.hf, m.shapes, strict=True)]
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in named}
    return {name: t.float() if name.endswith("score_correction_bias") else t for name, t in tensors.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a prediction block, an FP32 router and a config.json with fields of its own."""
    tensors = dict(hf_tensors(build(small_model(precision=Precision.fp32)), MODEL))
    random = torch.Generator().manual_seed(5)
    for name in tensors:
        if name.endswith(FP32):
            tensors[name] = tensors[name].float() + 1e-3 * torch.randn(tensors[name].shape, generator=random)
    folder = tmp_path_factory.mktemp("source") / "model"
    config = hf_config(MODEL) | {"eos_token_id": 11, "auto_map": {"AutoConfig": "code.py"}, "note": [1, 2]}
    tensors |= blocks(MODEL)
    write_folder(
        tensors.items(), folder, config=config, extra_json={}, tokenizer_folder=None, max_shard_gb=1e-4
    )
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("recipe", ["four_over_six_nvfp4_kv", "mamba_fp8_max"])
def test_the_size_was_known_before(source: Path, tmp_path: Path, recipe: str) -> None:
    module = build(MODEL)
    quantize(module, load_recipe(recipe), MODEL, batches(MODEL))
    facts = export_student(module, tmp_path / "export", MODEL, load_recipe(recipe), None, 1.0, Origin(source))
    size = export_size(MODEL, load_recipe(recipe))
    assert (facts["bytes_tensors"], facts["num_tensors"]) == (size.num_bytes, size.num_tensors)


def exported(source: Path, folder: Path, recipe: str = "four_over_six") -> nn.Module:
    module = build(replace(MODEL, precision=Precision.fp32))
    load_weights(module, source, MODEL)
    quantize(module, load_recipe(recipe), MODEL, batches(MODEL))
    config = json.loads((source / "config.json").read_text())
    export_student(module, folder, MODEL, load_recipe(recipe), None, 1e-4, Origin(source, config))
    return module


def test_prediction_blocks_are_the_sources_bytes_and_excluded(source: Path, tmp_path: Path) -> None:
    module, folder = exported(source, tmp_path / "export"), tmp_path / "export"
    before, after = read(source), read(folder)
    names = [name for name in before if name.startswith("mtp.")]
    assert set(names) == {name for name in after if name.startswith("mtp.")} and len(names) == 5 + 3 + 14
    for name in names:
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name])
    settings = json.loads((folder / "config.json").read_text())
    excluded = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert settings["quantization_config"]["ignore"] == excluded
    matrices = {n.removesuffix(".weight") for n in names if before[n].dim() == 2}
    assert matrices <= set(excluded) and "mtp*" in excluded
    assert (settings["num_nextn_predict_layers"], settings["mtp_hybrid_override_pattern"]) == (1, "*E")
    expected = [*expected_weights(module, MODEL), *((n, before[n]) for n in names)]
    assert verify_folder(folder, expected)["num_tensors"] == len(after)
    found = inspect_folder(folder, source=source, engine="vllm")
    assert not found.problems and found.num_kv_scales == 2 * MODEL.hybrid_pattern.count("*")


def test_unquantised_tensors_have_the_sources_dtypes_and_the_students_values(source: Path, tmp_path: Path) -> None:
    module, folder = exported(source, tmp_path / "export", "max"), tmp_path / "export"
    before, after = read(source), read(folder)
    kept = [name for name in before if after[name].dtype != torch.uint8]
    assert {n: after[n].dtype for n in kept} == {n: before[n].dtype for n in kept}
    routers = [name for name in kept if name.endswith("gate.weight")]
    assert routers and all(after[name].dtype == torch.float32 for name in routers if not name.startswith("mtp"))
    for name in kept:  # nothing was trained, so nothing may change, not in the last bit either
        assert torch.equal(after[name], before[name]), name
    with deployed_weights(module):
        verify_folder(folder, [*expected_weights(module, MODEL), *blocks(MODEL).items()])
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "dtype" not in config


def test_fields_of_config_json_stay_but_for_code(source: Path, tmp_path: Path) -> None:
    exported(source, tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert (config["eos_token_id"], config["note"]) == (11, [1, 2]) and "auto_map" not in config


def test_bf16_copies_carry_the_blocks_too(source: Path, tmp_path: Path) -> None:
    module = build(replace(MODEL, precision=Precision.bf16))
    loaded = load_weights(module, source, MODEL)
    assert any(name.endswith("gate.weight") for name in loaded.rounded)  # FP32 there, BF16 parameters here
    save_bf16(module, tmp_path / "copy", MODEL, None, 5.0, source)
    found = read(tmp_path / "copy")
    assert all(torch.equal(found[name], tensor) for name, tensor in blocks(MODEL).items())
    with pytest.raises(UserError, match=r"model\.mtp_num_layers=1"):
        save_bf16(module, tmp_path / "none", MODEL, None, 5.0)
    assert not (tmp_path / "none").exists()


def lost(tensors: dict[str, Any]) -> None:
    for name in list(tensors):
        if name.startswith("mtp."):
            del tensors[name]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lost, "missing: mtp.layers.0.eh_proj.weight"),
        (lambda t: t.update({"mtp.layers.0.eh_proj.weight": torch.zeros(64, 128)}), "eh_proj.weight is all zero"),
        (lambda t: t.update({"mtp.layers.2.norm.weight": torch.ones(64)}), "not part of model"),
        (lambda t: t["mtp.layers.1.mixer.gate.weight"].fill_(float("nan")), "gate.weight holds NaN"),
    ],
)
def test_damaged_or_lost_blocks_stop_the_load(source: Path, tmp_path: Path, damage: Any, words: str) -> None:
    tensors = read(source)
    damage(tensors)
    write_folder(
        tensors.items(), tmp_path / "bad", config=hf_config(MODEL), extra_json={}, tokenizer_folder=None,
        max_shard_gb=1.0,
    )  # fmt: skip
    with pytest.raises(UserError, match=words):
        load_weights(build(MODEL), tmp_path / "bad", MODEL)


def test_an_output_layer_beside_a_tied_embedding_must_be_the_embedding(tmp_path: Path) -> None:
    model = small_model(tied_output=True)
    tensors = dict(hf_tensors(build(model), model))
    embedding = mappings(model)[0].hf[0]

    def write(output: Tensor, name: str) -> Path:
        write_folder(
            [*tensors.items(), ("lm_head.weight", output)], tmp_path / name, config=hf_config(model), extra_json={},
            tokenizer_folder=None, max_shard_gb=1.0,
        )  # fmt: skip
        return tmp_path / name

    load_weights(build(model), write(tensors[embedding].clone(), "same"), model)
    with pytest.raises(UserError, match=r"lm_head\.weight differs from backbone\.embeddings"):
        load_weights(build(model), write(tensors[embedding] * 2, "other"), model)
