"""Measures a QAD step beside plain distillation of the same model: time and memory.

    python benchmarks/qad_step.py [--quick]         about 4 minutes on 2 cores

Three students of one teacher take turns, in one process with one thread: `plain`, the model without any quantizer;
`per_step`, the recipe with weights quantised in place after each optimizer step; `per_forward`, the same recipe with
fake quantisation of every weight in every forward. A step is what QAD does: 8 micro-batches through teacher and
student, the fused loss, backward, Adam with FP32 main parameters, and for `per_step` the quantisation of all weights.
The order of the three changes each round. step_ratio_* are medians over rounds of the ratio within a round, so that a
machine that slows down for a while slows down both sides of a ratio; cpu_step_ratio_* are the same of CPU seconds,
which other programs on the machine disturb less.

Memory is tensor bytes at the peak of a step: what is alive before it, and the most that the step adds. On a CPU each
student gets a process of its own; PyTorch's profiler reports every allocation and release of its CPU allocator, in
order, from before the models are built, so that the running sum is exact and does not depend on what the C library
keeps or on page sizes. A tensor of known size is counted first, to see that the count works. On CUDA it is
max_memory_allocated. The teacher is counted: every side has the same one.

The last line is one JSON object: step_ratio_vs_plain (per_step over plain), step_ratio_per_forward,
extra_memory_vs_plain (per_step's peak over plain's, less 1), extra_memory_per_forward, all for BF16 with FP32 main
parameters; `fp32` holds the same for plain FP32, where the truth of weights quantised in place must be kept as a
copy; and what explains them: seconds, bytes, sizes, losses (per_step and per_forward must agree to the bit).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "per_step", "per_forward")
MIB = 2**20
KNOWN_BYTES = 32 * MIB
STEP = "the measured step"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, not how well")
    parser.add_argument("--recipe", default="four_over_six")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each student in BF16 (FP32: 2 less)")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--words", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch, one sequence (default 512)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.hidden, arguments.words, arguments.tokens = 3, 64, 512, 64
    return arguments


def in_own_process(**job: Any) -> dict[str, Any]:
    """Runs one measurement in a process of its own and returns what it printed last."""
    quiet = {"PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), **quiet}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"measurement {job} failed with status {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


def model_of(job: dict[str, Any]) -> Any:
    """ME*ME: two Mamba, two expert and one attention layer, in the proportions of the demo's model."""
    from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, Precision

    hidden = job["hidden"]
    return ModelConfig(
        name="benchmark",
        hybrid_pattern="ME*ME",
        hidden_size=hidden,
        vocab_size=job["words"],
        max_position_embeddings=job["tokens"],
        ffn_hidden_size=2 * hidden,
        precision=Precision(job["precision"]),
        attention=AttentionConfig(num_heads=4, num_query_groups=2, head_dim=hidden // 4),
        mamba=MambaConfig(num_heads=8, head_dim=hidden // 4, num_groups=2, state_dim=32, chunk_size=64),
        moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=hidden, shared_expert_ffn_hidden_size=hidden),
    )


def batches(job: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(5)
    shape = (1, job["tokens"])
    return [
        {"tokens": torch.randint(0, job["words"], shape, generator=generator), "loss_mask": torch.ones(shape)}
        for _ in range(job["micro_batches"])
    ]


def build(job: dict[str, Any], seed: int) -> Any:
    """The model with the same weights at each call of one seed."""
    from nemo_qad import runtime
    from nemo_qad.models.build import build_model
    from nemo_qad.schema import ParallelConfig

    runtime.set_seeds(seed)
    return build_model(model_of(job), ParallelConfig(name="single"), sequence_length=job["tokens"])


def trainer_of(job: dict[str, Any], variant: str, teacher: Any) -> Any:
    from nemo_qad.config import compose
    from nemo_qad.distillation.step import distillation_loss
    from nemo_qad.quantization.calibrate import quantize
    from nemo_qad.quantization.in_place import student_weights
    from nemo_qad.schema import Precision, QadConfig, QuantizeWeights
    from nemo_qad.training.optimizer import qad_settings
    from nemo_qad.training.trainer import Trainer

    student, weights = build(job, 2), None
    qad = QadConfig(
        "benchmark", 1e-4, 0.0, 0, 100, global_batch_size=job["micro_batches"], sequence_length=job["tokens"],
    )  # fmt: skip
    if variant != "plain":
        recipe = compose([f"+recipe={job['recipe']}"]).recipe
        qad.quantize_weights = QuantizeWeights(variant)
        quantize(student, recipe, model_of(job), batches(job)[:2])
        weights = student_weights(student, qad, recipe)
    loss = distillation_loss(qad, vocab_size=job["words"], teacher=teacher)
    return Trainer(student, qad_settings(qad), loss, precision=Precision(job["precision"]), weights=weights)


def timed_step(trainer: Any, given: list[dict[str, Any]]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, loss) of one step."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started, cpu_started = time.perf_counter(), time.process_time()
    result = trainer.train_step(given)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - cpu_started, result.loss


def measure_time(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step by variant, after one step of each that is not counted; and what one quantisation takes."""
    teacher, given = build(job, 1).eval().requires_grad_(False), batches(job)
    trainers = {variant: trainer_of(job, variant, teacher) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    cpu_seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    losses: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(job["rounds"] + 1):
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            taken, cpu_taken, loss = timed_step(trainers[variant], given)
            losses[variant].append(loss)
            if number:
                seconds[variant].append(taken)
                cpu_seconds[variant].append(cpu_taken)
    if losses["per_step"] != losses["per_forward"]:
        raise SystemExit(f"per_step and per_forward should agree to the bit: {losses}")
    quantised = trainers["per_step"]._weights
    parameters = dict(trainers["per_step"].module.named_parameters())
    started = time.perf_counter()
    quantised.quantize()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "losses": losses,
        "seconds_to_quantise_once": time.perf_counter() - started,
        "parameters": sum(p.numel() for p in parameters.values()),
        "quantised_weights": sum(parameters[name].numel() for name in quantised.names),
    }


def measure_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Tensor bytes before a step and at its peak, of one variant, in a process that holds nothing else."""
    import torch

    def prepare() -> tuple[Any, list[dict[str, Any]]]:
        teacher, given = build(job, 1).eval().requires_grad_(False), batches(job)
        trainer = trainer_of(job, job["variant"], teacher)
        trainer.train_step(given)  # Adam makes its state in the first step
        return trainer, given

    if torch.cuda.is_available():
        trainer, given = prepare()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step(given)
        return {"before": before, "peak": torch.cuda.max_memory_allocated()}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        known = torch.empty(KNOWN_BYTES, dtype=torch.uint8)
        del known
        trainer, given = prepare()
        with torch.profiler.record_function(STEP):
            trainer.train_step(given)
    return bytes_of_step(profiler.profiler.kineto_results.events())


def bytes_of_step(events: list[Any]) -> dict[str, Any]:
    """The running sum of allocations less releases: at the start of the step, and its maximum within."""
    step = next(event for event in events if event.name() == STEP)
    start, end = step.start_ns(), step.start_ns() + step.duration_ns()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    if [size for _, size in changes[:2]] != [KNOWN_BYTES, -KNOWN_BYTES]:
        raise SystemExit("the profiler does not report allocations as expected: memory cannot be measured")
    alive = before = peak = 0
    for when, size in changes:
        alive += size
        if when < start:
            before = peak = alive
        elif when <= end:
            peak = max(peak, alive)
    return {"before": before, "peak": peak, "allocations": len(changes)}


def side_by_side(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """All that is measured at one precision."""
    measured = in_own_process(kind="time", rounds=rounds, **job)
    memory = {variant: in_own_process(kind="memory", variant=variant, **job) for variant in VARIANTS}
    seconds, cpu_seconds = measured.pop("seconds"), measured.pop("cpu_seconds")
    plain = memory["plain"]["peak"]
    result: dict[str, Any] = {}
    for variant, key in (("per_step", "vs_plain"), ("per_forward", "per_forward")):
        ratios, cpu_ratios = (
            [ours / base for ours, base in zip(of[variant], of["plain"], strict=True)] for of in (seconds, cpu_seconds)
        )
        result[f"step_ratio_{key}"] = statistics.median(ratios)
        result[f"cpu_step_ratio_{key}"] = statistics.median(cpu_ratios)
        result[f"extra_memory_{key}"] = memory[variant]["peak"] / plain - 1
        result[f"step_ratios_{variant}"] = ratios
    for variant in VARIANTS:
        median, bytes_ = statistics.median(seconds[variant]), memory[variant]
        print(
            f"{job['precision']} {variant:12} {median:7.3f} s a step   "
            f"{bytes_['peak'] / MIB:8.1f} MiB at its peak, {bytes_['before'] / MIB:8.1f} between steps",
            flush=True,
        )
    result["seconds"] = {variant: statistics.median(found) for variant, found in seconds.items()}
    return result | {"seconds_of_each_step": seconds, "bytes": memory} | measured


def machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": name, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def child(job: dict[str, Any]) -> None:
    import torch

    from nemo_qad import runtime
    from nemo_qad.schema import ParallelConfig

    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=job["threads"]):
        torch.set_num_threads(job["threads"])
        print(json.dumps((measure_time if job["kind"] == "time" else measure_memory)(job)))


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        child(json.loads(arguments.child))
        return
    names = ("recipe", "hidden", "words", "tokens", "micro_batches", "threads")
    sizes = {name: getattr(arguments, name) for name in names}
    result = side_by_side({"precision": "bf16", **sizes}, arguments.rounds)
    result["fp32"] = side_by_side({"precision": "fp32", **sizes}, max(2, arguments.rounds - 2))
    print(json.dumps({**result, "sizes": sizes, "machine": machine()}))


if __name__ == "__main__":
    main()
