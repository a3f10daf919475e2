"""Measures one QAD step of the demo's model on one long sequence: memory a token and time by part.

    python benchmarks/long_context.py [--quick]                                   about 8 minutes on 2 cores
    python benchmarks/long_context.py --tokens 522240 --context-parallel 1        once; see docs/results.md

A step is what QAD does with one sequence: the teacher's forward, the student's forward with weights quantised in
place and its K and V in FP8, the fused loss, backward with activation recompute (full, unless --recompute says
otherwise), and Adam. The model is model=tiny_hybrid (ME*ME: Mamba-2, experts, attention) in its own precision, with
max_position_embeddings raised. Each length runs in processes of its own, one a context-parallel rank, which share the
cores.

Memory is resident memory: before the step (after one step on a short sequence, which makes Adam's state and loads
libraries) and at its peak, which the kernel keeps (VmHWM, reset before the step). peak_bytes_per_token is peak less
before, summed over ranks, divided by the tokens of the whole sequence; peak_gib is the sum of the ranks' peaks, with
everything in them. Ranks need not peak at the same moment, so the sums are upper bounds.

Time is wall-clock, of rank 0: teacher, student (forward), loss, backward (with the recomputed forward), optimizer; and
how much of it attention, Mamba and expert layers took in all forwards together, the recomputed one included.

The last line is one JSON object. tokens, peak_bytes_per_token and seconds are lists of the first context-parallel
size, context_parallel; `runs` holds all of them with every figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from nemo_qad import launcher

TOKENS = (8192, 16384, 32768, 65536, 131072)
WARM_UP = 1024
KINDS = {"CoreAttention": "attention", "TorchMambaMixer": "mamba", "MoELayer": "experts"}
PARTS = ("teacher", "student", "loss", "backward", "optimizer")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short sequences: does it run, not how well")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of each run's one sequence")
    parser.add_argument("--context-parallel", type=int, nargs="+", default=[1, 2], help="ranks that share the sequence")
    parser.add_argument("--recipe", default="four_over_six")
    parser.add_argument("--recompute", default="full", choices=("none", "selective", "full"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens = [1024, 2048]
    return arguments


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status, such as VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: memory cannot be measured here")


class Clock:
    """Seconds by part; a line is printed as each part of the step ends."""

    def __init__(self, *, tell: bool) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((*PARTS, *KINDS.values()), 0.0)
        self._tell, self._open = tell, {}
        self.started = time.monotonic()

    def wrap(self, module: Any, part: str) -> None:
        """Counts a module's forwards, whoever calls them."""
        module.register_forward_pre_hook(lambda *_: self._begin(module))
        module.register_forward_hook(lambda *_: self._end(module, part))

    def _begin(self, module: Any) -> None:
        self._open[module] = time.monotonic()

    def _end(self, module: Any, part: str) -> None:
        self.add(part, time.monotonic() - self._open.pop(module))

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        if self._tell:
            at = time.monotonic() - self.started
            print(f"  {at:8.0f} s  {part:10} {seconds:8.1f} s   {status('VmRSS') / 2**30:5.2f} GiB", flush=True)


def build(run: Any, seed: int, tokens: int) -> Any:
    from nemo_qad import runtime
    from nemo_qad.models.build import build_model

    runtime.set_seeds(seed)
    return build_model(run.model, run.parallel, sequence_length=tokens)


def trainer_of(run: Any, teacher: Any, tokens: int) -> Any:
    from nemo_qad.distillation.step import distillation_loss
    from nemo_qad.quantization.calibrate import quantize
    from nemo_qad.quantization.in_place import student_weights
    from nemo_qad.training.optimizer import qad_settings
    from nemo_qad.training.trainer import Trainer

    student = build(run, 2, tokens)
    quantize(student, run.recipe, run.model, [batch_of(run, WARM_UP)])
    weights = student_weights(student, run.qad, run.recipe)
    loss = distillation_loss(run.qad, vocab_size=run.model.vocab_size, teacher=teacher)
    return Trainer(student, qad_settings(run.qad), loss, precision=run.model.precision, weights=weights)


