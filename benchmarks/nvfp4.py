"""Measures NVFP4: the speed of four-over-six, its codes against the oracle, and what each search for scales gains.

    python benchmarks/nvfp4.py [--quick] [--weights FILE.safetensors ...]      under two minutes on one core

Speed: a BF16 tensor of 4096 x 4096 becomes codes, block scales and a global scale, one thread, median of the runs.
Codes: four-over-six of a million blocks of each distribution, eager and compiled, against the oracle (every code and
scale) and against brute force (the FP64 errors of both choices, from what a decoder reads). Searches: mean squared
error of what a decoder reads, times 1e6; of files, relative to the mean square of each weight.

The last line is one JSON object: seconds_4096 (compiled where there is a C++ compiler, otherwise eager),
seconds_4096_eager, mismatches (codes, scales and choices of all blocks that differ), near_ties (blocks whose two
FP64 errors agree to 1e-6 and where FP32 took the larger; no mismatch), bounded_sweep_excess_mse (over the exhaustive
sweep, the worst of all distributions and both grids), mse_x1e6 by distribution and search, and more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_qad.quantization import nvfp4, nvfp4_fast, nvfp4_oracle, nvfp4_search

DISTRIBUTIONS = ("normal", "uniform", "student_t4", "adversarial")
ORACLE_BLOCKS = 2**16  # at a time: the oracle holds many copies
NEAR_TIE = 1e-6
SEARCHES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "max_448": (lambda tensor, _: nvfp4.block_amax(tensor), 448.0),
    "max_256": (lambda tensor, _: nvfp4.block_amax(tensor), 256.0),
    "four_over_six": (nvfp4.four_over_six_amax, 256.0),
    "bounded_448": (partial(nvfp4_search.bounded_sweep_amax, scale_max=448.0), 448.0),
    "bounded_256": (partial(nvfp4_search.bounded_sweep_amax, scale_max=256.0), 256.0),
    "sweep_448": (partial(nvfp4_search.sweep_amax, scale_max=448.0), 448.0),
    "sweep_256": (partial(nvfp4_search.sweep_amax, scale_max=256.0), 256.0),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks and runs: does it run, not how well")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="safetensors files to search scales for")
    parser.add_argument("--runs", type=int, default=7, help="of which the median is quoted (default 7)")
    parser.add_argument("--blocks", type=int, default=10**6, help="of each distribution (default 1,000,000)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.blocks = 2, 3 * nvfp4_fast.CPU_CHUNK_BLOCKS
    return arguments


def draw(name: str, num_blocks: int) -> Tensor:
    """FP32 [num_blocks, 16]: sizes as weights have them."""
    shape = (num_blocks, 16)
    if name == "uniform":
        return torch.rand(shape).mul_(0.2).sub_(0.1)
    if name == "student_t4":
        return torch.distributions.StudentT(4.0).sample(shape).mul_(0.02)
    return adversarial(num_blocks) if name == "adversarial" else torch.randn(shape).mul_(0.02)


def adversarial(num_blocks: int) -> Tensor:
    """Elements on the ties of their block's own scale, or one bit beside; zero, lonely, equal and vanishing ones."""
    byte = torch.randint(1, 121, (num_blocks,))
    byte[0] = 120  # 256: the block that holds the tensor's largest element
    step = nvfp4_oracle.steps(byte, torch.tensor(0.7), 256.0)
    ties = (nvfp4_oracle.E2M1[1:] + nvfp4_oracle.E2M1[:-1]) / 2
    points = torch.cat([nvfp4_oracle.E2M1, ties])
    values = points[torch.randint(0, len(points), (num_blocks, 16))] * step[:, None]
    nudge = torch.randint(-1, 2, values.shape, dtype=torch.int32)
    values = torch.where(values > 0, (values.view(torch.int32) + nudge).view(torch.float32), values)
    values[:, 0] = 6 * step
    values[1::11, 1:] = 0
    values[2::13] = 0
    values[3::7] = values[3::7, :1]
    values[4::17] *= 2.0**-20
    return values * (torch.randint(0, 2, values.shape) * 2 - 1)


def median_seconds(work: Callable[[], Any], runs: int) -> tuple[float, list[float]]:
    work()
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), seconds


