"""Measures the demo: the whole pipeline in a process of its own, once a recipe and seed.

    python benchmarks/demo.py --recipe four_over_six --seeds 1234,1,2 [--cold] [--keep] [OVERRIDE ...]

Prints a line a run; the last line is one JSON object: recipe, kl_ptq, kl_qad, kl_fall (held-out, nats per
token, means over seeds), seconds (wall clock of the process), peak_gib (resident memory of its largest
process), and each per seed under *_per_seed. With several recipes every value is a list in their order.
Without --cold the first run's data and teacher are cached for the others, as in daily use; its time holds
what it had to prepare.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEASURES = ("kl_ptq", "kl_qad", "kl_fall", "seconds", "peak_gib")
MAXRSS_UNITS_PER_GIB = 2**30 if sys.platform == "darwin" else 2**20  # bytes on macOS, KiB on Linux


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="four_over_six", help="names, separated by commas")
    parser.add_argument("--seeds", default="1234", help="numbers, separated by commas")
    parser.add_argument("--cold", action="store_true", help="an empty cache for every run")
    parser.add_argument("--keep", action="store_true", help="keep the run folders and say where they are")
    parser.add_argument("overrides", nargs="*", help="more of the configuration, such as experiment=quick")
    arguments = parser.parse_args()
    arguments.recipe = [name for name in arguments.recipe.split(",") if name]
    try:
        arguments.seeds = [int(seed) for seed in arguments.seeds.split(",") if seed]
    except ValueError:
        parser.error(f"--seeds {arguments.seeds}: whole numbers are needed, separated by commas")
    if not arguments.recipe or not arguments.seeds:
        parser.error("--recipe and --seeds need at least one value")
    return arguments


def run_demo(recipe: str, seed: int, output_dir: Path, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs the pipeline once and measures it. Raises SystemExit with the end of its output where it fails."""
    command = [
        sys.executable, "-m", "nemo_qad.train", f"+recipe={recipe}", f"seed={seed}",
        f"run_dir={run_dir}", f"output_dir={output_dir}", *overrides,
    ]  # fmt: skip
    log = run_dir.with_name(f"{run_dir.name}.log")
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            # wait4 gives the resources of this child and of those it waited for, not of earlier runs.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    seconds = time.monotonic() - started
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        raise SystemExit("\n".join([*tail, f"{' '.join(command)}: exit status {process.returncode}"]))
    measured = read_held_out(run_dir / "stages" / "evaluate.json")
    return {**measured, "seconds": seconds, "peak_gib": usage.ru_maxrss / MAXRSS_UNITS_PER_GIB}


def read_held_out(path: Path) -> dict[str, float]:
    """The held-out KL of PTQ and of QAD from the evaluate stage, and its fall."""
    models = json.loads(path.read_text(encoding="utf-8"))["models"]
    ptq, qad = (models[name]["held_out_kl"] for name in ("ptq", "qad"))
    return {"kl_ptq": ptq, "kl_qad": qad, "kl_fall": 1 - qad / ptq}


def measure_recipe(recipe: str, arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    """All seeds of one recipe: means, and lists per seed."""
    runs = []
    for seed in arguments.seeds:
        run_dir = root / f"{recipe}-{seed}"
        output_dir = root / f"output-{recipe}-{seed}" if arguments.cold else root / "output"
        runs.append(run_demo(recipe, seed, output_dir, run_dir, arguments.overrides))
        found = runs[-1]
        print(
            f"{recipe} seed {seed}: held-out KL {found['kl_ptq']:.5f} -> {found['kl_qad']:.5f} "
            f"(fall {100 * found['kl_fall']:.1f} %), {found['seconds']:.0f} s, {found['peak_gib']:.2f} GiB",
            flush=True,
        )
    lists = {key: [run[key] for run in runs] for key in MEASURES}
    means = {key: statistics.fmean(values) for key, values in lists.items()}
    per_seed = {f"{key}_per_seed": values for key, values in lists.items()}
    return {"recipe": recipe, **means, **per_seed, "seeds": arguments.seeds}


def main() -> None:
    arguments = parse_arguments()
    root = Path(tempfile.mkdtemp(prefix="nemo_qad_demo_"))
    try:
        results = [measure_recipe(recipe, arguments, root) for recipe in arguments.recipe]
    finally:
        if arguments.keep:
            print(f"kept: {root}", flush=True)
        else:
            shutil.rmtree(root, ignore_errors=True)
    if len(results) > 1:
        for result in results:
            print(json.dumps(result))
        print(json.dumps({key: [result[key] for result in results] for key in results[0]}))
    else:
        print(json.dumps(results[0]))


if __name__ == "__main__":
    main()
