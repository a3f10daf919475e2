"""What an engine finds in an export, by hand-written lists: names, scales of fused linears, configuration, arithmetic.

Cases that users reported of other exporters (G1, G4, G7, G8, G11, G12, G14).
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from safetensors.torch import load_file
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.choices import Architecture
from nemo_qad.config import compose
from nemo_qad.errors import ConfigError
from nemo_qad.huggingface.engines import ENGINES, engine_problems
from nemo_qad.huggingface.export import export_student, stored_tensors
from nemo_qad.huggingface.inspect import inspect_folder
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.names import linear_names
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.huggingface.stored import decode, read_entries
from nemo_qad.models.build import logits_fn
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.schema import AttentionConfig, Format, MambaConfig, ModelConfig, MoeConfig, ParallelConfig

ALL = ("weight", "weight_scale", "weight_scale_2")
W4A4 = (*ALL, "input_scale")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def transformer(architecture: Architecture, pattern: str) -> ModelConfig:
    return small_model(
        architecture=architecture, hybrid_pattern=pattern, rotary_base=10_000.0, mamba=MambaConfig(0, 0, 0, 0),
        attention=AttentionConfig(4, 2, 16), moe=MoeConfig(2, 2, 64, 0, 1.0),
    )  # fmt: skip


MODELS = {
    "nemotron_h": small_model(hybrid_pattern="ME*-", moe=MoeConfig(2, 2, 64, 64)),
    "llama": transformer(Architecture.llama, "*-"),
    "qwen3": transformer(Architecture.qwen3, "*-"),
    "qwen3_moe": transformer(Architecture.qwen3_moe, "*-*E"),
}
_LLAMA = [
    "model.embed_tokens.weight", "model.norm.weight", *(f"lm_head.{part}" for part in ALL),
    "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight",
    *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
    "model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale",
    *(f"model.layers.0.mlp.{x}_proj.{part}" for x in ("gate", "up", "down") for part in ALL),
]  # fmt: skip
_QWEN3 = [*_LLAMA, "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"]
_QWEN3_MOE = [
    *_QWEN3, "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
    *(f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkvo"),
    "model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight",
    "model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_proj.v_scale",
    "model.layers.1.mlp.gate.weight",
    *(f"model.layers.1.mlp.experts.{n}.{x}_proj.{p}" for n in (0, 1) for x in ("gate", "up", "down") for p in ALL),
]  # fmt: skip
_NEMOTRON_H = [
    "backbone.embeddings.weight", "backbone.norm_f.weight", *(f"lm_head.{part}" for part in ALL),
    *(f"backbone.layers.{layer}.norm.weight" for layer in range(4)),
    *(f"backbone.layers.0.mixer.{x}_proj.{part}" for x in ("in", "out") for part in ALL),
    *(f"backbone.layers.0.mixer.{x}" for x in ("A_log", "D", "dt_bias", "norm.weight", "conv1d.weight", "conv1d.bias")),
    "backbone.layers.1.mixer.gate.weight", "backbone.layers.1.mixer.gate.e_score_correction_bias",
    *(f"backbone.layers.1.mixer.experts.{n}.{x}_proj.{p}" for n in (0, 1) for x in ("up", "down") for p in ALL),
    *(f"backbone.layers.1.mixer.shared_experts.{x}_proj.{part}" for x in ("up", "down") for part in ALL),
    *(f"backbone.layers.2.mixer.{x}_proj.weight" for x in "qkvo"),
    "backbone.layers.2.mixer.k_proj.k_scale", "backbone.layers.2.mixer.v_proj.v_scale",
    *(f"backbone.layers.3.mixer.{x}_proj.{part}" for x in ("up", "down") for part in ALL),
]  # fmt: skip
KEYS = {"nemotron_h": _NEMOTRON_H, "llama": _LLAMA, "qwen3": _QWEN3, "qwen3_moe": _QWEN3_MOE}


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def student(model: ModelConfig, recipe: str, **changes: Any) -> nn.Module:
    """Quantised, then moved as QAD moves weights."""
    module = build(model)
    quantize(module, load_recipe(recipe, **changes), model, batches(model))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.01)
    return module


def exported(model: ModelConfig, recipe: str, folder: Path, **changes: Any) -> nn.Module:
    module = student(model, recipe, **changes)
    export_student(module, folder, model, load_recipe(recipe, **changes), None, 5.0)
    return module


@pytest.mark.parametrize("family", KEYS)
def test_names_are_those_of_the_golden_list(family: str, tmp_path: Path) -> None:
    """G1: experts are not packed, names are those of the BF16 layout with scales beside them."""
    exported(MODELS[family], "four_over_six", tmp_path / "export")
    found = load_file(tmp_path / "export/model.safetensors")
    assert sorted(found) == sorted(KEYS[family])
    save_bf16(build(MODELS[family]), tmp_path / "bf16", MODELS[family], None, 5.0)
    inspected = inspect_folder(tmp_path / "export", source=tmp_path / "bf16", engine="vllm", tensor_parallel=2)
    assert inspected.problems == []


def test_w4a4_has_an_input_scale_beside_each_weight(tmp_path: Path) -> None:
    exported(MODELS["llama"], "four_over_six_w4a4", tmp_path / "export")
    found = set(load_file(tmp_path / "export/model.safetensors"))
    mlp = {f"model.layers.0.mlp.{x}_proj.{part}" for x in ("gate", "up", "down") for part in W4A4}
    assert {name for name in found if ".mlp." in name} == mlp
    plan = json.loads((tmp_path / "export/hf_quant_config.json").read_text())["quantization"]
    assert (plan["quant_algo"], plan["group_size"]) == ("NVFP4", 16) and "lm_head" in plan["exclude_modules"]


@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize("recipe", ["max", "mamba_fp8_max", "four_over_six_nvfp4_kv", "four_over_six_w4a4"])
def test_both_configurations_suit_every_engine(family: str, recipe: str, tmp_path: Path) -> None:
    """G4: what engines ask for is there, and ModelOpt's own conversion of one file gives the other."""
    exported(MODELS[family], recipe, tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    legacy = json.loads((tmp_path / "export/hf_quant_config.json").read_text())
    for engine in ENGINES:
        assert list(engine_problems(engine, config, legacy["quantization"])) == []
    theirs, ours = convert_hf_quant_config_format(copy.deepcopy(legacy)), config["quantization_config"]
    for key in ("ignore", "quant_algo", "producer", "quant_method", "kv_cache_scheme"):
        if key in theirs and not (key == "kv_cache_scheme" and recipe == "four_over_six_nvfp4_kv"):
            assert ours[key] == theirs[key], key
    for group in theirs["config_groups"].values():
        mine = [own for own in ours["config_groups"].values() if own["weights"] == group["weights"]]
        assert any(own.get("input_activations") == group.get("input_activations") for own in mine)


@pytest.mark.parametrize(
    "gone", ["group_size", "kv_cache_quant_algo", "exclude_modules", "quant_method", "architectures"]
)
def test_a_key_that_vllm_needs_is_missed(gone: str, tmp_path: Path) -> None:
    exported(MODELS["llama"], "four_over_six", tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    plan = json.loads((tmp_path / "export/hf_quant_config.json").read_text())["quantization"]
    for node in (config, config["quantization_config"], plan):
        node.pop(gone, None)
    assert len(list(engine_problems("vllm", config, plan))) == 1


def test_a_shared_output_layer_stays_bf16_and_flagged(tmp_path: Path) -> None:
    """G7"""
    model = small_model(tied_output=True)
    exported(model, "four_over_six", tmp_path / "export", output_layer=Format.bf16)
    tensors = load_file(tmp_path / "export/model.safetensors")
    assert not [name for name in tensors if name.startswith("lm_head")]
    assert tensors["backbone.embeddings.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["tie_word_embeddings"] is True
    with pytest.raises(ConfigError, match=r"output_layer=nvfp4: model\.tied_output=true shares"):
        compose(["+recipe=four_over_six", "model.tied_output=true"])


def test_an_untied_output_layer_starts_as_the_embedding_and_is_quantised(tmp_path: Path) -> None:
    """G7: the same logits before quantisation, an output layer of its own and a flag that says so after it."""
    tied, own = small_model(tied_output=True), small_model(tied_output=False)
    source = build(tied)
    save_bf16(source, tmp_path / "tied", tied, None, 5.0)
    load_weights(source, tmp_path / "tied", tied)
    module = build(own, seed=5)
    load_weights(module, tmp_path / "tied", own)
    tokens = batches(own)[0]["tokens"]
    assert torch.equal(logits_fn(module, 250)(tokens), logits_fn(source, 250)(tokens))
    quantize(module, load_recipe("four_over_six"), own, batches(own))
    export_student(module, tmp_path / "export", own, load_recipe("four_over_six"), None, 5.0)
    tensors = load_file(tmp_path / "export/model.safetensors")
    assert {name for name in tensors if name.startswith("lm_head")} == {f"lm_head.{part}" for part in ALL}
    assert json.loads((tmp_path / "export/config.json").read_text())["tie_word_embeddings"] is False
    assert inspect_folder(tmp_path / "export", source=tmp_path / "tied", engine="vllm").problems == []


@pytest.mark.parametrize("family", KEYS)
def test_cache_scales_are_one_pair_an_attention_layer_under_the_names_that_engines_remap(
    family: str, tmp_path: Path
) -> None:
    """G8: vLLM looks for `.k_proj.k_scale` and `.v_proj.v_scale`; a Mamba layer has none."""
    exported(MODELS[family], "four_over_six_nvfp4_kv", tmp_path / "export")
    names = load_file(tmp_path / "export/model.safetensors")
    scales = [name for name in names if name.endswith(("k_scale", "v_scale"))]
    layers = [re.fullmatch(r"(.+\.layers\.\d+\.(?:self_attn|mixer))\.([kv])_proj\.\2_scale", name) for name in scales]
    assert all(layers) and len(scales) == 2 * MODELS[family].hybrid_pattern.count("*")
    assert len({match[1] for match in layers if match}) == len(scales) / 2


@pytest.mark.parametrize("recipe", ["mamba_fp8_max", "lightning_release"])
def test_a_mixed_table_has_each_quantised_linear_once(recipe: str, tmp_path: Path) -> None:
    """G11: and the list of what is excluded has all others, so that no linear is left to a default."""
    model = MODELS["nemotron_h"]
    exported(model, recipe, tmp_path / "export")
    plan = json.loads((tmp_path / "export/hf_quant_config.json").read_text())["quantization"]
    tensors = load_file(tmp_path / "export/model.safetensors")
    packed = {name.removesuffix(".weight"): t.dtype for name, t in tensors.items() if name.endswith(".weight")}
    linears = {hf for names in linear_names(model).values() for hf in names}
    expected = {torch.uint8: "W4A16_NVFP4", torch.float8_e4m3fn: "FP8"}
    quantised = {name: expected[dtype] for name, dtype in packed.items() if dtype in expected}
    assert {name: layer["quant_algo"] for name, layer in plan["quantized_layers"].items()} == quantised
    assert linears - quantised.keys() <= set(plan["exclude_modules"])
    assert not quantised.keys() & set(plan["exclude_modules"])


@pytest.mark.parametrize("recipe", ["max", "mse", "four_over_six", "four_over_six_w4a4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "nemotron_h"])
def test_linears_that_engines_fuse_share_their_global_scales(family: str, recipe: str) -> None:
    """G12: q, k and v; gate and up; after calibration and after weights have moved."""
    model, changes = MODELS[family], {"attention": Format.nvfp4}
    fresh = build(model)
    quantize(fresh, load_recipe(recipe, **changes), model, batches(model))
    for module in (fresh, student(model, recipe, **changes)):
        tensors = dict(stored_tensors(module, model))
        groups: dict[tuple[str, str, str], list[Tensor]] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(.+)\.(q|k|v|gate|up)_proj\.(weight_scale_2|input_scale)", name)
            if match:
                groups.setdefault((match[1], "qkv" if match[2] in "qkv" else "gate up", match[3]), []).append(tensor)
        fused = [scales for scales in groups.values() if len(scales) > 1]
        assert len(fused) >= (1 if family == "nemotron_h" else 2)
        for one, other in itertools.chain.from_iterable(itertools.pairwise(scales) for scales in fused):
            assert one.view(torch.int32).equal(other.view(torch.int32))


def fp4_inputs(inputs: Tensor, scale: Tensor) -> Tensor:
    """What an engine makes of activations: E4M3 block scales in units of `input_scale`, values to the nearest code."""
    blocks = inputs.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    step = (amax / (6 * scale)).clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * scale
    magnitude = (blocks / step).abs().clamp(max=6)
    distance = (magnitude[..., None] - E2M1).abs()
    nearest = distance.amin(-1, keepdim=True) == distance
    index = torch.where(nearest.sum(-1) == 2, (nearest * torch.arange(8)).amax(-1), nearest.float().argmax(-1))
    index = torch.where((nearest.sum(-1) == 2) & (index % 2 == 1), index - 1, index)  # ties to the even code
    return (E2M1[index] * blocks.sign() * step).flatten(-2)


@pytest.mark.parametrize("recipe", ["max", "mse", "four_over_six", "four_over_six_w4a4"])
def test_products_with_the_unpacked_file_are_those_of_training(recipe: str, tmp_path: Path) -> None:
    """G14: every quantised linear of the student in FP32, against a product with what the file holds: no difference."""
    model = MODELS["nemotron_h"]
    module = exported(model, recipe, tmp_path / "export")
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    table = {name: hf for name, hf in linear_names(model).items() if not name.endswith("linear_qkv")}
    for name in table:
        module.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: (args[0].detach().clone(), out[0].clone())})
        )
    logits_fn(module, 250)(batches(model)[0]["tokens"])
    entries = read_entries(tmp_path / "export")
    tested = 0
    for name, (hf,) in table.items():
        entry = entries[f"{hf}.weight"]
        if entry.dtype != "U8":
            continue
        inputs, outputs = seen[name]
        weight = torch.from_numpy(decode(entries, f"{hf}.weight", 0, entry.shape[0]).copy())
        if f"{hf}.input_scale" in entries:
            inputs = fp4_inputs(inputs, torch.tensor(float(entries[f"{hf}.input_scale"].array())))
        product = F.linear(inputs, weight)
        assert (product - outputs[..., : len(weight)]).abs().max() == 0, name
        tested += bool(outputs.numel())
    assert tested >= 8
