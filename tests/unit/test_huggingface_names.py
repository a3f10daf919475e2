"""Hugging Face checkpoints: names, shapes, a byte-exact round trip, and refusals that name the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_qad import config, runtime
from nemo_qad.errors import UserError
from nemo_qad.huggingface.architectures import hf_config
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.names import linear_names, mappings, num_parameters, shapes, to_hf, to_mcore
from nemo_qad.huggingface.save import save_bf16, write_folder
from nemo_qad.huggingface.weight_files import weights_digest
from nemo_qad.models.build import build_model
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, ParallelConfig, Precision

ONE_RANK = ParallelConfig(name="one")


def small_model(**changes: object) -> ModelConfig:
    fields: dict = {
        "name": "small",
        "hybrid_pattern": "M*E-",
        "hidden_size": 32,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 48,
        "precision": Precision.bf16,
        "attention": AttentionConfig(num_heads=6, num_query_groups=2, head_dim=8),
        "mamba": MambaConfig(num_heads=4, head_dim=8, num_groups=2, state_dim=4),
        "moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_expert_ffn_hidden_size=24),
    }
    return ModelConfig(**(fields | changes))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ONE_RANK, seed=1, threads=1):
        yield


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Tensor]:
    """A checkpoint of `small_model` with a distinct value in nearly every place."""
    random = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes(small_model()).items()}
    bias = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    tensors[bias] = tensors[bias].float() + 1e-4  # FP32 on disk: BF16 would lose this
    return tensors


def write(tensors: dict[str, Tensor], folder: Path, **options: object) -> Path:
    model = small_model()
    write_folder(
        tensors.items(),
        folder,
        **{"config": hf_config(model), "extra_json": {}, "tokenizer_folder": None, "max_shard_gb": 1.0, **options},
    )
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("max_shard_gb", [1.0, 1e-5])
def test_round_trip_is_byte_equal(
    checkpoint: dict[str, Tensor], precision: Precision, max_shard_gb: float, tmp_path: Path
) -> None:
    model = small_model(precision=precision)
    module = build_model(model, ONE_RANK, sequence_length=8)
    load_weights(module, write(checkpoint, tmp_path / "in"), model)
    save_bf16(module, tmp_path / "out", model, None, max_shard_gb)
    found = read(tmp_path / "out")
    assert found.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert ("model.safetensors" in files) == (max_shard_gb == 1.0)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == hf_config(model)


def test_every_tensor_of_the_module_is_mapped_with_its_size() -> None:
    model = small_model()
    module = build_model(model, ONE_RANK, sequence_length=8)
    own = dict(module.named_parameters()) | {
        name: buffer for name, buffer in module.named_buffers() if not name.endswith("local_tokens_per_expert")
    }
    table = {mapping.mcore: mapping for mapping in mappings(model)}
    assert table.keys() == own.keys()
    for name, tensor in own.items():
        blank = {hf: torch.zeros(shape) for hf, shape in zip(table[name].hf, table[name].shapes, strict=True)}
        assert to_mcore(table[name], blank, model).shape == tensor.shape, name


def test_linear_names_are_the_linear_modules() -> None:
    model = small_model()
    module = build_model(model, ONE_RANK, sequence_length=8)
    linears = {n for n, m in module.named_modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)}
    names = linear_names(model)
    assert names.keys() == linears
    assert names["decoder.layers.1.self_attention.linear_qkv"] == (
        "backbone.layers.1.mixer.q_proj",
        "backbone.layers.1.mixer.k_proj",
        "backbone.layers.1.mixer.v_proj",
    )


def test_fused_projection_holds_query_key_and_value_group_by_group() -> None:
    model = small_model()  # 3 query heads a group, 8 rows a head: 24 + 8 + 8 rows a group
    mapping = next(m for m in mappings(model) if "linear_qkv" in m.mcore)
    rows = torch.arange(80)[:, None].expand(80, 5)
    q, k, v = (part[:, 0].tolist() for part in to_hf(mapping, rows, model).values())
    assert q == [*range(24), *range(40, 64)]
    assert k == [*range(24, 32), *range(64, 72)]
    assert v == [*range(32, 40), *range(72, 80)]
    assert torch.equal(to_mcore(mapping, to_hf(mapping, rows, model), model), rows)


def test_vocabulary_padding_is_cut_and_comes_back_as_zeros() -> None:
    model = small_model()
    mapping = mappings(model)[0]
    padded = torch.ones(128, 32)
    (cut,) = to_hf(mapping, padded, model).values()
    assert cut.shape == (100, 32)
    back = to_mcore(mapping, {mapping.hf[0]: cut}, model)
    assert back.shape == padded.shape and back[100:].abs().max() == 0


def test_released_model_has_its_published_size() -> None:
    nano = config.compose(["+recipe=four_over_six", "model=nemotron_3_nano_30b_a3b", "teacher.path=/teacher"]).model
    assert num_parameters(nano) == 31_577_940_288
    assert len(shapes(nano)) == 6_243
    assert shapes(nano)["backbone.layers.0.mixer.in_proj.weight"] == (10_304, 2_688)
    assert shapes(nano)["backbone.layers.0.mixer.conv1d.weight"] == (6_144, 1, 4)


def test_tied_output_layer_is_stored_once(tmp_path: Path) -> None:
    model = small_model(tied_output=True)
    assert "lm_head.weight" not in shapes(model)
    module = build_model(model, ONE_RANK, sequence_length=8)
    save_bf16(module, tmp_path / "tied", model, None, 1.0)
    load_weights(module, tmp_path / "tied", model)


EXPERT = "backbone.layers.2.mixer.experts.3.up_proj.weight"
FINAL_NORM = "backbone.norm_f.weight"
Damage = Callable[[dict[str, Tensor]], object]
EXTRA = "backbone.layers.9.norm.weight"
NAN_ROW = torch.tensor(7)
DAMAGES: dict[str, tuple[str, str, Damage]] = {
    "missing": (EXPERT, "missing", lambda t: t.pop(EXPERT)),
    "extra": (EXTRA, "not part of", lambda t: t.update({EXTRA: torch.ones(2)})),
    "misshapen": (EXPERT, "wrong shape", lambda t: t.update({EXPERT: t[EXPERT].t().contiguous()})),
    "all zero": (EXPERT, "all zero", lambda t: t.update({EXPERT: torch.zeros(16, 32)})),
    "constant": (EXPERT, "constant", lambda t: t.update({EXPERT: torch.full((16, 32), 0.5)})),
    "NaN": (EXPERT, "NaN", lambda t: t.update({EXPERT: t[EXPERT].index_fill(0, NAN_ROW, float("nan"))})),
    "infinite": ("lm_head.weight", "Inf", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] / 0})),
    "zero norm": (FINAL_NORM, "all zero", lambda t: t.update({FINAL_NORM: torch.zeros(32)})),
    "quantised": (EXPERT, "quantised", lambda t: t.update({EXPERT: torch.ones(16, 32, dtype=torch.uint8)})),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_tensor_stops_with_its_name(checkpoint: dict[str, Tensor], damage: str, tmp_path: Path) -> None:
    name, problem, apply = DAMAGES[damage]
    tensors = dict(checkpoint)
    apply(tensors)
    module = build_model(small_model(), ONE_RANK, sequence_length=8)
    with pytest.raises(UserError, match=problem) as caught:
        load_weights(module, write(tensors, tmp_path / "bad"), small_model())
    assert name in str(caught.value)


def test_constant_norms_and_zero_expert_bias_are_sound(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    changed = {
        name: torch.ones_like(t) if name.endswith("norm.weight") else torch.zeros_like(t)
        for name, t in checkpoint.items()
        if name.endswith(("norm.weight", "e_score_correction_bias", "conv1d.bias"))
    }
    folder = write(checkpoint | changed, tmp_path / "sound")
    load_weights(build_model(small_model(), ONE_RANK, sequence_length=8), folder, small_model())


@pytest.mark.parametrize("kept_bytes", [5, 300, -1])
def test_a_truncated_file_is_named(checkpoint: dict[str, Tensor], kept_bytes: int, tmp_path: Path) -> None:
    folder = write(checkpoint, tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    module = build_model(small_model(), ONE_RANK, sequence_length=8)
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        load_weights(module, folder, small_model())


def test_a_missing_shard_a_bad_index_and_an_empty_folder_are_named(
    checkpoint: dict[str, Tensor], tmp_path: Path
) -> None:
    module = build_model(small_model(), ONE_RANK, sequence_length=8)
    folder = write(checkpoint, tmp_path / "shards", max_shard_gb=1e-5)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=lost.name):
        load_weights(module, folder, small_model())
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not a safetensors index"):
        load_weights(module, folder, small_model())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds neither"):
        load_weights(module, tmp_path / "empty", small_model())


def test_a_config_of_another_model_is_refused_by_field(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(checkpoint, tmp_path / "other", config=hf_config(small_model()) | {"num_experts_per_tok": 3})
    module = build_model(small_model(), ONE_RANK, sequence_length=8)
    with pytest.raises(UserError, match="num_experts_per_tok=3"):
        load_weights(module, folder, small_model())


def test_a_failed_write_leaves_the_old_folder(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(checkpoint, tmp_path / "kept")
    before = weights_digest(folder)

    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(2)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_folder(breaks(), folder, config={}, extra_json={}, tokenizer_folder=None, max_shard_gb=1.0)
    assert weights_digest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_digest_follows_the_weights(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    first = weights_digest(write(checkpoint, tmp_path / "one"))
    assert weights_digest(write(checkpoint, tmp_path / "two")) == first
    changed = dict(checkpoint)
    changed[EXPERT] = changed[EXPERT].clone()
    changed[EXPERT][0, 0] += 1
    assert weights_digest(write(changed, tmp_path / "three")) != first


def test_a_tensor_in_two_files_is_refused(checkpoint: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(checkpoint, tmp_path / "twice", max_shard_gb=1e-5)
    path = sorted(folder.glob("*.safetensors"))[-1]
    save_file(load_file(path) | {EXPERT: checkpoint[EXPERT]}, path)
    with pytest.raises(UserError, match="in another file"):
        load_weights(build_model(small_model(), ONE_RANK, sequence_length=8), folder, small_model())
