"""The stages of a run, in order: each reads and writes the run folder and skips what is finished."""

import os

from nemo_qad.noise import silence

# Both before the import below brings in torch, Megatron-Core and ModelOpt.
# By default a waiting OpenMP thread spins; when anything else wants its core, each of a step's many barriers
# then costs a time slice. A short spin is 7 % slower on an idle machine and 3x faster on a busy one (median
# of 45 steps of the embedded teacher on 2 cores).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
silence()

from nemo_qad.stages.pipeline import run  # noqa: E402

__all__ = ["run"]
