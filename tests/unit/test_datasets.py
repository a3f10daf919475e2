"""Prepared data, its cache, the .bin/.idx checks, and the order in which samples come."""

from __future__ import annotations

import itertools
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, small_data_config

from nemo_qad.data import corpus, indexed, tokenizer
from nemo_qad.data.datasets import Batch, held_out_batches, training_batches, unigram_loss
from nemo_qad.data.prepare import PreparedData, cache_key, prepare
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.schema import DataConfig, Source

S = 32


def write_pairs(folder: Path, documents: list[list[int]], vocab_size: int = 50) -> DataConfig:
    """A user's folder: two pairs with the same text, and a small tokenizer."""
    folder.mkdir(exist_ok=True)
    for name in ("train", "held_out"):
        indexed.write(folder / name, [np.array(d, dtype=np.int64) for d in documents], vocab_size)
    tokenizer.save(tokenizer.train(["some text"], 512), folder)
    return DataConfig(name="own", source=Source.indexed, path=str(folder))


def open_pairs(folder: Path, documents: list[list[int]]) -> PreparedData:
    return prepare(write_pairs(folder, documents), 512, folder / "unused", lambda text: None)


def numbered(num_documents: int, length: int) -> list[list[int]]:
    """Documents in which every token is unique, so that a sample names its place in the text."""
    return [list(range(d * length, (d + 1) * length)) for d in range(num_documents)]


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch["tokens"].tolist()]


def stream(prepared: PreparedData, num_samples: int, **changes: int) -> list[list[int]]:
    arguments = {"sequence_length": S, "micro_batch_size": 2, "seed": 5, **changes}
    return rows(list(training_batches(prepared, num_samples=num_samples, **arguments)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """500 distinct tokens in 10 documents: 15 samples of 32 an epoch."""
    return open_pairs(tmp_path_factory.mktemp("pairs") / "own", numbered(10, 50))


def test_batches_have_the_agreed_form(small_prepared: PreparedData) -> None:
    (batch,) = training_batches(small_prepared, sequence_length=S, micro_batch_size=3, num_samples=3, seed=1)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in batch.items()} == {
        "tokens": (torch.int64, (3, S)),
        "labels": (torch.int64, (3, S)),
        "loss_mask": (torch.float32, (3, S)),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert bool((batch["loss_mask"] == 1).all())


def test_every_sample_is_a_run_of_the_documents(pairs: PreparedData) -> None:
    documents = numbered(10, 50)
    order = stream(pairs, 14, micro_batch_size=1)
    for row in order:
        for left, right in itertools.pairwise(row):
            assert right == left + 1 or (left % 50 == 49 and right % 50 == 0)
    assert len({tuple(row) for row in order}) == 14
    assert {token for row in order for token in row} <= {token for d in documents for token in d}


@pytest.mark.parametrize("start", [2, 14, 16, 40])
def test_resuming_reads_what_a_straight_run_reads(pairs: PreparedData, start: int) -> None:
    straight = stream(pairs, 50)
    assert stream(pairs, 50, start_sample=start) == straight[start:]


def test_a_longer_run_starts_like_a_shorter_one(pairs: PreparedData) -> None:
    assert stream(pairs, 60)[:20] == stream(pairs, 20)


def test_epochs_and_seeds_differ(pairs: PreparedData) -> None:
    order = stream(pairs, 30, micro_batch_size=1)
    assert order[:15] != order[15:]
    assert order[:15] != stream(pairs, 15, micro_batch_size=1, seed=6)
    assert order[15:] != stream(pairs, 15, micro_batch_size=1, seed=6)


def test_ranks_share_out_the_same_samples(pairs: PreparedData) -> None:
    straight = stream(pairs, 24)
    ranks = [stream(pairs, 24, data_parallel_rank=rank, data_parallel_size=3) for rank in range(3)]
    dealt = [ranks[rank][2 * m + i] for m in range(4) for rank in range(3) for i in range(2)]
    assert dealt == straight


def test_samples_that_make_no_whole_group_are_refused(pairs: PreparedData) -> None:
    with pytest.raises(ValueError, match="whole groups"):
        stream(pairs, 5)


def test_held_out_batches_are_fixed_and_bounded(pairs: PreparedData) -> None:
    first = held_out_batches(pairs, sequence_length=S, micro_batch_size=4, num_samples=10)
    assert [len(batch["tokens"]) for batch in first] == [4, 4, 2]
    assert rows(first) == rows(held_out_batches(pairs, sequence_length=S, micro_batch_size=1, num_samples=10))
    with pytest.raises(UserError, match=r"16 held-out samples.*has 15"):
        held_out_batches(pairs, sequence_length=S, micro_batch_size=4, num_samples=16)


def test_empty_documents_change_nothing(tmp_path: Path) -> None:
    documents = numbered(3, 50)
    plain = open_pairs(tmp_path / "plain", documents)
    gaps = open_pairs(tmp_path / "gaps", [[], documents[0], [], [], *documents[1:], []])
    assert stream(gaps, 8) == stream(plain, 8)


def test_text_shorter_than_one_sample_is_refused(tmp_path: Path) -> None:
    prepared = open_pairs(tmp_path / "own", [list(range(S))])
    with pytest.raises(UserError, match=r"train\.bin has 32 tokens, too few for one sample of 32 \+ 1"):
        stream(prepared, 2)


def test_unigram_loss_is_the_cross_entropy_of_smoothed_counts(tmp_path: Path) -> None:
    config = write_pairs(tmp_path / "own", [[1, 1, 2]])
    indexed.write(tmp_path / "own" / "held_out", [np.array([1, 3])], 50)
    prepared = prepare(config, 512, tmp_path, lambda text: None)
    expected = -(math.log(3 / 515) + math.log(1 / 515)) / 2
    assert unigram_loss(prepared) == pytest.approx(expected, rel=1e-12)


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:num_bytes])

    return damage


