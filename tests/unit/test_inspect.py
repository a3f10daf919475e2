"""The command that looks at a finished folder: what it counts, and every kind of damage that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_qad import export
from nemo_qad.huggingface.engines import Weight, cut_problems, engine_problems
from nemo_qad.huggingface.inspect import inspect_folder

ROWS, COLUMNS = 256, 512
LAYER = "model.layers.0"
QUANTISATION = {
    "quant_algo": "W4A16_NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
    "exclude_modules": [f"{LAYER}.self_attn.{name}_proj" for name in "kqv"],
}  # fmt: skip
Tensors = dict[str, Tensor]
Settings = dict[str, Any]


def checkpoint(folder: Path, change: Callable[[Tensors, Settings], None] | None = None) -> Path:
    """One NVFP4 linear, three BF16 ones, K and V scales."""
    random = torch.Generator().manual_seed(1)
    scales = torch.rand(ROWS, COLUMNS // 16, generator=random) + 0.5
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 32, generator=random).bfloat16(),
        f"{LAYER}.mlp.down_proj.weight": torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=random).byte(),
        f"{LAYER}.mlp.down_proj.weight_scale": scales.to(torch.float8_e4m3fn),
        f"{LAYER}.mlp.down_proj.weight_scale_2": torch.tensor(0.01),
        **{f"{LAYER}.self_attn.{x}_proj.weight": torch.randn(32, 32, generator=random).bfloat16() for x in "qkv"},
        **{f"{LAYER}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.02) for x in "kv"},
    }
    settings: Settings = {"plan": dict(QUANTISATION), "architectures": ["LlamaForCausalLM"]}
    if change is not None:
        change(tensors, settings)
    plan = settings["plan"]
    own = {key: plan.get(key) for key in ("quant_algo", "kv_cache_quant_algo")} | {"quant_method": "modelopt"}
    own["ignore"] = plan.get("exclude_modules")
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": settings["architectures"], "quantization_config": own}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": plan}))
    return folder


def source_of(folder: Path, target: Path) -> Path:
    """The BF16 checkpoint that `checkpoint` could come from."""
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.endswith(("_scale", "_2"))}
    tensors[f"{LAYER}.mlp.down_proj.weight"] = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text("{}")
    return target


def test_a_sound_folder_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "export")
    source = source_of(folder, tmp_path / "source")
    found = inspect_folder(folder, source=source, engine="vllm", tensor_parallel=4)
    assert found.problems == [] and found.remarks == []
    assert found.linears == {"NVFP4": 1, "FP8": 0} and found.num_kv_scales == 2 and found.num_tensors == 9
    assert found.bits["NVFP4"] == pytest.approx(4.5 + 32 / (ROWS * COLUMNS))
    arguments = ["--verify", str(folder), "--source", str(source), "--engine", "vllm", "--tensor-parallel", "4"]
    assert export.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "All of it is as it should be." and max(map(len, lines)) <= 80
    assert any("4.50 bits" in line for line in lines)


def _fp8_bytes(tensors: Tensors, settings: Settings) -> None:
    """Labelled NVFP4, stored with a byte a weight."""
    tensors[f"{LAYER}.mlp.down_proj.weight"] = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)
    tensors[f"{LAYER}.mlp.down_proj.weight_scale"] = torch.ones(ROWS, COLUMNS // 8).to(torch.float8_e4m3fn)


def _nan(tensors: Tensors, settings: Settings) -> None:
    tensors[f"{LAYER}.mlp.down_proj.weight_scale"].view(torch.uint8)[3, 4] = 0x7F


def _zero(tensors: Tensors, settings: Settings) -> None:
    tensors[f"{LAYER}.mlp.down_proj.weight_scale_2"].zero_()


def _no_kv(tensors: Tensors, settings: Settings) -> None:
    del tensors[f"{LAYER}.self_attn.k_proj.k_scale"]


def _not_excluded(tensors: Tensors, settings: Settings) -> None:
    settings["plan"]["exclude_modules"] = []


def _both(tensors: Tensors, settings: Settings) -> None:
    settings["plan"]["exclude_modules"].append(f"{LAYER}.mlp.down_proj")


def _fp32(tensors: Tensors, settings: Settings) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()


def _lost(tensors: Tensors, settings: Settings) -> None:
    del tensors["model.embed_tokens.weight"]


def _no_group(tensors: Tensors, settings: Settings) -> None:
    del settings["plan"]["group_size"]


def _algorithm(tensors: Tensors, settings: Settings) -> None:
    settings["plan"]["kv_cache_quant_algo"] = "INT8"


DAMAGES: list[tuple[Callable[[Tensors, Settings], None], list[str]]] = [
    (_fp8_bytes, ["shape [256, 1024], the source has [256, 512]"]),
    (_nan, ["down_proj.weight_scale", "NaN"]),
    (_zero, ["down_proj.weight_scale_2", "zero"]),
    (_no_kv, ["k_proj.k_scale: missing"]),
    (_not_excluded, ["q_proj.weight", "neither quantised nor excluded"]),
    (_both, ["down_proj.weight", "quantised and excluded"]),
    (_fp32, ["embed_tokens.weight: F32, the source has BF16"]),
    (_lost, ["embed_tokens.weight: in the source and not here"]),
    (_no_group, ["vllm: hf_quant_config.json lacks group_size"]),
    (_algorithm, ["kv_cache_quant_algo 'INT8'"]),
]


@pytest.mark.parametrize(("change", "words"), DAMAGES)
def test_each_damage_is_named(
    change: Callable[[Tensors, Settings], None], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(checkpoint(tmp_path / "good"), tmp_path / "source")
    folder = checkpoint(tmp_path / "bad", change)
    assert export.main(["--verify", str(folder), "--source", str(source), "--engine", "vllm"]) == 1
    output = capsys.readouterr().out
    assert all(word in output for word in words), output
    assert output.splitlines()[-1].endswith("export it again, or ask for another layout")


def test_bits_tell_a_byte_from_a_nibble(tmp_path: Path) -> None:
    """Without its source, the width of the block scales gives away a weight that was not packed."""
    def unpacked(tensors: Tensors, settings: Settings) -> None:
        tensors[f"{LAYER}.mlp.down_proj.weight"] = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)

    problems = inspect_folder(checkpoint(tmp_path / "bad", unpacked)).problems
    assert any("weight_scale" in problem and "not F8_E4M3" in problem for problem in problems), problems


def test_layers_that_tensor_parallelism_cuts_are_listed() -> None:
    names = [f"backbone.layers.{layer}.mixer.experts.{expert}.down_proj" for layer in (1, 3) for expert in (0, 1)]
    experts = dict.fromkeys(names, Weight(2688, 1856, True))
    broken, odd = cut_problems({**experts, "backbone.layers.0.mixer.in_proj": Weight(10304, 2688, True)}, 8)
    assert broken == [
        "backbone.layers.*.mixer.experts.*.down_proj: 1856 columns over 8 ranks are 232 each, which cuts a block of 16 "
        "(4 linears)"
    ]
    assert odd == []
    broken, odd = cut_problems(experts, 4)
    assert broken == [] and "464 each, no multiple of 64" in odd[0]
    assert cut_problems(experts, 1) == ([], [])
    assert "256 rows over 3 ranks do not divide" in cut_problems({"q_proj": Weight(256, 64, True)}, 3)[0][0]


def test_a_mixed_table_names_what_an_engine_would_skip() -> None:
    plan = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8"}}}
    config = {"architectures": ["A"], "quantization_config": {"quant_method": "modelopt"}}
    assert "would silently stay unquantised" in next(engine_problems("vllm", config, plan))
    assert list(engine_problems("tensorrt_llm", config, {"quant_algo": "MIXED_PRECISION"}))
    assert "architectures" in next(engine_problems("sglang", {**config, "architectures": []}, {"quant_algo": "FP8"}))


def test_folders_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--verify", str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert export.main(["--verify", str(tmp_path)]) == 1
    assert "no .safetensors" in capsys.readouterr().err
