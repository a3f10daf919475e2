"""The exported folder holds the trained model bit for bit, and the verifier notices when it does not."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.errors import UserError
from nemo_qad.huggingface.export import expected_weights, export_student
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.huggingface.verify import verify_folder
from nemo_qad.models.build import logits_fn
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.nvfp4 import MIN_GLOBAL_AMAX
from nemo_qad.quantization.student import deployed_weights, stored_linear
from nemo_qad.schema import Format, KvFormat, ParallelConfig, Precision

RECIPES = (
    "max", "mamba_fp8_max", "mse", "four_over_six", "four_over_six_nvfp4_kv", "lightning_release", "four_over_six_w4a4"
)  # fmt: skip
MODEL = small_model()


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def quantised(recipe: str, model: Any = MODEL, **changes: Any) -> nn.Module:
    """Quantised, then moved as QAD moves it: what is trained is what must ship."""
    module = build(model)
    quantize(module, load_recipe(recipe, **changes), model, batches(model))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.002)
    return module


def read(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def export(
    module: nn.Module, folder: Path, recipe: str, model: Any = MODEL, **changes: Any
) -> dict[str, Any]:
    return export_student(module, folder, model, load_recipe(recipe, **changes), None, 5.0)


@pytest.mark.parametrize("name", RECIPES)
def test_folder_holds_the_model(name: str, tmp_path: Path) -> None:
    module, folder = quantised(name), tmp_path / "export"
    facts = export(module, folder, name)
    checked = verify_folder(folder, expected_weights(module, MODEL))
    assert facts["num_tensors"] == checked["num_tensors"] == len(read(folder))
    assert facts["bytes_export"] == checked["num_bytes"]
    mixed = name in ("mamba_fp8_max", "lightning_release")
    w4a4 = name == "four_over_six_w4a4"  # keeps the output layer
    assert facts["quant_algo"] == ("MIXED_PRECISION" if mixed else "NVFP4" if w4a4 else "W4A16_NVFP4")
    counts = (13, 4) if mixed else (16, 0) if w4a4 else (17, 0)
    assert (checked["num_nvfp4_linears"], checked["num_fp8_linears"]) == counts
    assert checked["num_values_compared"] == sum(t.numel() for _, t in expected_weights(module, MODEL))


def test_decoded_folder_computes_the_students_logits(tmp_path: Path) -> None:
    """A plain model given the decoded weights is the student, once both round what is not quantised."""
    parts = {"kv_cache": KvFormat.none}
    module = quantised("four_over_six", **parts)
    export(module, tmp_path / "export", "four_over_six", **parts)
    plain = build(MODEL)
    decoded = dict(expected_weights(module, MODEL))
    verify_folder(tmp_path / "export", decoded.items())
    save_bf16(module, tmp_path / "bf16", MODEL, None, 5.0)
    load_weights(plain, tmp_path / "bf16", MODEL)
    from nemo_qad.huggingface.names import held_tensors, mappings, to_mcore

    with torch.no_grad():
        for mapping, tensor, _ in held_tensors(plain, mappings(MODEL)):
            tensor.copy_(to_mcore(mapping, decoded, MODEL))
    tokens = batches(MODEL)[0]["tokens"]
    with deployed_weights(module):
        assert torch.equal(logits_fn(plain, 250)(tokens), logits_fn(module, 250)(tokens))


def test_layout_of_a_mixed_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    module = quantised("lightning_release")
    export(module, folder, "lightning_release")
    tensors = read(folder)
    up = "backbone.layers.1.mixer.experts.3.up_proj"
    assert (tensors[f"{up}.weight"].dtype, tensors[f"{up}.weight"].shape) == (torch.uint8, (48, 32))
    assert tensors[f"{up}.weight_scale"].dtype == torch.float8_e4m3fn
    assert tensors[f"{up}.weight_scale"].shape == (48, 4)
    assert tensors[f"{up}.weight_scale_2"].shape == () and f"{up}.input_scale" not in tensors
    mamba = "backbone.layers.0.mixer.in_proj"
    assert tensors[f"{mamba}.weight"].dtype == torch.float8_e4m3fn
    assert tensors[f"{mamba}.weight_scale"].shape == tensors[f"{mamba}.input_scale"].shape == ()
    assert tensors["lm_head.weight"].shape == (250, 32)  # rows that pad the vocabulary do not ship
    assert tensors["backbone.layers.1.mixer.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["backbone.layers.2.mixer.q_proj.weight"].dtype == torch.bfloat16
    kv_scales = [name for name in tensors if name.endswith(("k_scale", "v_scale"))]
    assert kv_scales == ["backbone.layers.2.mixer.k_proj.k_scale", "backbone.layers.2.mixer.v_proj.v_scale"]
    attention: Any = module.get_submodule("decoder.layers.2.self_attention.core_attention")
    assert (
        torch.equal(tensors[kv_scales[1]], attention.v_bmm_quantizer.amax / 448)
        and tensors[kv_scales[1]] < 0.5
    )


def test_configuration_of_a_mixed_checkpoint(tmp_path: Path) -> None:
    export(quantised("lightning_release"), tmp_path / "export", "lightning_release")
    legacy = json.loads((tmp_path / "export" / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert legacy["quant_algo"] == config["quant_algo"] == "MIXED_PRECISION"
    assert legacy["kv_cache_quant_algo"] == "FP8"
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config["quant_method"] == "modelopt" and config["producer"]["name"] == "modelopt"
    layers = legacy["quantized_layers"]
    assert layers == config["quantized_layers"] and len(layers) == 17
    assert layers["backbone.layers.3.mixer.out_proj"] == {"quant_algo": "FP8"}
    assert layers["lm_head"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    excluded = {f"backbone.layers.2.mixer.{part}_proj" for part in "qkvo"} | {"backbone.layers.1.mixer.gate"}
    outside = {"backbone.embeddings", *(f"backbone.layers.{i}.mixer.conv1d" for i in (0, 3))}  # no linears
    assert set(config["ignore"]) == excluded | outside
    groups = {len(group["targets"]): group for group in config["config_groups"].values()}
    assert groups[4]["input_activations"]["num_bits"] == 8 and "input_activations" not in groups[13]


def test_configuration_of_a_single_format_and_nvfp4_cache(tmp_path: Path) -> None:
    module = quantised("four_over_six_nvfp4_kv")
    export(module, tmp_path / "export", "four_over_six_nvfp4_kv")
    legacy = json.loads((tmp_path / "export" / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert {k: legacy[k] for k in ("quant_algo", "group_size", "kv_cache_quant_algo")} == {
        "quant_algo": "W4A16_NVFP4", "group_size": 16, "kv_cache_quant_algo": "NVFP4"
    }  # fmt: skip
    assert "quantized_layers" not in legacy and config["kv_cache_scheme"] == "NVFP4"
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert config["config_groups"] == {"group_0": {"weights": weights, "targets": ["Linear"]}}
    attention: Any = module.get_submodule("decoder.layers.2.self_attention.core_attention")
    stored = read(tmp_path / "export")["backbone.layers.2.mixer.k_proj.k_scale"]
    assert torch.equal(stored, attention.k_bmm_quantizer.amax / 2688)


def test_quantised_attention_is_split_by_rows(tmp_path: Path) -> None:
    changes = {"attention": Format.nvfp4}
    module, folder = quantised("four_over_six", **changes), tmp_path / "export"
    export(module, folder, "four_over_six", **changes)
    verify_folder(folder, expected_weights(module, MODEL))
    tensors, prefix = read(folder), "backbone.layers.2.mixer"
    assert [tensors[f"{prefix}.{p}_proj.weight_scale"].shape[0] for p in "qkv"] == [64, 32, 32]
    assert len({tensors[f"{prefix}.{p}_proj.weight_scale_2"].item() for p in "qkv"}) == 1
    name = "decoder.layers.2.self_attention.linear_qkv"
    fused = stored_linear(name, module.get_submodule(name))["weight"]
    assert torch.equal(
        tensors[f"{prefix}.k_proj.weight"][:16], fused[32:48]
    )  # group 0: 32 query rows, 16 key rows


def test_shards_and_bf16_model(tmp_path: Path) -> None:
    model = small_model(precision=Precision.bf16)
    module, folder = quantised("mamba_fp8_max", model), tmp_path / "export"
    export_student(module, folder, model, load_recipe("mamba_fp8_max"), None, 3e-5)
    assert len(list(folder.glob("*.safetensors"))) > 2
    verify_folder(folder, expected_weights(module, model))


def test_blocks_of_zeros_ship_positive_scales(tmp_path: Path) -> None:
    module: Any = build(MODEL)
    module.output_layer.weight.data[:7] = 0
    quantize(module, load_recipe("four_over_six"), MODEL, batches(MODEL))
    export(module, tmp_path / "export", "four_over_six")
    verify_folder(tmp_path / "export", expected_weights(module, MODEL))
    scales = read(tmp_path / "export")["lm_head.weight_scale"].float()
    assert (scales[:7] == 2.0**-9).all() and MIN_GLOBAL_AMAX > 0


QUERY = "backbone.layers.2.mixer.q_proj"
FP8_LINEAR = "backbone.layers.0.mixer.in_proj"
LINEAR = "backbone.layers.1.mixer.experts.2.down_proj"


def flip_nibble(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LINEAR}.weight"][5, 3] ^= 0x10


def move_scale_byte(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LINEAR}.weight_scale"].view(torch.uint8)[2, 1] += 1


def delete(suffix: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{LINEAR}.{suffix}")


def scale_byte(value: int) -> Callable[[dict[str, Tensor]], object]:
    def write(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LINEAR}.weight_scale"].view(torch.uint8)[0, 0] = value

    return write


def global_scale(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[f"{LINEAR}.weight_scale_2"].fill_(value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    module, folder = quantised("lightning_release"), tmp_path_factory.mktemp("good") / "export"
    export(module, folder, "lightning_release")
    return folder, dict(expected_weights(module, MODEL))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_nibble, rf"{LINEAR}.weight: 1 of 3072 values differ"),
        (move_scale_byte, rf"{LINEAR}.weight: \d+ of 3072 values differ"),
        (global_scale(0.5), rf"{LINEAR}.weight: \d+ of 3072 values differ"),
        (delete("weight_scale"), rf"{LINEAR}.weight_scale: missing"),
        (delete("weight_scale_2"), rf"{LINEAR}.weight_scale_2: missing"),
        (delete("weight"), rf"{LINEAR}.weight: missing"),
        (scale_byte(0x7F), rf"{LINEAR}.weight_scale: a scale that is zero, negative, NaN"),
        (scale_byte(0), rf"{LINEAR}.weight_scale: a scale that is zero"),
        (scale_byte(0x81), rf"{LINEAR}.weight_scale: a scale that is zero, negative"),
        (global_scale(float("inf")), rf"{LINEAR}.weight_scale_2: a scale that is zero, negative, NaN or inf"),
        (lambda t: t.pop("backbone.layers.2.mixer.k_proj.k_scale"), "k_proj.k_scale: missing"),
        (lambda t: t.pop(f"{FP8_LINEAR}.input_scale"), "in_proj.input_scale: missing"),
        (lambda t: t.update({f"{LINEAR}.input_scale": torch.ones(())}), "input_scale: a scale without use"),
        (lambda t: t.update({"stray.bias": torch.ones(3)}), "stray.bias: not a tensor of the model"),
        (
            lambda t: t.update({f"{LINEAR}.weight": torch.zeros(64, 48, dtype=torch.bfloat16)}),
            rf"{LINEAR}.weight: stored as BF16, the configuration says W4A16_NVFP4",
        ),
        (lambda t: t["backbone.layers.0.mixer.A_log"].mul_(1.5), "A_log: 4 of 4 values differ"),
        (lambda t: t[f"{FP8_LINEAR}.weight"].view(torch.uint8)[0, 0].fill_(0x7F), "in_proj.weight: holds"),
    ],
)  # fmt: skip
def test_damage_is_named(
    damage: Callable[[dict[str, Tensor]], object],
    message: str,
    good: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(good[0], folder)
    tensors = read(folder)
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        verify_folder(folder, good[1].items())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda q: q["exclude_modules"].append(LINEAR), rf"{LINEAR}.weight: quantised and excluded"),
        (lambda q: q["exclude_modules"].remove(QUERY), "q_proj.weight: neither quantised nor"),
        (lambda q: q["quantized_layers"].pop(LINEAR), rf"{LINEAR}.weight: stored as .* says unquantised"),
        (lambda q: q.update(kv_cache_quant_algo=None), "k_scale: there, though the KV cache is not"),
    ],
)  # fmt: skip
def test_configuration_that_lies_is_named(
    edit: Callable[[dict[str, Any]], Any], message: str, good: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(good[0], folder)
    legacy = json.loads((folder / "hf_quant_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    edit(legacy["quantization"])
    engine = config["quantization_config"]
    engine["ignore"] = legacy["quantization"]["exclude_modules"]
    engine["quantized_layers"] = legacy["quantization"]["quantized_layers"]
    (folder / "hf_quant_config.json").write_text(json.dumps(legacy))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        verify_folder(folder, good[1].items())


def test_configurations_that_differ_and_truncated_files(
    good: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(good[0], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model.safetensors: truncated, .* ends beyond"):
        verify_folder(folder, good[1].items())
    shutil.copyfile(good[0] / "model.safetensors", weights)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"exclude_modules and config.json ignore differ"):
        verify_folder(folder, good[1].items())


def test_recipe_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"disagree about decoder.layers.2.self_attention.linear_qkv"):
        export(quantised("four_over_six"), tmp_path / "export", "four_over_six", attention=Format.nvfp4)
    assert not (tmp_path / "export").exists()


def test_verifier_shares_no_code_with_the_writer() -> None:
    from nemo_qad.huggingface import inspect, stored, verify

    allowed = {stored: {"errors"}, verify: {"errors", "stored"}, inspect: {"stored", "verify", "engines"}}
    for module, ours in allowed.items():
        tree = ast.parse(Path(module.__file__).read_text())
        taken = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        taken |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert {name.rpartition(".")[2] for name in taken if name.startswith("nemo_qad")} <= ours, module.__name__
        assert not any(name.startswith(("torch", "safetensors", "modelopt", "megatron")) for name in taken)
