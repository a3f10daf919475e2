"""Scales of the KV cache: observed in calibration, then frozen, then shipped as they are (E16)."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from modelopt.torch.quantization.plugins import megatron as modelopt_megatron
from safetensors.torch import load_file
from small_model import batches, build, load_recipe, small_model
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.huggingface.export import export_student
from nemo_qad.models.build import forward_hidden, forward_logits
from nemo_qad.quantization.calibrate import Calibrated, quantize
from nemo_qad.quantization.recipes import rules
from nemo_qad.schema import KvFormat, ParallelConfig

MODEL = small_model(hybrid_pattern="M*E*")
ATTENTION = [f"decoder.layers.{layer}.self_attention.core_attention" for layer in (1, 3)]
SCALED = {KvFormat.fp8: 448.0, KvFormat.nvfp4: 6.0 * 448.0}  # amax / scale
CASES = pytest.mark.parametrize("kv_format", list(SCALED))


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=1):
        yield


def recipe(kv_format: KvFormat) -> Any:
    return load_recipe("four_over_six", kv_cache=kv_format)


def attentions(module: nn.Module) -> list[Any]:
    return [module.get_submodule(name) for name in ATTENTION]


def amaxes(module: nn.Module) -> list[Tensor]:
    """Of K and V of each layer."""
    return [q.amax.clone() for a in attentions(module) for q in (a.k_bmm_quantizer, a.v_bmm_quantizer)]


def watch(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Fills two lists as the model runs: the outputs of its attention layers, and max |K|, max |V| of each call."""
    outputs: list[Tensor] = []
    largest: list[Tensor] = []
    for attention in attentions(module):
        attention.register_forward_pre_hook(lambda _, args: largest.extend(x.detach().abs().amax() for x in args[1:3]))
        attention.register_forward_hook(lambda _, __, out: outputs.append(out.detach().clone()))
    return outputs, largest


def calibrated(kv_format: KvFormat, samples: list[dict[str, Tensor]] | None = None) -> nn.Module:
    module = build(MODEL)
    quantize(module, recipe(kv_format), MODEL, batches(MODEL) if samples is None else samples)
    return module


@CASES
def test_calibration_observes_and_changes_nothing(kv_format: KvFormat) -> None:
    """What attention gives while it is calibrated is what the plain model gives, bit for bit; weights too are plain."""
    plain, module = build(MODEL), build(MODEL)
    expected, of_plain = watch(plain)
    found, of_calibration = watch(module)
    with torch.no_grad():
        for batch in batches(MODEL):
            forward_hidden(plain, batch["tokens"])
    quantize(module, recipe(kv_format), MODEL, batches(MODEL))
    assert len(expected) == len(found) == 2 * 3
    assert all(torch.equal(got, right) for got, right in zip(found, expected, strict=True))
    assert all(torch.equal(got, right) for got, right in zip(of_calibration, of_plain, strict=True))
    found.clear()
    with torch.no_grad():
        forward_hidden(module, batches(MODEL)[0]["tokens"])
    assert not torch.equal(found[0], expected[0])  # afterwards it is quantised


@CASES
def test_scale_is_the_maximum_whatever_the_order_of_batches(kv_format: KvFormat) -> None:
    samples, results = batches(MODEL, 3), []
    plain = build(MODEL)
    _, largest = watch(plain)
    with torch.no_grad():
        for batch in samples:
            forward_hidden(plain, batch["tokens"])
    values = torch.stack(largest).view(3, 4)  # batch, then K and V of the first layer, of the second
    assert (values != values.amax(0)).sum() == 2 * 4  # one batch alone has the maximum
    for order in itertools.permutations(samples):
        results.append(torch.stack(amaxes(calibrated(kv_format, list(order)))))
    assert all(torch.equal(found, values.amax(0)) for found in results)


@CASES
@pytest.mark.parametrize("training", [False, True])
def test_scale_stays_when_larger_values_come(kv_format: KvFormat, training: bool) -> None:
    """K and V eight times as large: they saturate at the frozen scale."""
    module = calibrated(kv_format)
    before = amaxes(module)
    with torch.no_grad():
        for attention in ("decoder.layers.1.self_attention", "decoder.layers.3.self_attention"):
            module.get_submodule(attention).linear_qkv.weight.mul_(8.0)
    _, largest = watch(module)
    kept: list[Tensor] = []
    for attention in attentions(module):
        for quantizer in (attention.k_bmm_quantizer, attention.v_bmm_quantizer):
            quantizer.register_forward_hook(lambda _, __, out: kept.append(out.detach().abs().amax()))
    module.train(training)
    forward_logits(module, batches(MODEL)[0]["tokens"]).square().mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(amaxes(module), before, strict=True))
    for came, passed, amax in zip(largest, kept, before, strict=True):
        assert came > 4 * amax
        torch.testing.assert_close(passed, amax.view(()), rtol=1e-6, atol=0)


