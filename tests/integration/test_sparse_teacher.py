"""Training from a teacher's sparse logits on disk, as a user does it: equal to the dense loss, stopped, misused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import command
import pytest
from safetensors.numpy import load_file

VOCAB_SIZE = 1024  # the smallest that the tokenizer takes
SMALL = [
    "+recipe=four_over_six", "experiment=quick", f"model.vocab_size={VOCAB_SIZE}", "model.hybrid_pattern=ME*",
    "teacher.steps=60", "teacher.warmup_steps=5", "qad.steps=6", "qad.global_batch_size=8", "qad.micro_batch_size=4",
    "qad.sequence_length=64", "qad.validate_every=2", "qad.save_every=2", "qad.average_decay=0.5",
    "qad.validation_samples=16", "evaluation.held_out_samples=16", "evaluation.num_questions=10",
    "calibration.num_samples=16", "threads=1",
]  # fmt: skip
PROGRAM = Path(__file__).with_name("sparse_teacher_in_process.py")


def _run(root: Path, *overrides: str, program: tuple[str, ...] = command.MODULE) -> tuple[int, str]:
    return command.run(root, SMALL, *overrides, program=program)


def _interrupt(root: Path, when: str, *overrides: str) -> tuple[int, str]:
    return command.interrupt(root, SMALL, when, *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The run folder of each loss, and "root". All words are kept: `top_k` knows what the dense loss knows."""
    root = tmp_path_factory.mktemp("sparse")
    status, output = _run(
        root, "-m", "qad.loss=linear_kl,top_k,sampled", f"qad.sparse_values={VOCAB_SIZE}",
        "stages=[ptq,logits,qad]", f"hydra.sweep.dir={root / 'sweep'}",
    )  # fmt: skip
    assert status == 0, output
    assert output.count("logits: written") == 2, output  # the dense run has no such stage
    records = [json.loads(path.read_text()) for path in sorted((root / "sweep/jobs").glob("*.json"))]
    losses = ("linear_kl", "top_k", "sampled")
    return {"root": root, **{n: root / r["run_dir"] for n, r in zip(losses, records, strict=True)}}


def _record(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what depends on the clock."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "tokens_per_second"} for entry in entries]


def _result(run: Path, stage: str) -> dict:
    return json.loads((run / "stages" / f"{stage}.json").read_text())


def test_all_words_of_the_teacher_are_as_good_as_the_teacher(runs):
    dense, sparse = _record(runs["linear_kl"]), _record(runs["top_k"])
    assert [entry["step"] for entry in dense] == [entry["step"] for entry in sparse]
    kls = [(d[key], s[key]) for d, s in zip(dense, sparse, strict=True) for key in d if key.endswith("kl")]
    assert len(kls) == 13  # 6 steps, 4 validations, 3 of them of the average too
    for ours, theirs in kls:
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert not (runs["linear_kl"] / "stages/logits.json").exists()


@pytest.mark.parametrize("loss", ["top_k", "sampled"])
def test_sparse_losses_lower_the_held_out_kl(runs, loss):
    result = _result(runs[loss], "qad")
    assert result["held_out_kl"] < 0.8 * result["held_out_kl_ptq"]
    # Of all words, the KL in the file's terms is the dense one, which is what PTQ measures.
    assert result["held_out_kl_ptq"] == pytest.approx(_result(runs[loss], "ptq")["held_out_kl"], rel=1e-4)


def test_stopped_training_continues_to_the_same_bytes_and_needs_no_teacher(runs):
    root = runs["root"]
    settings = ("qad.loss=sampled", f"qad.sparse_values={VOCAB_SIZE}", "run_dir=stopped")
    status, output = _interrupt(root, "qad 2/6", "stages=[ptq,logits,qad]", *settings)
    assert status == 130 and "logits: reused from" in output, output
    teacher = next((root / "cache").glob("teacher-*"))
    teacher.rename(root / "elsewhere")
    try:
        status, output = _run(root, "stages=[qad,export]", *settings)
        assert status == 0 and "continues after step" in output, output
        assert not list((root / "cache").glob("teacher-*"))  # nor was it trained again
        assert _result(root / "stopped", "export")["bytes_bf16"] > 10**6
    finally:
        (root / "elsewhere").rename(teacher)
    ours, theirs = (load_file(run / "qad/student/tensors.safetensors") for run in (root / "stopped", runs["sampled"]))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert _record(root / "stopped") == _record(runs["sampled"])


def test_file_made_for_other_data_is_refused(runs, tmp_path):
    """The teacher comes without its tokenizer: with it, the other words of the other data are refused before."""
    root, made = runs["root"], _result(runs["top_k"], "logits")["path"]
    teacher = shutil.copytree(next((root / "cache").glob("teacher-*/model")), tmp_path / "teacher")
    (teacher / "tokenizer.json").unlink()
    settings = (f"qad.teacher_logits={made}", f"teacher.path={teacher}", "qad.loss=top_k", "stages=[logits]")
    status, output = _run(root, *settings, f"qad.sparse_values={VOCAB_SIZE}", "data.seed=5", "run_dir=other")
    assert status == 1 and f"error: {made}: made for something else" in output, output
    assert "has no tokenizer.json, so its words cannot be compared" in output, output
    assert "data is " in output and "data.seed" in output and "leave qad.teacher_logits out" in output, output
    assert "teacher is " not in output and not (root / "other/stages/logits.json").exists(), output


def test_what_the_stages_hold_refuse_and_continue(runs):
    root = runs["root"]
    status, output = _run(root, "qad.loss=top_k", "run_dir=in-process", program=(str(PROGRAM),))
    assert status == 0, output
    counted = json.loads(output.splitlines()[-1])
    assert counted["models_in_dense_qad"] == 2  # so the count sees a teacher where there is one
    assert counted["models_after_ptq"] == 1  # the teacher alone
    assert counted["models_in_sparse_qad"] == 1  # the student alone
    assert counted["held_out_kl"]["bf16"] == 0 < counted["held_out_kl"]["qad"] < counted["held_out_kl"]["ptq"]
    assert counted["shards"] >= 3 and 0 < counted["whole_when_stopped"] < counted["shards"]
    assert counted["same_bytes"]
    assert counted["same_draws"] > 0.999  # but for a word at whose border the rounding of a batch falls
    room = 10**7 * (64 * (64 * 8 + 4) + 8) / 2**20
    assert f"the teacher's file of 10000000 samples needs {room:,.0f} MiB" in counted["refused_without_room"]
    assert "needs stage logits" in counted["refused_without_file"]
    shard = "train-00000.safetensors"
    assert shard in counted["refused_when_damaged"] and "truncated" in counted["refused_when_damaged"]
