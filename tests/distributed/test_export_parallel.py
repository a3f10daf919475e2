"""A student exported in any layout is the same checkpoint, byte for byte, and decodes to its weights.

Its prediction block, which no rank holds, comes along from the checkpoint that the student was made from.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from layouts import LAYOUTS, ONE, batches, build, hybrid
from ranks import Results, run_ranks
from safetensors.torch import save_file

from nemo_qad import agreement, runtime
from nemo_qad.config import compose
from nemo_qad.files import sha256
from nemo_qad.huggingface.export import Origin, expected_weights, export_student
from nemo_qad.huggingface.load import load_weights
from nemo_qad.huggingface.names import carried
from nemo_qad.huggingface.save import carried_tensors, save_bf16
from nemo_qad.huggingface.verify import verify_folder
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.quantization.student import deployed_weights
from nemo_qad.schema import ParallelConfig
from nemo_qad.stages.session import load_student_tensors, student_tensors

# A vocabulary of 300: 384 rows of output weight on one rank, 512 on two.
MODEL = replace(hybrid(vocab_size=300), mtp_pattern="*E", mtp_num_layers=1)
GRID = {
    "lightning_release": ("tp2", "cp2", "pp2_dp2_ep2"), "four_over_six_nvfp4_kv": ("tp2_ep2",),
    "four_over_six_w4a4": ("tp2_ep2",),
}  # fmt: skip


def write(rank: int, parallel: ParallelConfig, name: str, folder: Path, tensors: Results | None) -> Results:
    """The student of one rank's calibration, or the one that is given, exported, and as BF16."""
    recipe = compose([f"+recipe={name}"]).recipe
    with runtime.process_groups(parallel, seed=2, threads=1):
        module = build(MODEL, parallel)
        source = folder / "plain"
        save_bf16(module, source, MODEL, None, 1.0, folder.parent / "blocks")
        load_weights(module, source, MODEL)
        if tensors is None:
            quantize(module, recipe, MODEL, batches(MODEL, 2))
            tensors = student_tensors(module)
        else:
            load_student_tensors(module, tensors, recipe, MODEL)
        with deployed_weights(module):
            facts = export_student(module, folder / "export", MODEL, recipe, None, 0.00005, Origin(source))
            verified = agreement.first_reads(
                expected_weights(module, MODEL),
                lambda weights: verify_folder(folder / "export", chain(weights, carried_tensors(MODEL, source))),
            )
        counts = (facts["num_tensors"], verified["num_values_compared"])
        return {"counts": torch.tensor(counts)} | (tensors if rank == 0 and parallel.name == "one" else {})


@pytest.mark.parametrize("recipe", GRID)
def test_exports_of_all_layouts_are_the_same_bytes(tmp_path: Path, recipe: str) -> None:
    random = torch.Generator().manual_seed(9)
    shapes = {name: shape for m in carried(MODEL) for name, shape in zip(m.hf, m.shapes, strict=True)}
    (tmp_path / "blocks").mkdir()
    save_file({n: torch.randn(s, generator=random) for n, s in shapes.items()}, tmp_path / "blocks/model.safetensors")
    student = run_ranks(write, 1, ONE, recipe, tmp_path / "one", None, environment=True)[0]
    counts = student.pop("counts")
    expected = sorted((tmp_path / "one/export").iterdir())
    assert len(expected) > 4  # several shards, the index and two configurations
    for name in GRID[recipe]:
        layout = LAYOUTS[name]
        ranks = run_ranks(
            write, layout.ranks_per_node, layout, recipe, tmp_path / name, student, environment=True
        )
        assert all(torch.equal(found["counts"], counts) for found in ranks)
        for path in expected:
            assert sha256(tmp_path / name / "export" / path.name) == sha256(path), (name, path.name)
