"""Every scale that ships, byte by byte: saved, restored and exported from models that make scales hard (E5 to E14)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.checkpoint.tensors import load_tensors, save_tensors
from nemo_qad.config import compose
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.huggingface.export import expected_weights, export_student
from nemo_qad.huggingface.names import linear_names
from nemo_qad.huggingface.verify import verify_folder
from nemo_qad.quantization import modelopt
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.recipes import formats
from nemo_qad.quantization.student import quantizer_state, restore_quantizers
from nemo_qad.schema import ExtraRule, Format, ModelConfig, ParallelConfig, RecipeConfig

MODEL = small_model()
EXPERTS = "decoder.layers.1.mlp.experts.local_experts"
RECIPES = (
    "max", "mamba_fp8_max", "mse", "four_over_six", "four_over_six_nvfp4_kv", "lightning_release", "four_over_six_w4a4"
)  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
# By the definition of the format, not by the code under test: 4 bits of exponent, 3 of fraction.
E4M3 = np.array(
    [(byte % 8 + 8 * (byte >= 8)) * 2.0 ** (max(byte // 8, 1) - 10) for byte in range(127)], dtype=np.float32
)


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


class Folder:
    """An exported folder by its bytes, read without torch and without our own reader."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        self._header, self._data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        self._header.pop("__metadata__", None)

    def names(self, *endings: str) -> list[str]:
        return [name for name in self._header if name.endswith(endings)]

    def dtype(self, name: str) -> str:
        return self._header[name]["dtype"]

    def bytes(self, name: str) -> np.ndarray:
        entry = self._header[name]
        start, end = entry["data_offsets"]
        return np.frombuffer(self._data[start:end], dtype=np.uint8).reshape(*entry["shape"], -1)

    def fp32(self, name: str) -> np.ndarray:
        assert self.dtype(name) == "F32"
        return self.bytes(name).view(np.float32).reshape(self._header[name]["shape"])

    def nvfp4(self, linear: str) -> np.ndarray:
        """Values of a weight: e2m1 x (block scale x tensor scale), each step in FP32."""
        packed = self.bytes(f"{linear}.weight")[..., 0]
        codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(len(packed), -1, 16)
        step = E4M3[self.bytes(f"{linear}.weight_scale")[..., 0]] * self.fp32(f"{linear}.weight_scale_2")
        values = E2M1[codes & 7] * step[..., None].astype(np.float32)
        return np.where(codes & 8, -values, values).reshape(len(packed), -1)


def problems(folder: Folder) -> list[str]:
    """What a scan of every scale of a checkpoint finds: NaN, infinite, zero or negative ones, by name."""
    found = []
    for name in folder.names("scale", "scale_2"):
        if folder.dtype(name) == "F8_E4M3":
            scales = folder.bytes(name)
            sound = (scales >= 1) & (scales <= 0x7E)  # 0x7F is NaN, from 0x80 on the sign is set
        else:
            with np.errstate(over="ignore"):
                values = folder.fp32(name)
                sound = np.isfinite(values) & (values > 0) & np.isfinite(values * np.float32(2688))
        if not sound.all():
            found.append(f"{name}: {int((~sound).sum())} of {sound.size}")
    return found


def export(module: nn.Module, recipe: RecipeConfig, folder: Path, model: ModelConfig = MODEL) -> Folder:
    export_student(module, folder, model, recipe, None, 5.0)
    verify_folder(folder, expected_weights(module, model))
    return Folder(folder)


def number_of_scales(model: ModelConfig, recipe: RecipeConfig) -> int:
    """Two or three a quantised linear by its format, and K and V of each attention layer."""
    hf_names, table = linear_names(model), formats(recipe, model)
    counts = {Format.bf16: 0, Format.nvfp4: 2, Format.nvfp4_w4a4: 3, Format.fp8: 2}
    linears = [table[name].format for name, names in hf_names.items() for _ in names]
    return sum(counts[each] for each in linears) + 2 * model.hybrid_pattern.count("*")


def hard_model() -> Any:
    """Blocks of zeros among weights of 1e-4, weights that underflow, one huge weight, and an expert whose down_proj is
    given nothing but zeros: the square of its first linear's outputs is below the smallest FP32 number."""
    module: Any = build(MODEL)
    experts = module.get_submodule(EXPERTS)
    with torch.no_grad():
        out_proj = module.decoder.layers[0].mixer.out_proj.weight
        out_proj.clamp_(-1e-4, 1e-4)[3, 16:32] = 0
        module.output_layer.weight[:7] = 0
        module.output_layer.weight[9] *= 1e-12
        module.decoder.layers[4].mlp.linear_fc1.weight[5, 7] = 3e4
        experts[2].linear_fc1.weight.mul_(1e-24)
    return module


