"""Measures the distillation loss beside ModelOpt's LogitsKLLoss: memory, time, errors, gradients over ranks.

    python benchmarks/kl.py [--quick]           everything, about 6 minutes on 2 cores
    python benchmarks/kl.py --long              522,240 tokens x 131,072 words, D 64, alone: half an hour or more

Each memory and time is that of forward and backward with both projections, in a process of its own with one
thread; ours and ModelOpt's take turns, medians are quoted. Extra peak memory is what the resident set rose above
the inputs, less the two gradients that any loss has to return.

The last line is one JSON object: peak_ratio_vs_modelopt, time_ratio_vs_modelopt (FP32; bf16 in *_bf16),
gradient_ratio_tp (tensor parallel 1, 2, 4: a rank's gradient over the one-rank gradient, whichever of the full,
fused, top-k and sampled losses and whichever rank is furthest from 1), peak_growth_with_tokens (65,536 tokens over
2,048, less 1), loss_error and gradient_error (FP32 against an FP64 truth, relative; *_unrelated: of two models that
have nothing in common; *_naive: of plain FP32 PyTorch), tail_attack, sampled_gradient_bias, and more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = ("ours", "modelopt", "products")
MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, not how well")
    parser.add_argument("--long", action="store_true", help="522,240 tokens x 131,072 words, ours alone")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--tokens", type=int, help="of the side by side, default 1,024")
    parser.add_argument("--vocabulary", type=int, help="of the side by side, default 131,072")
    parser.add_argument("--hidden", type=int, help="of the side by side, default 256")
    parser.add_argument("--memory-mib", type=int, default=128, help="scratch memory of the fused loss (default 128)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(**job: Any) -> dict[str, Any]:
    """Runs one measurement in a process of its own and returns what it printed last."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"measurement {job} failed with status {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak since `forget_peak`) of this process."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"{field} is not in /proc/self/status: memory is measured on Linux alone")


def forget_peak() -> None:
    """Sets VmHWM back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def models(job: dict[str, Any]) -> tuple:  # type: ignore[type-arg]
    """Hidden states and output weights of two models that nearly agree: 0.057 nats a token at D 256."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    tokens, words, hidden = job["tokens"], job["vocabulary"], job["hidden"]
    teacher_hidden = torch.randn(tokens, hidden)
    student_hidden = torch.randn(tokens, hidden).mul_(0.1).add_(teacher_hidden).to(dtype).requires_grad_()
    teacher_weight = torch.randn(words, hidden).div_(hidden**0.5)
    student_weight = torch.randn(words, hidden).mul_(0.02).add_(teacher_weight).to(dtype).requires_grad_()
    return teacher_hidden.to(dtype), teacher_weight.to(dtype), student_hidden, student_weight


def loss_of(job: dict[str, Any], inputs: tuple) -> Any:  # type: ignore[type-arg]
    import torch

    if job["case"] == "ours":
        from nemo_qad.distillation.linear_kl import linear_kl

        mask = torch.ones(job["tokens"])
        budget = job["memory_mib"] * MIB
        total, count = linear_kl(*inputs, mask, vocab_size=job["vocabulary"], memory_budget=budget)
        return total / count
    from types import SimpleNamespace

    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss

    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False, hidden_size=job["hidden"])
    teacher_hidden, teacher_weight, student_hidden, student_weight = inputs
    with torch.no_grad():
        teacher_logits = torch.nn.functional.linear(teacher_hidden, teacher_weight)[:, None]
    student_logits = torch.nn.functional.linear(student_hidden, student_weight)[:, None]
    loss, _, _ = LogitsKLLoss(config)(student_logits, teacher_logits)
    return loss.mean()


