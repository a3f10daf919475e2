"""A teacher's sparse logits on disk: what is written is read, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_qad.distillation.teacher_file import INDEX, UNFINISHED, Contents, Part, TeacherFile, token_hashes
from nemo_qad.distillation.teacher_writer import Writer
from nemo_qad.errors import UserError

REMEDY = "Make another one."
VOCAB_SIZE, BATCH = 50, 2
MULTIPLE = {"train": BATCH, "validation": 3}
CONTENTS = Contents(
    tokenizer="a" * 64,
    data="b" * 64,
    teacher="c" * 64,
    vocab_size=VOCAB_SIZE,
    seed=7,
    parts={
        "train": Part("top_k", sparse_values=5, temperature=1.5, sequence_length=9, num_samples=14),
        "validation": Part("top_k", sparse_values=5, temperature=1.0, sequence_length=6, num_samples=7),
    },
)
SHARD_BYTES = 4 * CONTENTS.parts["train"].bytes_per_sample + 100  # 4 samples: train has shards of 4, 4, 4 and 2
SHARDS = [f"train-{i:05d}.safetensors" for i in range(4)] + [f"validation-{i:05d}.safetensors" for i in range(2)]


def made(contents: Contents, part: str) -> dict[str, Tensor]:
    """All samples of a part: tokens, indices, log_prob, and log_tail where there is one."""
    generator = torch.Generator().manual_seed(len(part))
    facts = contents.parts[part]
    size = (facts.num_samples, facts.sequence_length)
    logits = torch.randn(*size, VOCAB_SIZE, generator=generator)
    best = logits.log_softmax(-1).topk(facts.sparse_values)
    tensors = {
        "tokens": torch.randint(0, VOCAB_SIZE, size, generator=generator),
        "indices": best.indices.int(),
        "log_prob": best.values,
    }
    if facts.kind == "top_k":
        tensors["log_tail"] = (1 - best.values.exp().sum(-1)).log()
    return tensors


def write(folder: Path, contents: Contents = CONTENTS, *, num_shards: int = 99) -> Writer:
    """Writes the first `num_shards` of the shards that are missing, and the index if none is left."""
    writer = Writer(folder, contents, MULTIPLE, SHARD_BYTES)
    for shard in writer.missing[:num_shards]:
        everything, size = made(contents, shard.part), MULTIPLE[shard.part]
        starts = range(shard.start, shard.stop, size)
        writer.write(shard, [{k: t[s : min(s + size, shard.stop)] for k, t in everything.items()} for s in starts])
    if not writer.missing:
        writer.finish()
    return writer


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "logits")
    return tmp_path / "logits"


def test_what_is_written_is_read_across_the_borders_of_shards(folder):
    assert sorted(files(folder)) == sorted([INDEX, *SHARDS])
    file = TeacherFile(folder, CONTENTS, REMEDY)
    for part, start, stop in [("train", 0, 2), ("train", 3, 13), ("train", 13, 14), ("validation", 2, 7)]:
        everything = made(CONTENTS, part)
        read = file.read(part, start, everything["tokens"][start:stop])
        assert {name: tensor.dtype for name, tensor in read.items()} == {
            "teacher_indices": torch.int32, "teacher_log_prob": torch.float32, "teacher_log_tail": torch.float32,
        }  # fmt: skip
        for name, tensor in read.items():
            assert torch.equal(tensor, everything[name.removeprefix("teacher_")][start:stop]), name


def test_a_file_for_a_longer_run_serves_a_shorter_one(folder):
    shorter = {**CONTENTS.parts, "train": replace(CONTENTS.parts["train"], num_samples=6)}
    tokens = made(CONTENTS, "train")["tokens"]
    TeacherFile(folder, replace(CONTENTS, parts=shorter), REMEDY).read("train", 4, tokens[4:6])


def test_sampled_values_have_no_tail(tmp_path):
    sampled = replace(CONTENTS, parts={**CONTENTS.parts, "train": replace(CONTENTS.parts["train"], kind="sampled")})
    write(tmp_path, sampled)
    file = TeacherFile(tmp_path, sampled, REMEDY)
    assert set(file.read("train", 0, made(sampled, "train")["tokens"][:2])) == {"teacher_indices", "teacher_log_prob"}
    assert "teacher_log_tail" in file.read("validation", 0, made(sampled, "validation")["tokens"][:2])


def _other(part: str, **values: object) -> Contents:
    return replace(CONTENTS, parts={**CONTENTS.parts, part: replace(CONTENTS.parts[part], **values)})


DIFFERENT = {
    "tokenizer": (replace(CONTENTS, tokenizer="d" * 64), "tokenizer is aaaaaaaaaaaa there and dddddddddddd"),
    "data": (replace(CONTENTS, data="d" * 64), "data is bbbbbbbbbbbb there and dddddddddddd"),
    "teacher": (replace(CONTENTS, teacher="d" * 64), "teacher is cccccccccccc there and dddddddddddd"),
    "vocab_size": (replace(CONTENTS, vocab_size=51), "vocab_size is 50 there and 51 in this run (model.vocab_size)"),
    "seed": (replace(CONTENTS, seed=8), "seed is 7 there and 8 in this run (seed)"),
    "kind": (_other("train", kind="sampled"), "train.kind is top_k there and sampled in this run (qad.loss)"),
    "K": (_other("train", sparse_values=6), "train.sparse_values is 5 there and 6 in this run (qad.sparse_values)"),
    "temperature": (_other("train", temperature=2.0), "train.temperature is 1.5 there and 2.0 in this run (qad.temp"),
    "length": (_other("train", sequence_length=8), "sequence_length is 9 there and 8 in this run (qad.sequence_"),
    "held-out length": (_other("validation", sequence_length=8), "is 6 there and 8 in this run (evaluation.seq"),
    "fewer samples": (_other("train", num_samples=15), "train.num_samples is 14 there and at least 15 in this run ("),
    "fewer held-out": (_other("validation", num_samples=8), "is 7 there and at least 8 in this run (qad.validation_"),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_file_made_for_something_else_is_refused(folder, difference):
    contents, message = DIFFERENT[difference]
    with pytest.raises(UserError) as refused:
        TeacherFile(folder, contents, REMEDY)
    text = str(refused.value)
    assert str(folder) in text and message in text and text.endswith(REMEDY), text


def test_every_difference_is_named_at_once(folder):
    with pytest.raises(UserError, match=r"tokenizer is .*; data is .*; seed is 7 there and 9"):
        TeacherFile(folder, replace(CONTENTS, tokenizer="d" * 64, data="e" * 64, seed=9), REMEDY)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing"),
        (lambda f: (f / SHARDS[5]).write_bytes((f / SHARDS[5]).read_bytes()[:-1]), "truncated"),
        (lambda f: (f / SHARDS[0]).write_bytes(b""), "truncated"),
        (lambda f: (f / INDEX).unlink(), "not a finished folder"),
        (lambda f: (f / INDEX).write_text("{"), "not JSON"),
        (lambda f: (f / INDEX).write_text("[]"), "format=None"),
        (lambda f: edit_index(f, lambda index: index.update(format=2)), "format=2, and this program reads format 1"),
        (lambda f: edit_index(f, lambda index: index.pop("seed")), "incomplete"),
        (lambda f: edit_index(f, lambda index: index["parts"].pop("validation")), "incomplete"),
        (lambda f: edit_index(f, lambda index: index["parts"]["train"]["shards"].pop()), "num_samples"),
        (
            lambda f: edit_index(f, lambda index: index["parts"]["train"]["shards"][0].update(file="../x")),
            "'../x' is not the name of a file in this folder",
        ),
    ],
)
def test_damage_is_refused_when_the_folder_is_opened(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError) as refused:
        TeacherFile(folder, CONTENTS, REMEDY)
    text = str(refused.value)
    assert str(folder) in text and message in text and text.endswith(REMEDY), text


def test_a_changed_shard_is_refused_when_it_is_first_read(folder):
    path = folder / SHARDS[1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    file, tokens = TeacherFile(folder, CONTENTS, REMEDY), made(CONTENTS, "train")["tokens"]
    file.read("train", 0, tokens[:4])
    with pytest.raises(UserError, match=rf"{SHARDS[1]} changed since it was written.*{REMEDY}"):
        file.read("train", 4, tokens[4:6])


def test_other_tokens_are_refused_with_their_number(folder):
    file, tokens = TeacherFile(folder, CONTENTS, REMEDY), made(CONTENTS, "train")["tokens"]
    swapped = tokens[[4, 6, 5]]
    with pytest.raises(UserError, match=rf"sample 5 of train: token_hash=-?\d+ there and -?\d+ in.*{REMEDY}"):
        file.read("train", 4, swapped)


def test_token_hashes_tell_single_tokens_and_their_order_apart():
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [2, 1, 3], [1, 2, 3]])
    hashes = token_hashes(tokens).tolist()
    assert hashes[0] == hashes[3] and len(set(hashes)) == 3
    assert hashes[0] == -5405627362230748553  # what is on disk must mean the same tomorrow


def test_interrupted_writing_continues_to_the_same_bytes(folder, tmp_path):
    other = tmp_path / "stopped"
    write(other, num_shards=2)
    assert sorted(files(other)) == sorted([UNFINISHED, *SHARDS[:2]])
    with pytest.raises(UserError, match="not a finished folder"):
        TeacherFile(other, CONTENTS, REMEDY)
    (other / f".{SHARDS[2]}.123.tmp").write_bytes(b"what a killed writer leaves")
    before = (other / SHARDS[0]).stat().st_mtime_ns
    writer = Writer(other, CONTENTS, MULTIPLE, SHARD_BYTES)
    assert [shard.file for shard in writer.missing] == SHARDS[2:] and writer.num_written == 8
    write(other, num_shards=3)
    write(other)
    assert files(other) == files(folder)
    assert (other / SHARDS[0]).stat().st_mtime_ns == before


def test_a_shard_that_was_damaged_meanwhile_is_written_again(folder, tmp_path):
    other = tmp_path / "stopped"
    write(other, num_shards=3)
    raw = bytearray((other / SHARDS[1]).read_bytes())
    raw[-1] ^= 1
    (other / SHARDS[1]).write_bytes(raw)
    assert Writer(other, CONTENTS, MULTIPLE, SHARD_BYTES).missing[0].file == SHARDS[1]
    write(other)
    assert files(other) == files(folder)


def test_shards_of_other_contents_are_not_continued(tmp_path):
    write(tmp_path, num_shards=3)
    writer = Writer(tmp_path, replace(CONTENTS, teacher="d" * 64), MULTIPLE, SHARD_BYTES)
    assert [shard.file for shard in writer.missing] == SHARDS


def test_size_is_known_before_anything_is_written(tmp_path):
    expected = Writer(tmp_path, CONTENTS, MULTIPLE, SHARD_BYTES).num_bytes
    assert not list(tmp_path.iterdir())
    write(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert expected < written < expected + 1000 * len(SHARDS)  # the headers
    assert Writer(tmp_path, CONTENTS, MULTIPLE, SHARD_BYTES).num_bytes == expected  # an index is not a journal


def test_shards_hold_whole_batches_however_large():
    writer = Writer(Path("nowhere"), CONTENTS, {"train": 5, "validation": 3}, shard_bytes=1)
    assert [shard.stop - shard.start for shard in writer.shards] == [5, 5, 4, 3, 3, 1]


def test_nan_of_the_teacher_is_refused_and_leaves_nothing(tmp_path):
    writer = Writer(tmp_path, CONTENTS, MULTIPLE, SHARD_BYTES)
    shard, everything = writer.missing[1], made(CONTENTS, "train")
    everything["log_tail"][5, 3] = torch.nan
    with pytest.raises(UserError, match=r"log_tail is NaN in samples 4 to 7"):
        writer.write(shard, [{name: tensor[4:8] for name, tensor in everything.items()}])
    assert not list(tmp_path.iterdir())