def overwrite(name: str, offset: int, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content_before = bytearray((folder / name).read_bytes())
        content_before[offset : offset + len(content)] = content
        (folder / name).write_bytes(content_before)

    return damage


DAMAGES = {
    "bin one byte short": (cut("train.bin", -1), r"train\.bin has 299 bytes, train\.idx accounts for 300"),
    "bin empty": (cut("train.bin", 0), r"train\.bin is empty"),
    "idx one byte short": (cut("held_out.idx", -1), r"held_out\.idx has \d+ bytes, its header says"),
    "idx header cut": (cut("train.idx", 20), r"train\.idx has 20 bytes, less than its header"),
    "idx empty": (cut("train.idx", 0), r"train\.idx is empty"),
    "idx of another kind": (overwrite("train.idx", 0, b"TNTIDX\0\0"), r"train\.idx is not a Megatron index"),
    "tokens that are floats": (overwrite("train.idx", 17, b"\x07"), r"train\.idx: token type 7 .* not supported"),
    "wrong length": (overwrite("train.idx", 34, struct.pack("<i", 49)), r"train\.idx: the byte offsets"),
    "negative length": (overwrite("train.idx", 42, struct.pack("<i", -50)), r"train\.idx: the byte offsets"),
    "wrong last document": (overwrite("train.idx", 94, struct.pack("<q", 2)), r"train\.idx: the last document"),
    "no bin": (lambda folder: (folder / "train.bin").unlink(), r"train\.bin is missing"),
    "no idx": (lambda folder: (folder / "held_out.idx").unlink(), r"held_out\.idx is missing"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "bad tokenizer": (cut("tokenizer.json", 50), r"tokenizer\.json is not a tokenizer"),
    "empty folder": (lambda folder: [p.unlink() for p in folder.iterdir()], r"must hold train\.bin.*not supported"),
    "no folder": (lambda folder: shutil.rmtree(folder), r"is not a folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    config = write_pairs(tmp_path / "own", numbered(3, 50))
    damage(tmp_path / "own")
    with pytest.raises(UserError, match=message):
        prepare(config, 512, tmp_path, lambda text: None)


def test_damage_after_preparation_is_seen_before_megatron_reads(tmp_path: Path) -> None:
    prepared = open_pairs(tmp_path / "own", numbered(3, 50))
    cut("train.bin", -2)(tmp_path / "own")
    with pytest.raises(UserError, match=r"train\.bin has 298 bytes"):
        stream(prepared, 2)


def test_ids_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    documents = numbered(3, 50)
    documents[1][7] = 512
    with pytest.raises(UserError, match=r"train\.bin: token 57 has id 512, but model\.vocab_size=512"):
        open_pairs(tmp_path / "own", documents)


def test_ids_are_checked_in_every_batch(tmp_path: Path) -> None:
    prepared = open_pairs(tmp_path / "own", numbered(3, 50))
    overwrite("train.bin", 200, struct.pack("<H", 9999))(tmp_path / "own")
    with pytest.raises(UserError, match=r"token 100 has id 9999"):
        stream(prepared, 4)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    config = write_pairs(tmp_path / "own", numbered(3, 50))
    with pytest.raises(ConfigError, match=r"model\.vocab_size=200: smaller than the \d+ ids"):
        prepare(config, 200, tmp_path, lambda text: None)


def test_indexed_without_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        prepare(DataConfig(name="own", source=Source.indexed), 512, tmp_path, lambda text: None)


def test_prepared_text_decodes_to_the_source(small_prepared: PreparedData, small_library: Path) -> None:
    bpe = tokenizer.load(small_prepared.tokenizer_folder)
    documents = indexed.check(small_prepared.train_prefix).documents()
    texts = {bpe.decode(d[:-1].tolist(), skip_special_tokens=False) for d in documents}
    assert {int(d[-1]) for d in documents} == {bpe.token_to_id("<eod>")}
    held_out = small_prepared.statistics["held_out_modules"]
    files = [file for file in corpus.list_files(small_library) if file.module not in held_out]
    assert files and all((small_library / file.name).read_text() in texts for file in files)


def test_generated_share_is_what_is_asked(small_prepared: PreparedData) -> None:
    statistics = small_prepared.statistics
    share = statistics["num_generated_tokens"] / statistics["num_train_tokens"]
    assert share == pytest.approx(0.25, abs=1e-3)
    assert indexed.check(small_prepared.train_prefix).num_tokens == statistics["num_train_tokens"]
    assert indexed.check(small_prepared.held_out_prefix).num_tokens == statistics["num_held_out_tokens"]


def test_tokenizer_files_are_read_by_transformers(small_prepared: PreparedData) -> None:
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(small_prepared.tokenizer_folder)
    ours = tokenizer.load(small_prepared.tokenizer_folder)
    text = "def f(x):\n    return x + 1  # ünïcode\n"
    assert read(text)["input_ids"] == ours.encode(text).ids
    assert read.decode(read(text)["input_ids"]) == text
    assert (read.eos_token_id, read.pad_token_id) == (0, 1)


def test_text_that_spells_a_special_token_does_not_end_a_document() -> None:
    bpe = tokenizer.train(["some text"], 512)
    (ids,) = tokenizer.encode(bpe, ["a <eod> b"], 0)
    assert list(ids).count(0) == 1 and ids[-1] == 0


@pytest.fixture
def cached(small_prepared: PreparedData, small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds the prepared data under its right name."""
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: small_library)
    shutil.copytree(small_prepared.folder, tmp_path / small_prepared.folder.name)
    return tmp_path / small_prepared.folder.name


def test_the_cache_is_used_without_reading_sources(
    cached: Path, small_prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "read", lambda *a, **k: pytest.fail("the sources were read again"))
    said: list[str] = []
    again = prepare(small_data_config(), VOCAB_SIZE, cached.parent, said.append)
    assert (again.folder, again.digest, said) == (cached, small_prepared.digest, [])


@pytest.mark.parametrize("name", ["train.bin", "manifest.json"])
def test_a_damaged_cache_is_noticed_and_made_again(cached: Path, small_prepared: PreparedData, name: str) -> None:
    cut(name, -1 if name != "manifest.json" else 40)(cached)
    said: list[str] = []
    again = prepare(small_data_config(), VOCAB_SIZE, cached.parent, said.append)
    assert "damaged" in said[0] and name.split("/")[-1] in said[0]
    assert again.digest == small_prepared.digest  # and so the same Python gives the same bytes
    assert [p.name for p in cached.parent.iterdir()] == [cached.name]


def test_everything_that_makes_the_data_is_in_the_key(cached: Path) -> None:
    text = corpus.fingerprint(corpus.list_files(corpus.stdlib_folder()))
    assert cached.name == f"data-{cache_key(small_data_config(), VOCAB_SIZE, text)}"
    others = [{"seed": 2}, {"generated_fraction": 0.0}, {"held_out_fraction": 0.2}]
    keys = {cache_key(small_data_config(**changes), VOCAB_SIZE, text) for changes in others}
    keys |= {cache_key(small_data_config(), 2 * VOCAB_SIZE, text), cache_key(small_data_config(), VOCAB_SIZE, "other")}
    assert len(keys) == 5 and cached.name.removeprefix("data-") not in keys


def test_no_generated_material_when_none_is_asked_for(small_library: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_folder", lambda: small_library)
        prepared = prepare(small_data_config(generated_fraction=0.0), VOCAB_SIZE, tmp_path, lambda text: None)
    assert prepared.statistics["num_generated_tokens"] == 0


def test_a_failed_preparation_leaves_nothing_behind(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: small_library)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=300"):
        prepare(small_data_config(), 300, tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache_dir=.*file.*cannot write"):
        prepare(small_data_config(), VOCAB_SIZE, tmp_path / "file", lambda text: None)
