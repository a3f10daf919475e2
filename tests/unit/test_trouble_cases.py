"""Trouble that others had with padding, stored prediction blocks, unreadable texts and parts without any tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_build import ONE_RANK, small_model
from test_datasets import S, numbered, open_pairs, write_pairs
from torch import Tensor, nn

from nemo_qad import runtime
from nemo_qad.data import corpus, indexed
from nemo_qad.data.datasets import held_out_batches, training_batches
from nemo_qad.data.prepare import prepare
from nemo_qad.distillation.sparse_logits import top_k_logits
from nemo_qad.distillation.step import distillation_loss, output_operands
from nemo_qad.errors import ConfigError, UserError
from nemo_qad.evaluation.metrics import held_out
from nemo_qad.models.build import build_model, logits_fn
from nemo_qad.schema import Loss, ModelConfig, MoeConfig, QadConfig
from nemo_qad.training.language_model import LanguageModelLoss

LENGTH, PADDING, VOCAB, PAD = 16, 100, 100, 3


@pytest.fixture
def one_rank() -> Iterator[None]:
    with runtime.process_groups(ONE_RANK, seed=1, threads=1):
        yield


def model(**changes: Any) -> ModelConfig:
    still = MoeConfig(4, 2, 16, 24, aux_loss_coeff=0.0, bias_update_rate=0.0)
    return small_model(**{"moe": still, "max_position_embeddings": 256, **changes})


def pair(**changes: Any) -> tuple[nn.Module, nn.Module]:
    """Teacher and student with fresh weights of their own."""
    found = []
    for seed in (1, 2):
        runtime.set_seeds(seed)
        found.append(build_model(model(**changes), ONE_RANK, sequence_length=LENGTH + PADDING).eval())
    found[0].requires_grad_(False)
    return found[0], found[1]


def batch(padding: int) -> dict[str, Tensor]:
    """Two rows; with `padding`, that many pad tokens after each. Labels copy half of these, and then are -100."""
    generator = torch.Generator().manual_seed(8)
    tokens_BS = torch.randint(4, VOCAB, (2, LENGTH), generator=generator)
    mask_BS = (torch.rand(2, LENGTH, generator=generator) > 0.3).float()
    labels_BS = F.pad(F.pad(tokens_BS.roll(-1, 1), (0, padding // 2), value=PAD), (0, padding // 2), value=-100)
    tokens_BS, mask_BS = F.pad(tokens_BS, (0, padding), value=PAD), F.pad(mask_BS, (0, padding))
    return {"tokens": tokens_BS, "labels": labels_BS, "loss_mask": mask_BS}


def with_top_k(teacher: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = top_k_logits(*output_operands(teacher, given["tokens"]), k=9, vocab_size=VOCAB)
    assert kept.log_tail_T is not None
    fields = {"indices": kept.indices_TK, "log_prob": kept.log_prob_TK, "log_tail": kept.log_tail_T}
    shape = given["tokens"].shape
    return given | {f"teacher_{name}": values.unflatten(0, shape) for name, values in fields.items()}


def by_loss(teacher: nn.Module, name: str) -> Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor]]:
    if name == "language model":
        return LanguageModelLoss(vocab_size=VOCAB)
    loss = Loss(name)
    return distillation_loss(
        QadConfig(name="test", loss=loss), vocab_size=VOCAB, teacher=None if loss is Loss.top_k else teacher
    )


@pytest.mark.parametrize("name", ["linear_kl", "kl", "top_k", "language model"])
def test_a_hundred_pad_tokens_change_neither_loss_nor_gradient(one_rank: None, name: str) -> None:
    """Through the whole model: attention, Mamba and experts see the padding, the loss and the weights do not."""
    teacher, student = pair()
    loss, found = by_loss(teacher, name), []
    for padding in (0, PADDING):
        total, count = loss(student, with_top_k(teacher, batch(padding)))
        student.zero_grad()
        total.backward()
        gradients = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        found.append((total.detach(), count, gradients))
    (total, count, gradients), (padded_total, padded_count, padded_gradients) = found
    assert padded_count == count == int(batch(0)["loss_mask"].sum())
    torch.testing.assert_close(padded_total, total, rtol=1e-5, atol=0)
    assert gradients.norm() > 0 and (padded_gradients - gradients).norm() <= 1e-5 * gradients.norm()


def test_pad_tokens_change_no_held_out_measure(one_rank: None) -> None:
    teacher, student = pair()
    plain, padded = (
        held_out(logits_fn(student, VOCAB), logits_fn(teacher, VOCAB), [batch(padding)]) for padding in (0, PADDING)
    )
    assert padded.num_tokens == plain.num_tokens and padded.accuracy == plain.accuracy
    assert padded.kl == pytest.approx(plain.kl, rel=1e-5) and padded.loss == pytest.approx(plain.loss, rel=1e-5)


def test_a_block_that_predicts_further_tokens_is_neither_built_nor_in_the_loss(one_rank: None) -> None:
    """A checkpoint may have such blocks (MTP); frozen, they must add no parameter, no term and no token to the loss."""
    found = []
    for changes in ({}, {"mtp_pattern": "*E", "mtp_num_layers": 2}):
        teacher, student = pair(**changes)
        given = batch(0)
        total, count = by_loss(teacher, "linear_kl")(student, given)
        found.append((total.detach(), count, [name for name, _ in student.named_parameters()]))
    (total, count, names), (other_total, other_count, other_names) = found
    assert other_names == names and not any("mtp" in name for name in names)
    assert torch.equal(other_total, total) and other_count == count == given["loss_mask"].sum()


def write_library(folder: Path, num_modules: int, lines: int = 60) -> None:
    folder.mkdir(exist_ok=True)
    for module in range(num_modules):
        text = "\n".join(f"value_{module}_{line} = {module * line}" for line in range(lines))
        (folder / f"mod{module:03}.py").write_text(text + "\n")


def files_of(folder: Path) -> list[corpus.SourceFile]:
    return [corpus.SourceFile(path.name, path.stat().st_size) for path in sorted(folder.iterdir())]


def test_texts_that_cannot_be_read_are_left_out_and_the_others_stay(tmp_path: Path) -> None:
    """An empty one comes first; the others have bytes of no encoding, an unknown encoding, and blanks alone."""
    write_library(tmp_path, 20)
    wrong = {"aaa": b"", "bytes": b"x = '\xff\xfe'\n", "coding": b"# coding: nonsense\n", "blank": b" \n\n"}
    for name, content in wrong.items():
        (tmp_path / f"{name}.py").write_bytes(content)
    text = corpus.read(tmp_path, files_of(tmp_path), held_out_fraction=0.2, seed=1)
    assert len(text.train) + len(text.held_out) == 20 and len(text.held_out) == 4
    assert all(document.startswith("value_") for document in [*text.train, *text.held_out])


def test_a_share_that_holds_no_module_is_refused_at_once(tmp_path: Path) -> None:
    """Two of a hundred thousand parts of ten documents."""
    write_library(tmp_path, 10)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"data\.held_out_fraction=2e-05: smaller than the smallest module"):
        corpus.read(tmp_path, files_of(tmp_path), held_out_fraction=2e-5, seed=1)
    assert time.monotonic() - began < 1


def test_a_held_out_part_of_shared_lines_alone_is_refused(tmp_path: Path) -> None:
    """What the training text has too is cut out, and short remains are dropped: of the only module that is small
    enough nothing is left."""
    write_library(tmp_path, 10, lines=600)
    shared = [f"shared_{number} = {number}" for number in range(16)]
    small = [f"own_{number} = {number}" for number in range(8)]
    for number in range(4):
        start = 2 + 6 * number
        small[start:start] = shared[4 * number : 4 * number + 4]
    (tmp_path / "small.py").write_text("\n".join(small) + "\n")
    with (tmp_path / "mod000.py").open("a") as stream:
        for number in range(4):
            stream.write("\n".join([*shared[4 * number : 4 * number + 4], f"between_{number} = 0"]) + "\n")
    fraction = 1.05 * len((tmp_path / "small.py").read_bytes()) / sum(file.size for file in files_of(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.held_out_fraction=.*no held-out text is left"):
        corpus.read(tmp_path, files_of(tmp_path), held_out_fraction=fraction, seed=1)


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_part_of_ten_empty_documents_is_named_at_once(tmp_path: Path, part: str) -> None:
    """Instead of as many epochs as nothing needs to fill a sample."""
    config = write_pairs(tmp_path / "own", numbered(10, 50))
    indexed.write(tmp_path / "own" / part, [np.array([], dtype=np.int64)] * 10, 50)
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"{part}\.bin is empty"):
        prepare(config, 512, tmp_path, lambda text: None)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_part_shorter_than_one_sample_is_named_at_once(tmp_path: Path, part: str) -> None:
    prepared = open_pairs(tmp_path / "own", numbered(10, 50))
    indexed.write(tmp_path / "own" / part, [np.arange(S)], 50)
    began = time.monotonic()
    read = {"train": training_batches, "held_out": held_out_batches}[part]
    seed = {"seed": 1} if part == "train" else {}
    with pytest.raises(UserError, match=rf"{part}\.bin has {S} tokens, too few for one sample of {S} \+ 1"):
        read(prepared, sequence_length=S, micro_batch_size=1, num_samples=1, **seed)
    assert time.monotonic() - began < 1