@CASES
@pytest.mark.parametrize("factor", [1.0, 2.0**-12])
def test_exported_scales_are_the_calibrated_ones(kv_format: KvFormat, factor: float, tmp_path: Path) -> None:
    """Also where they are far below 1, to which some exporters raise them."""
    module = build(MODEL)
    with torch.no_grad():
        for layer in (1, 3):
            module.get_submodule(f"decoder.layers.{layer}.self_attention").linear_qkv.weight.mul_(factor)
    quantize(module, recipe(kv_format), MODEL, batches(MODEL))
    export_student(module, tmp_path / "export", MODEL, recipe(kv_format), None, 5.0)
    stored = load_file(tmp_path / "export" / "model.safetensors")
    names = [f"backbone.layers.{layer}.mixer.{w}_proj.{w}_scale" for layer in (1, 3) for w in "kv"]
    assert [name for name in stored if name.endswith(("k_scale", "v_scale"))] == names
    for name, amax in zip(names, amaxes(module), strict=True):
        scale = stored[name]
        assert scale.shape == () and scale.dtype == torch.float32
        assert 0 < scale < 0.1 * factor
        torch.testing.assert_close(scale * SCALED[kv_format], amax.view(()), rtol=2e-7, atol=0)


def set_largest(module: nn.Module, k: float, v: float) -> None:
    """From now on the largest |K| and |V| that attention sees are exactly these."""

    def rescale(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        key, value = (x / x.abs().amax() * wanted for x, wanted in zip(args[1:3], (k, v), strict=True))
        return args[0], key, value, *args[3:]

    for attention in attentions(module):
        attention.register_forward_pre_hook(rescale)


@CASES
def test_scales_that_are_all_one_are_warned_of(kv_format: KvFormat) -> None:
    """Engines take 1 where a checkpoint says nothing, so a calibration that gives it everywhere gave nothing."""

    def warnings(k: float, v: float) -> list[str]:
        module = build(MODEL)
        set_largest(module, k * SCALED[kv_format], v * SCALED[kv_format])
        result: Calibrated = quantize(module, recipe(kv_format), MODEL, batches(MODEL))
        assert torch.equal(torch.stack(amaxes(module)), torch.tensor([k, v, k, v]) * SCALED[kv_format])
        return [text for text in result.warnings if "KV cache" in text]

    assert len(warnings(1.0, 1.0)) == 1
    assert warnings(1.0, 0.5) == warnings(0.5, 0.5) == []
    assert quantize(build(MODEL), recipe(kv_format), MODEL, batches(MODEL)).warnings == []


def test_transformer_engines_attention_has_the_quantizers_that_our_rules_name() -> None:
    """Read from ModelOpt's source, which defines the class only where Transformer Engine is installed."""
    tree = ast.parse(Path(modelopt_megatron.__file__).read_text())
    classes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("QuantModuleRegistry.register({TEDotProductAttention:" in ast.unparse(d) for d in node.decorator_list)
    ]
    assert len(classes) == 1
    functions = {node.name: node for node in classes[0].body if isinstance(node, ast.FunctionDef)}
    made = {ast.unparse(n) for n in ast.walk(functions["_setup"]) if isinstance(n, ast.Assign)}
    called = {ast.unparse(n) for n in ast.walk(functions["forward"]) if isinstance(n, ast.Assign | ast.Return)}
    named = {
        entry["quantizer_name"].rpartition(".")[2]: entry["cfg"]
        for entry in rules(recipe(KvFormat.fp8), MODEL).quant_cfg
        if "core_attention" in entry["quantizer_name"]
    }
    assert named.keys() == {"k_bmm_quantizer", "v_bmm_quantizer"}
    for name, tensor in (("k_bmm_quantizer", "key"), ("v_bmm_quantizer", "value")):
        assert f"self.{name} = TensorQuantizer()" in made
        assert f"{tensor} = self.{name}({tensor})" in called
    assert any("super().forward(query, key, value" in text for text in called)