def batch_of(run: Any, tokens: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(tokens)
    shape = (1, tokens)
    words = torch.randint(0, run.model.vocab_size, shape, generator=generator)
    return {"tokens": words, "loss_mask": torch.ones(shape)}


def watch(trainer: Any, teacher: Any, clock: Clock) -> None:
    """Hooks for the parts that are modules, and a clock around the loss and the optimizer."""
    for module, part in ((teacher, "teacher"), (trainer.module, "student")):
        clock.wrap(module.decoder, part)
        for child in module.modules():
            kinds = {KINDS[c.__name__] for c in type(child).__mro__ if c.__name__ in KINDS}
            for kind in kinds:
                clock.wrap(child, kind)
    given, step = trainer.loss, trainer._optimizer.step

    class Timed(type(given)):  # type: ignore[misc]
        def __call__(self, student: Any, batch: Any) -> Any:
            before = clock.seconds["teacher"] + clock.seconds["student"]
            started = time.monotonic()
            found = super().__call__(student, batch)
            forwards = clock.seconds["teacher"] + clock.seconds["student"] - before
            clock.add("loss", time.monotonic() - started - forwards)
            return found

    def timed_step() -> Any:
        started = time.monotonic()
        found = step()
        clock.add("optimizer", time.monotonic() - started)
        return found

    given.__class__ = Timed
    trainer._optimizer.step = timed_step


def measure(tokens: int, context: int, recipe: str, recompute: str, tell: bool) -> dict[str, Any]:
    """One rank's part of a run; rank 0 returns the figures of all."""
    from nemo_qad import agreement, runtime
    from nemo_qad.config import compose
    from nemo_qad.schema import ParallelConfig, Recompute

    run = compose([f"+recipe={recipe}"])
    run.model.max_position_embeddings = tokens
    run.parallel = ParallelConfig("benchmark", ranks_per_node=context, context=context, recompute=Recompute(recompute))
    with runtime.process_groups(run.parallel, seed=1):
        teacher = build(run, 1, tokens).eval().requires_grad_(False)
        trainer = trainer_of(run, teacher, tokens)
        trainer.train_step([batch_of(run, WARM_UP)])
        clock = Clock(tell=tell and agreement.is_first())
        watch(trainer, teacher, clock)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        started = time.monotonic()
        result = trainer.train_step([batch_of(run, tokens)])
        seconds = time.monotonic() - started
        peaks = agreement.of_all((before, status("VmHWM")))
    known = sum(clock.seconds[part] for part in PARTS)
    clock.seconds["backward"] = seconds - known  # recomputed forwards are layers', not a whole decoder's
    return {
        "tokens": tokens,
        "context_parallel": context,
        "seconds": seconds,
        "peak_bytes_per_token": (sum(peak for _, peak in peaks) - sum(b for b, _ in peaks)) / tokens,
        "peak_gib": sum(peak for _, peak in peaks) / 2**30,
        "gib_before": sum(b for b, _ in peaks) / 2**30,
        "parts": clock.seconds,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
    }


def machine() -> dict[str, Any]:
    import torch

    return {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def show(run: dict[str, Any]) -> None:
    parts = "  ".join(f"{name} {run['parts'][name]:.1f}" for name in (*PARTS, *KINDS.values()))
    print(
        f"CP {run['context_parallel']}  {run['tokens']:7,} tokens  {run['peak_bytes_per_token'] / 1024:6.1f} KiB each  "
        f"{run['peak_gib']:5.2f} GiB in all  {run['seconds']:7.1f} s:  {parts}",
        flush=True,
    )


def spread(runs: list[dict[str, Any]]) -> float | None:
    """Largest distance of peak bytes a token from their median, from 16K tokens on, relative."""
    found = [run["peak_bytes_per_token"] for run in runs if run["tokens"] >= 16384]
    median = statistics.median(found) if found else 0.0
    return max(abs(value / median - 1) for value in found) if found else None


def main() -> None:
    arguments = parse_arguments()
    runs = []
    for context in arguments.context_parallel:
        for tokens in arguments.tokens:
            tell = tokens > TOKENS[-1]
            job = (tokens, context, arguments.recipe, arguments.recompute, tell)
            runs.append(launcher.run("long_context:measure", job, context))
            show(runs[-1])
    by_context = {c: [run for run in runs if run["context_parallel"] == c] for c in arguments.context_parallel}
    first = by_context[arguments.context_parallel[0]]
    result = {
        "tokens": [run["tokens"] for run in first],
        "peak_bytes_per_token": [run["peak_bytes_per_token"] for run in first],
        "seconds": [run["seconds"] for run in first],
        "context_parallel": arguments.context_parallel[0],
        "spread_from_16k": {str(c): spread(found) for c, found in by_context.items()},
        "runs": runs,
    }
    settings = {"recipe": arguments.recipe, "recompute": arguments.recompute, "model": model()}
    print(json.dumps({**result, **settings, "machine": machine()}))


def model() -> dict[str, Any]:
    from nemo_qad.config import compose

    return dataclasses.asdict(compose(["+recipe=max"]).model)


if __name__ == "__main__":
    main()