def products(inputs: tuple) -> None:  # type: ignore[type-arg]
    """The four matrix products that any such loss has, each as a whole: what time cannot go much below."""
    import torch

    teacher_hidden, teacher_weight, student_hidden, student_weight = (t.detach() for t in inputs)
    torch.nn.functional.linear(teacher_hidden, teacher_weight)
    logits = torch.nn.functional.linear(student_hidden, student_weight)
    student_hidden.copy_(logits @ student_weight)
    logits.T @ student_hidden


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward: seconds, extra peak bytes beyond inputs and gradients, loss (of products: seconds)."""
    import torch

    torch.set_num_threads(job["threads"])
    warm = {**job, "tokens": 4, "vocabulary": 256}
    if job["case"] != "products":
        loss_of(warm, models(warm)).backward()  # imports, and the first use of each kernel
    inputs = models(job)
    forget_peak()
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    if job["case"] == "products":
        products(inputs)
        return {"seconds": time.perf_counter() - started, "extra": 0, "gradients": 0, "loss": float("nan")}
    loss = loss_of(job, inputs)
    loss.backward()
    seconds = time.perf_counter() - started
    gradients = sum(t.grad.numel() * t.grad.itemsize for t in inputs[2:])
    extra = resident_bytes("VmHWM") - before - gradients
    return {"seconds": seconds, "extra": extra, "gradients": gradients, "loss": loss.item()}


def side_by_side(arguments: argparse.Namespace, dtype: str) -> dict[str, float]:
    quick = arguments.quick
    job = {
        "kind": "measure", "dtype": dtype, "threads": arguments.threads, "memory_mib": arguments.memory_mib,
        "tokens": arguments.tokens or (64 if quick else 1024),
        "vocabulary": arguments.vocabulary or (4096 if quick else 131072),
        "hidden": arguments.hidden or (32 if quick else 256),
    }  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(arguments.repeats):
        for case in CASES:
            runs[case].append(in_own_process(case=case, **job))
    middle = {
        case: {key: statistics.median(run[key] for run in found) for key in found[0]} for case, found in runs.items()
    }
    for case, found in middle.items():
        each = ", ".join(f"{run['seconds']:.2f}" for run in runs[case])
        memory = f"  extra peak {found['extra'] / MIB:7.0f} MiB  loss {found['loss']:.6f}"
        print(f"{dtype} {case:9} {found['seconds']:6.2f} s ({each}){memory * (case != 'products')}", flush=True)
    ours, peer = middle["ours"], middle["modelopt"]
    return {
        "peak_ratio": ours["extra"] / peer["extra"],
        "peak_ratio_with_gradients": (ours["extra"] + ours["gradients"]) / (peer["extra"] + peer["gradients"]),
        "time_ratio": ours["seconds"] / peer["seconds"],
        "extra_mib": ours["extra"] / MIB,
        "modelopt_extra_mib": peer["extra"] / MIB,
        "seconds": ours["seconds"],
        "modelopt_seconds": peer["seconds"],
        "products_seconds": middle["products"]["seconds"],
        "seconds_of_each_run": [run["seconds"] for run in runs["ours"]],
        "modelopt_seconds_of_each_run": [run["seconds"] for run in runs["modelopt"]],
    }


def growth(arguments: argparse.Namespace) -> dict[str, Any]:
    """Extra peak of the fused loss over many tokens and over few."""
    few, many, words = (64, 2048, 4096) if arguments.quick else (2048, 65536, 32768)
    job = {"kind": "measure", "case": "ours", "dtype": "float32", "vocabulary": words, "hidden": 64}
    job |= {"threads": arguments.threads, "memory_mib": arguments.memory_mib}
    extra = [in_own_process(tokens=tokens, **job)["extra"] for tokens in (few, many)]
    print(f"extra peak {extra[0] / MIB:.1f} MiB for {few} tokens, {extra[1] / MIB:.1f} MiB for {many}", flush=True)
    return {
        "peak_growth_with_tokens": extra[1] / extra[0] - 1,
        "peak_extra_mib_by_tokens": {few: extra[0] / MIB, many: extra[1] / MIB},
    }


def long_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """522,240 tokens and 131,072 words; loss and gradients are checked against FP64 on some tokens and words."""
    job = {
        "kind": "long", "case": "ours", "dtype": "float32", "hidden": arguments.hidden or 64,
        "tokens": arguments.tokens or 522240, "vocabulary": arguments.vocabulary or 131072,
        "threads": max(2, arguments.threads), "memory_mib": arguments.memory_mib,
    }  # fmt: skip
    return in_own_process(**job)


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        import kl_accuracy

        job = json.loads(arguments.child)
        runners = {"measure": measure, "long": kl_accuracy.long_run, "accuracy": kl_accuracy.accuracy}
        print(
            json.dumps(
                {**runners, "ranks": kl_accuracy.gradient_ratios, "sparse": kl_accuracy.sparse}[job["kind"]](job)
            )
        )
        return
    if arguments.long:
        print(json.dumps(long_run(arguments)))
        return
    fp32, bf16 = side_by_side(arguments, "float32"), side_by_side(arguments, "bfloat16")
    result = {
        "peak_ratio_vs_modelopt": fp32["peak_ratio"],
        "time_ratio_vs_modelopt": fp32["time_ratio"],
        "peak_ratio_vs_modelopt_bf16": bf16["peak_ratio"],
        "time_ratio_vs_modelopt_bf16": bf16["time_ratio"],
        **growth(arguments),
        "side_by_side": {"float32": fp32, "bfloat16": bf16},
    }
    for kind in ("accuracy", "ranks", "sparse"):
        result |= in_own_process(kind=kind, threads=arguments.threads, quick=arguments.quick)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
