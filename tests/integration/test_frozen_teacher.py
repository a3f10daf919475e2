"""The teacher of a real QAD stage: it is what its folder holds, stands still, and is saved nowhere (D1, D2, D5)."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from safetensors.torch import load_file, save_file
from small_model import SEQUENCE_LENGTH, build, small_model
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from nemo_qad import runtime
from nemo_qad.checkpoint.saver import CheckpointSaver
from nemo_qad.config import compose
from nemo_qad.data import indexed, tokenizer
from nemo_qad.errors import UserError
from nemo_qad.huggingface.names import shapes
from nemo_qad.huggingface.save import hf_tensors, save_bf16
from nemo_qad.quantization import modelopt
from nemo_qad.schema import ParallelConfig, Stage
from nemo_qad.stages import pipeline, qad
from nemo_qad.stages import session as sessions
from nemo_qad.stages.folder import RunFolder
from nemo_qad.stages.session import Session
from nemo_qad.training.interrupt import Interrupted

MODEL = small_model(vocab_size=512)
ONE = ParallelConfig(name="single")
SETTINGS = [
    "+recipe=four_over_six", "data=indexed", "qad.steps=10", "qad.warmup_steps=0", "qad.learning_rate=1e-3",
    "qad.weight_decay=0.1", "qad.global_batch_size=2", "qad.micro_batch_size=1",
    f"qad.sequence_length={SEQUENCE_LENGTH}", "qad.validate_every=5", "qad.save_every=2", "qad.validation_samples=2",
    "qad.average_decay=0", "calibration.num_samples=2", "calibration.micro_batch_size=1",
    f"calibration.sequence_length={SEQUENCE_LENGTH}", "evaluation.held_out_samples=2",
    "evaluation.micro_batch_size=2", f"evaluation.sequence_length={SEQUENCE_LENGTH}",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with runtime.process_groups(ONE, seed=1, threads=1):
        yield


@pytest.fixture(scope="module")
def source() -> nn.Module:
    return build(MODEL, seed=3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, source: nn.Module) -> Path:
    """A folder with the data and the teacher's checkpoint."""
    root = tmp_path_factory.mktemp("frozen")
    generator = np.random.default_rng(7)
    for name in ("train", "held_out"):
        (root / "data").mkdir(exist_ok=True)
        indexed.write(root / "data" / name, [generator.integers(2, 512, 400) for _ in range(4)], MODEL.vocab_size)
    tokenizer.save(tokenizer.train(["some text"], 512), root / "data")
    save_bf16(source, root / "teacher", MODEL, root / "data", 5.0)
    return root


def session_in(folder: Path, world: Path, teacher: Path | None = None) -> Session:
    """A session whose teacher stage is through, in a run folder that may have been used before."""
    overrides = [f"data.path={world / 'data'}", f"teacher.path={teacher or world / 'teacher'}"]
    run = dataclasses.replace(compose([*SETTINGS, *overrides, f"cache_dir={folder / 'cache'}"]), model=MODEL)
    session = Session(run, RunFolder(folder, run), lambda text: None)
    try:
        pipeline._run_teacher(session)
    except UserError:
        session.folder.close()
        raise
    return session


@pytest.fixture
def session(world: Path, tmp_path: Path) -> Iterator[Session]:
    """A run that has finished PTQ."""
    started = session_in(tmp_path / "run", world)
    pipeline._run_stage(started, Stage.ptq)
    yield started
    started.folder.close()


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def checksums(module: nn.Module) -> dict[str, str]:
    """Of every parameter and buffer, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: checksum(tensor) for name, tensor in tensors}


def quantizers(module: nn.Module) -> int:
    return sum(isinstance(part, modelopt.TensorQuantizer) for part in module.modules())


def test_every_tensor_of_the_teacher_is_the_folders_before_the_first_step(
    session: Session, world: Path, source: nn.Module
) -> None:
    """D1: bytes of the folder, and, past our own table of names, the model that was saved there."""
    distillation = qad.Distillation(session)
    assert distillation.trainer.step == 0
    loaded = session.teacher
    files = load_file(world / "teacher" / "model.safetensors")
    assert files.keys() == shapes(MODEL).keys()
    assert {n: checksum(t) for n, t in hf_tensors(loaded, MODEL)} == {n: checksum(t) for n, t in files.items()}
    fresh = session.build()
    for name, parameter in loaded.named_parameters():
        saved = source.get_parameter(name).bfloat16().float()
        rows = MODEL.vocab_size if name in ("embedding.word_embeddings.weight", "output_layer.weight") else None
        assert torch.equal(parameter[:rows], saved[:rows]), name
        assert parameter.std() > 0 or torch.equal(parameter, fresh.get_parameter(name)), name  # norms may be constant
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, source.get_buffer(name)), name


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("backbone.layers.1.mixer.experts.2.down_proj.weight", 0.0, "is all zero"),
        ("backbone.layers.0.mixer.in_proj.weight", 0.25, r"is constant \(0.25\)"),
        ("backbone.norm_f.weight", 0.0, "is all zero"),
        ("lm_head.weight", float("nan"), "holds NaN or Inf"),
    ],
)
def test_a_teacher_of_zeros_stops_the_run_with_the_tensors_name(
    name: str, value: float, problem: str, world: Path, tmp_path: Path
) -> None:
    """D1: before PTQ, and nothing of the stage is marked as finished."""
    folder = shutil.copytree(world / "teacher", tmp_path / "teacher")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"tensor {name} {problem}"):
        session_in(tmp_path / "run", world, folder)
    assert not list((tmp_path / "run").glob("stages/*"))


def interrupted(session: Session, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stops stage qad with Ctrl-C at its checkpoint of step 2; the newest checkpoint."""
    original = CheckpointSaver.save

    def save_and_stop(self: CheckpointSaver, step: int, *rest: Any) -> None:
        original(self, step, *rest)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "save", save_and_stop)
        with pytest.raises(Interrupted):
            pipeline._run_stage(session, Stage.qad)
    return max((session.folder.path / "qad" / "checkpoints").glob("step-*"))