@pytest.mark.parametrize("name", RECIPES)
def test_every_scale_of_every_recipe_is_positive_and_finite(name: str, tmp_path: Path) -> None:
    """E5, E11: 0 NaN, 0 Inf, 0 <= 0, in every byte of every scale."""
    recipe, module, inputs = load_recipe(name), hard_model(), []
    module.get_submodule(f"{EXPERTS}.2.linear_fc2").register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].detach().abs().amax() if args[0].numel() else torch.zeros(()))
    )
    quantize(module, recipe, MODEL, batches(MODEL))
    assert inputs and not torch.stack(inputs).any()  # the inputs of that down_proj are indeed zeros
    folder = export(module, recipe, tmp_path / "export")
    assert len(folder.names("scale", "scale_2")) == number_of_scales(MODEL, recipe)
    assert problems(folder) == []


def test_zero_block_among_small_weights_ships_no_nan_byte(tmp_path: Path) -> None:
    """E11: the byte is not 0x7F, and a plain decoder reads zeros."""
    recipe, module = load_recipe("four_over_six"), hard_model()
    quantize(module, recipe, MODEL, batches(MODEL))
    folder = export(module, recipe, tmp_path / "export")
    linear = "backbone.layers.0.mixer.out_proj"
    assert folder.bytes(f"{linear}.weight_scale")[3, 1, 0] != 0x7F
    assert not folder.nvfp4(linear)[3, 16:32].any() and folder.nvfp4(linear)[3, :16].any()
    assert not folder.nvfp4("lm_head")[:7].any()


@pytest.mark.parametrize("idle", ["no token", "zeros"])
def test_fp8_inputs_of_an_expert_without_data_get_a_finite_scale(idle: str, tmp_path: Path) -> None:
    """E5: an input amax of nothing, and one of 0."""
    extra = [ExtraRule("decoder.layers.1.mlp.experts.local_experts.*", Format.fp8)]
    recipe = load_recipe("max", extra_rules=extra)
    module = hard_model() if idle == "zeros" else build(MODEL)
    if idle == "no token":
        module.decoder.layers[1].mlp.router.expert_bias[:] = torch.tensor([9.0, 9.0, -9.0, -9.0])
    result = quantize(module, recipe, MODEL, batches(MODEL))
    assert result.idle_experts == ([f"{EXPERTS}.{n}" for n in (2, 3)] if idle == "no token" else [])
    folder = export(module, recipe, tmp_path / "export")
    assert problems(folder) == []
    scales = {n: float(folder.fp32(f"backbone.layers.1.mixer.experts.{n}.down_proj.input_scale")) for n in range(4)}
    assert scales[2] == max(scales.values()) and len(set(scales.values())) > 1  # lent by the largest of the layer


def test_the_scan_finds_a_bad_scale(tmp_path: Path) -> None:
    """The scan above is only worth something if it sees one bad byte among all."""
    recipe, module = load_recipe("lightning_release"), build(MODEL)
    quantize(module, recipe, MODEL, batches(MODEL))
    export(module, recipe, tmp_path / "export")
    (path,) = (tmp_path / "export").glob("*.safetensors")
    sound = path.read_bytes()
    (size,) = struct.unpack("<Q", sound[:8])
    header = json.loads(sound[8 : 8 + size])
    damages = {
        "lm_head.weight_scale": [b"\x7f", b"\x00", b"\xff", b"\x81"],
        "lm_head.weight_scale_2": [struct.pack("<f", bad) for bad in (0.0, -1.0, float("nan"), float("inf"), 3e38)],
    }
    for name, contents in damages.items():
        start = 8 + size + header[name]["data_offsets"][0]
        for content in contents:
            path.write_bytes(sound[:start] + content + sound[start + len(content) :])
            assert problems(Folder(tmp_path / "export")) == [f"{name}: 1 of {1000 if name.endswith('scale') else 1}"]