def speed(runs: int) -> dict[str, Any]:
    weight = draw("normal", 4096 * 256).view(4096, 4096).bfloat16()
    outer = weight.abs().amax().float()
    pack = partial(nvfp4_fast.four_over_six, weight, packed=True)
    result: dict[str, Any] = {"compiled": nvfp4_fast.can_compile()}
    result["seconds_4096_eager"], result["seconds_of_each_run_eager"] = median_seconds(pack, runs)
    result["seconds_4096"], result["seconds_of_each_run"] = result["seconds_4096_eager"], []
    if result["compiled"]:
        started = time.perf_counter()
        pack(compiled=True)
        result["seconds_to_compile"] = time.perf_counter() - started
        fast = partial(pack, compiled=True)
        result["seconds_4096"], result["seconds_of_each_run"] = median_seconds(fast, runs)
    choose = partial(nvfp4.four_over_six_amax, weight, outer)
    result["seconds_4096_choice_alone_eager"] = median_seconds(choose, runs)[0]
    bounded = partial(nvfp4_search.bounded_sweep_amax, weight, outer)
    result["seconds_4096_bounded_sweep"] = median_seconds(bounded, max(1, runs // 3))[0]
    for key in ("seconds_4096", "seconds_4096_eager", "seconds_4096_choice_alone_eager", "seconds_4096_bounded_sweep"):
        print(f"{key:34} {result[key]:.3f} s", flush=True)
    return result


def compare(name: str, num_blocks: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks in which eager or compiled four-over-six differs from the oracle or from brute force."""
    tensor = draw(name, num_blocks).to(dtype)
    outer = tensor.abs().amax().float()
    variants = [False, True] if nvfp4_fast.can_compile() else [False]
    found = [nvfp4_fast.four_over_six(tensor, packed=True, compiled=compiled).packed for compiled in variants]
    wrong = near = 0
    for start in range(0, num_blocks, ORACLE_BLOCKS):
        part = slice(start, start + ORACLE_BLOCKS)
        values = tensor[part].float()
        scales = nvfp4_oracle.four_over_six(values, outer)
        codes = nvfp4_oracle.pack(nvfp4_oracle.encode(values, nvfp4_oracle.steps(scales, outer, 256.0)))
        for packed in found:
            assert packed is not None
            same = packed.block_scale[part].view(torch.uint8).flatten() == scales
            wrong += int((~(same & (packed.codes[part] == codes).all(1))).sum())
        took_larger = excess(values, outer, scales)
        wrong += int((took_larger > NEAR_TIE).sum())
        near += int(((took_larger > 0) & (took_larger <= NEAR_TIE)).sum())
    print(f"{name:12} {dtype!s:15} {num_blocks} blocks: {wrong} mismatches, {near} near ties", flush=True)
    return {"mismatches": wrong, "near_ties": near}


def excess(values: Tensor, outer: Tensor, scales: Tensor) -> Tensor:
    """By how much the FP64 error of the scales taken exceeds that of the better choice, relative."""
    amax = nvfp4_oracle.block_amax(values)
    candidates = [nvfp4_oracle.scale_bytes(amax * factor, outer, 256.0) for factor in (1.0, 1.5)]
    at_6, at_4, taken = (exact_error(values, nvfp4_oracle.steps(s, outer, 256.0)) for s in (*candidates, scales))
    lower = torch.minimum(at_6, at_4)
    return torch.where(taken > lower, (taken - lower) / taken, 0.0)


def exact_error(values: Tensor, step: Tensor) -> Tensor:
    decoded = nvfp4_oracle.decode(nvfp4_oracle.encode(values, step), step)
    return (decoded.double() - values.double()).square().sum(1)


def searches(tensor: Tensor) -> dict[str, float]:
    """Mean squared error by search, of what a decoder reads."""
    outer = tensor.abs().amax().float()
    result = {}
    for name, (search, scale_max) in SEARCHES.items():
        decoded = nvfp4.decode(nvfp4.pack(tensor, search(tensor, outer), outer, scale_max))
        result[name] = (decoded.double() - tensor.double()).square().mean().item()
    return result


def matrices(files: list[Path]) -> Iterator[Tensor]:
    """Matrices of the files that blocks divide, those under 4,096 elements left out."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118  (a file, not a dictionary)
                tensor = stored.get_tensor(key).float()
                cut = tensor.dim() == 2 and tensor.shape[1] % 16 == 0 and tensor.numel() >= 4096
                if cut and tensor.abs().amax() > 0:
                    yield tensor


def relative_searches(files: list[Path]) -> dict[str, float]:
    """Squared error over the weight's mean square, averaged over the matrices of the files."""
    each = []
    for tensor in matrices(files):
        size = tensor.double().square().mean().item()
        each.append({name: error / size for name, error in searches(tensor).items()})
    print(f"{len(each)} matrices of {len(files)} files", flush=True)
    return {name: statistics.mean(one[name] for one in each) for name in SEARCHES} if each else {}


def table(errors: dict[str, dict[str, float]]) -> None:
    print(f"MSE x 1e6    {''.join(f'{name:>15}' for name in SEARCHES)}")
    for distribution, row in errors.items():
        print(f"{distribution:13}{''.join(f'{row[name]:15.4g}' for name in SEARCHES)}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    result = speed(arguments.runs)
    counts = [compare(name, arguments.blocks, torch.float32) for name in DISTRIBUTIONS]
    counts += [compare(name, arguments.blocks, torch.bfloat16) for name in ("normal", "student_t4")]
    result |= {key: sum(count[key] for count in counts) for key in ("mismatches", "near_ties")}
    size = 2**13 if arguments.quick else 2**16
    errors = {name: searches(draw(name, size).view(-1, 1024)) for name in DISTRIBUTIONS[:3]}
    if arguments.weights:
        errors["files"] = relative_searches(arguments.weights)
    result["mse_x1e6"] = {name: {key: 1e6 * error for key, error in row.items()} for name, row in errors.items() if row}
    table(result["mse_x1e6"])
    result["bounded_sweep_excess_mse"] = max(
        row[f"bounded_{grid}"] / row[f"sweep_{grid}"] - 1 for row in errors.values() if row for grid in (448, 256)
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