def _built(item: Any) -> dict[str, Any]:
    """Mamba's projections and convolutions are stored in pieces."""
    return {"built": item.build()} if isinstance(item, ShardedTensorFactory) else {"item": item}


def test_a_checkpoint_is_the_student_and_its_optimizer_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: names, number and bytes."""
    newest = interrupted(session, monkeypatch)
    assert newest.name == "step-000002"
    held = {k: v for k, v in FileSystemReader(newest).read_metadata().state_dict_metadata.items() if hasattr(v, "size")}
    plain = session.build()
    templates = plain.sharded_state_dict()
    pieces = {name: list(nested_values(_built(templates[name]))) for name, _ in plain.named_parameters()}
    biases = {templates[name].key for name, _ in plain.named_buffers() if name.endswith("expert_bias")}
    weights = {item.key for found in pieces.values() for item in found}
    kinds = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    expected = {f"{kind}{key}" for kind in kinds for key in weights}
    own = {key for key in held if not key.startswith(("quantizer.", "rng.", "modelopt."))}
    own = {key for key in own if "_quantizer" not in key}  # ModelOpt's entries have its own names
    assert own == expected | biases and not any("teacher" in name for name in held)
    floats = sum(held[key].size.numel() for key in own)
    parameters = sum(p.numel() for p in plain.parameters())
    assert floats == 3 * parameters + len(biases) * MODEL.moe.num_experts
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    others = sum(held[key].size.numel() * 8 for key in held if key not in own)
    assert 4 * floats < size < 4 * floats + others + 2000 * len(held)


def test_resuming_reads_the_teacher_from_its_own_folder(
    session: Session, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: the checkpoint has none, so another session reads it again, and checks it against the run's digest."""
    interrupted(session, monkeypatch)
    session.folder.close()
    read, original = [], sessions.load_weights

    def spy(module: nn.Module, folder: Path, *rest: Any) -> Any:
        read.append(folder)
        return original(module, folder, *rest)

    monkeypatch.setattr(sessions, "load_weights", spy)
    again = session_in(session.folder.path, world)
    said: list[str] = []
    again.say = said.append
    pipeline._run_stage(again, Stage.qad)
    assert read == [world / "teacher"] and any("continues after step 2" in text for text in said)
    assert checksums(again.teacher) == checksums(session.teacher)
    assert again.folder.result(Stage.teacher)["digest"] == again.teacher_digest  # type: ignore[index]
    again.folder.close()


def test_resuming_with_another_teacher_is_refused(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: one changed value in the teacher's folder, and the run goes on once the first is back."""
    folder = shutil.copytree(world / "teacher", tmp_path / "teacher")
    first = session_in(tmp_path / "run", world, folder)
    pipeline._run_stage(first, Stage.ptq)
    interrupted(first, monkeypatch)
    first.folder.close()
    path, sound = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
    tensors = load_file(path)
    tensors["lm_head.weight"][7, 5] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    assert len(path.read_bytes()) == len(sound)
    with pytest.raises(UserError, match=f"{folder} has other weights than when .* was started"):
        session_in(tmp_path / "run", world, folder)
    path.write_bytes(sound)
    again = session_in(tmp_path / "run", world, folder)
    pipeline._run_stage(again, Stage.qad)
    assert again.folder.result(Stage.qad)["steps"] == 10  # type: ignore[index]
    again.folder.close()


def test_the_optimizer_holds_the_student_and_ten_steps_leave_the_teacher(session: Session) -> None:
    """D5: with weight decay, which moves whatever an optimizer holds, gradient or not."""
    distillation = qad.Distillation(session)
    trainer, teacher, student = distillation.trainer, session.teacher, distillation.student
    held = [p for group in trainer._optimizer.param_groups for p in group["params"]]
    assert all(group["weight_decay"] == 0.1 for group in trainer._optimizer.param_groups[:1])
    assert {id(p) for p in held} == {id(p) for p in student.parameters()} and len(held) == len({id(p) for p in held})
    assert not {id(p) for p in held} & {id(p) for p in teacher.parameters()}
    assert not any(p.requires_grad for p in teacher.parameters())
    in_ddp = {p.data_ptr() for p in trainer._ddp.parameters()}
    assert not in_ddp & {p.data_ptr() for p in teacher.parameters()}
    before, moved = checksums(teacher), checksums(student)
    micro_batches = distillation._all_batches()
    for _ in range(10):
        trainer.train_step([next(micro_batches) for _ in range(2)])
    assert checksums(teacher) == before
    after = checksums(student)
    assert all(after[name] != moved[name] for name, _ in student.named_parameters())
    assert not teacher.training and all(p.grad is None for p in teacher.parameters())
    assert quantizers(teacher) == 0 and quantizers(student) > 50  # D7: loaded after PTQ, in the same process
