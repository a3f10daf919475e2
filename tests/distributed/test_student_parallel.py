"""A quantised student written in one layout is the same student, bit for bit, when it is read in another."""

from __future__ import annotations

import torch
from layouts import LAYOUTS, ONE, batches, build, hybrid
from ranks import Results, run_ranks

from nemo_qad import runtime
from nemo_qad.config import compose
from nemo_qad.quantization.calibrate import quantize
from nemo_qad.schema import ParallelConfig
from nemo_qad.stages.session import load_student_tensors, student_tensors

MODEL = hybrid(vocab_size=300)  # 384 rows of output weight on one rank, 512 on two
RECIPE = compose(["+recipe=lightning_release"]).recipe


def write(rank: int, parallel: ParallelConfig) -> Results:
    with runtime.process_groups(parallel, seed=1, threads=1):
        module = build(MODEL, parallel)
        quantize(module, RECIPE, MODEL, batches(MODEL, 2))
        return student_tensors(module)


def read_and_write(rank: int, parallel: ParallelConfig, tensors: Results) -> Results:
    with runtime.process_groups(parallel, seed=2, threads=1):
        module = build(MODEL, parallel)
        load_student_tensors(module, tensors, RECIPE, MODEL)
        return student_tensors(module)


def check(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys() and len(expected) > 60
    for name, reference in expected.items():
        value = found[name]
        rows = min(len(value), len(reference)) if value.dim() else None
        assert torch.equal(value[:rows] if rows else value, reference[:rows] if rows else reference), name


def test_students_travel_between_layouts() -> None:
    first = run_ranks(write, 1, ONE, environment=True)[0]
    two = run_ranks(read_and_write, 2, LAYOUTS["tp2_ep2"], first, environment=True)
    assert not two[1]  # the first rank has it all
    check(two[0], first)
    four = run_ranks(read_and_write, 4, LAYOUTS["tp2_pp2"], two[0], environment=True)
    check(four[0], first)
    check(run_ranks(read_and_write, 1, ONE, four[0], environment=True)[0], first)
