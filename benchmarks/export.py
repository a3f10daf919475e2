"""Measures an export with its verification, against copying the BF16 file and quantising the weights once.

    python benchmarks/export.py [--gigabytes 1.0] [--recipe four_over_six] [--shard-gb 0.1] [--repeats 3]

Prints a line a repetition; the last line is one JSON object: speed_ratio (seconds of copy and quantisation / seconds of
export and verification, median), peak_ratio (memory at the peak above the model / largest shard + largest tensor), the
seconds of the parts, sizes in bytes, load_peak_bytes above the model while it is read. Peak memory is resident memory
as the kernel counts it, the pages of mapped files among it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.huggingface.export import expected_rows, export_student
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.huggingface.sizes import export_size
from nemo_qad.huggingface.verify import verify_folder
from nemo_qad.models.build import build_model
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.student import deployed_weights, is_quantised, stored_linear
from nemo_qad.schema import AttentionConfig, MambaConfig, ModelConfig, MoeConfig, ParallelConfig, Precision

LENGTH, VOCABULARY = 32, 65536


def model_of(gigabytes: float) -> ModelConfig:
    """Every kind of layer; experts make up the size."""
    model = ModelConfig(
        name="benchmark", hybrid_pattern="ME*-ME", hidden_size=1024, vocab_size=VOCABULARY, max_position_embeddings=64,
        ffn_hidden_size=4096, precision=Precision.bf16, attention=AttentionConfig(16, 2, 64),
        mamba=MambaConfig(32, 64, 8, 64), moe=MoeConfig(8, 2, 1024, 2048),
    )  # fmt: skip
    while export_size(model, None).num_bytes < gigabytes * 1e9:
        model.moe.num_experts += 8
    return model


def reset_peak() -> int:
    """Gives back what is free, forgets the peak so far; resident bytes now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory that is free already hides what an export takes
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def copy(source: Path, target: Path) -> float:
    """Seconds to copy a folder's weights and have them on the disk."""
    started = time.perf_counter()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def quantise_once(module: nn.Module) -> float:
    """Seconds to quantise and pack every quantised weight once."""
    started = time.perf_counter()
    with torch.no_grad():
        for name, linear in module.named_modules():
            if is_quantised(linear):
                stored_linear(name, linear)
    return time.perf_counter() - started


def measure(module: nn.Module, model: ModelConfig, recipe: Any, root: Path, shard_gb: float) -> dict[str, float]:
    copied = root / "copy"
    copied.mkdir(exist_ok=True)
    found = {"copy": copy(root / "bf16", copied), "quantise": quantise_once(module)}
    shutil.rmtree(copied)
    before = reset_peak()
    started = time.perf_counter()
    with deployed_weights(module):
        export_student(module, root / "export", model, recipe, None, shard_gb)
        found["export"] = time.perf_counter() - started
        found["export_peak"] = _status("VmHWM") - before
        with runtime.one_thread_an_operation() as threads:
            verify_folder(root / "export", expected_rows(module, model), threads)
    found["verify"] = time.perf_counter() - started - found["export"]
    found["peak"] = _status("VmHWM") - before
    found["speed_ratio"] = (found["copy"] + found["quantise"]) / (found["export"] + found["verify"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the BF16 checkpoint (default 1)")
    parser.add_argument("--recipe", default="four_over_six")
    parser.add_argument("--shard-gb", type=float, default=0.1, help="largest shard, 10^9 bytes (default 0.1)")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model, recipe = model_of(given.gigabytes), compose([f"+recipe={given.recipe}"]).recipe
    root = Path(tempfile.mkdtemp(prefix="nemo_qad_export_"))
    try:
        with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=2):
            module = build_model(model, ParallelConfig(name="single"), sequence_length=LENGTH).eval()
            tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
            batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(4, LENGTH)}
            save_bf16(module, root / "bf16", model, None, given.shard_gb)
            before = reset_peak()
            load_weights(module, root / "bf16", model)
            load_peak = _status("VmHWM") - before
            quantize(module, recipe, model, [batch])
            runs = []
            for number in range(given.repeats):
                runs.append(measure(module, model, recipe, root, given.shard_gb))
                shown = ", ".join(f"{key} {value:.2f} s" for key, value in list(runs[-1].items())[:3])
                print(f"{number + 1}: {shown}, verify {runs[-1]['verify']:.2f} s", flush=True)
        sizes = [path.stat().st_size for path in (root / "export").glob("*.safetensors")]
        largest = VOCABULARY * model.hidden_size * 2  # embedding and output layer, BF16
        limit = max(sizes) + largest
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        facts = {
            "speed_ratio": medians["speed_ratio"], "peak_ratio": max(run["peak"] for run in runs) / limit,
            "export_peak_ratio": max(run["export_peak"] for run in runs) / limit,
            "load_peak_bytes": load_peak,
            **{f"{key}_seconds": medians[key] for key in ("copy", "quantise", "export", "verify")},
            "bf16_bytes": export_size(model, None).num_bytes, "export_bytes": sum(sizes),
            "largest_shard_bytes": max(sizes), "largest_tensor_bytes": largest, "recipe": given.recipe,
        }  # fmt: skip
        print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in facts.items()}))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