@pytest.mark.parametrize("name", ["max", "mse", "four_over_six"])
def test_shipped_bytes_are_the_values_of_training_on_many_blocks(name: str, tmp_path: Path) -> None:
    """E14: 1e5 blocks of one linear, decoded by another program, against what the forward multiplies with."""
    model = small_model(hybrid_pattern="*", vocab_size=25_000)
    recipe, module = load_recipe(name), build(model)
    with torch.no_grad():  # blocks of very different size, as a trained model has
        module.output_layer.weight.mul_(torch.logspace(-3, 1, len(module.output_layer.weight))[:, None])
    quantize(module, recipe, model, batches(model, 1))
    folder = export(module, recipe, tmp_path / "export", model)
    with torch.no_grad():
        trained = module.output_layer.weight_quantizer(module.output_layer.weight)[:25_000].numpy()
    decoded = folder.nvfp4("lm_head")
    assert decoded.size == 25_000 * 64 == 16 * 100_000
    assert np.array_equal(decoded.view(np.uint32), trained.view(np.uint32))


@pytest.mark.parametrize("name", ["mse", "four_over_six", "lightning_release"])
def test_scales_of_experts_stay_their_own_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """E7: through the files of a run folder; weights ten times as large have scales ten times as large."""
    recipe, module = load_recipe(name), build(MODEL)
    with torch.no_grad():
        for which in ("linear_fc1", "linear_fc2"):
            first, second = (module.get_submodule(f"{EXPERTS}.{n}.{which}").weight for n in (0, 1))
            second.copy_(first * 10)
    quantize(module, recipe, MODEL, batches(MODEL))
    state = quantizer_state(module)
    for which in ("linear_fc1", "linear_fc2"):
        for buffer in ("_amax", "_global_amax"):
            one, other = (state[f"{EXPERTS}.{n}.{which}.weight_quantizer.{buffer}"] for n in (0, 1))
            torch.testing.assert_close(other, 10 * one, rtol=1e-6 if buffer == "_global_amax" else 0.1, atol=0)
    save_tensors(tmp_path / "saved", state, {})
    other_module = build(MODEL)
    restore_quantizers(other_module, recipe, MODEL, load_tensors(tmp_path / "saved")[0])
    restored = quantizer_state(other_module)
    assert restored.keys() == state.keys() and len(state) > 30
    for key, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(restored[key].view(torch.int32), value.view(torch.int32)), key
    with torch.no_grad():
        other_module.load_state_dict(_weights(module), strict=False)
    for key, quantizer in modelopt.enabled_quantizers(other_module):
        if key.endswith("weight_quantizer"):
            weight = module.get_submodule(key.removesuffix(".weight_quantizer")).weight
            assert torch.equal(quantizer(weight), module.get_submodule(key)(weight)), key


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("width", [1, 15, 17, 40, 60])
def test_a_width_that_blocks_do_not_divide_is_refused_with_the_layers_name(width: int) -> None:
    """E7, E8: no padding anywhere, so no padded value can enter an error or a scale; nothing was changed."""
    moe = small_model().moe
    for part, model in {
        "decoder.layers.4.mlp.linear_fc2": small_model(ffn_hidden_size=width),
        f"{EXPERTS}.0.linear_fc2": small_model(moe=type(moe)(**{**vars(moe), "ffn_hidden_size": width})),
    }.items():
        for name in ("max", "four_over_six"):
            module = build(model)
            with pytest.raises(UserError, match=rf"Blocks of 16 do not divide .*{part} \({width}\)"):
                quantize(module, load_recipe(name), model, batches(model))
            with pytest.raises(UserError, match=rf"Blocks of 16 do not divide .*{part} \({width}\)"):
                restore_quantizers(module, load_recipe(name), model, {})
            assert not list(modelopt.enabled_quantizers(module))


def test_such_a_width_is_refused_before_anything_is_built() -> None:
    """E8: by the configuration's own check, with the field."""
    with pytest.raises(ConfigError, match=r"model\.ffn_hidden_size=60"):
        compose(["+recipe=four_over_six", "model.ffn_hidden_size=60", "model.hybrid_pattern=M-"])


def test_a_width_of_sixteen_keeps_its_shape(tmp_path: Path) -> None:
    """E8: one block a row."""
    model = small_model(ffn_hidden_size=16)
    recipe, module = load_recipe("four_over_six"), build(model)
    quantize(module, recipe, model, batches(model))
    linear: Any = module.get_submodule("decoder.layers.4.mlp.linear_fc2")
    assert linear.weight_quantizer(linear.weight).shape == linear.weight.shape == (64, 16)
    folder = export(module, recipe, tmp_path / "export", model)
    assert folder.bytes("backbone.layers.4.mixer.down_proj.weight_scale").shape == (64, 1, 1)
    assert folder.nvfp4("backbone.layers.4.mixer.down_proj").shape == (64, 16)
