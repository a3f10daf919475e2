"""The stages of a run, in order: each reads and writes the run folder and skips what is finished."""

from nemo_qad.stages.pipeline import run

__all__ = ["run"]
