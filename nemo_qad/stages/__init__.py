"""The stages of a run, in order: each reads and writes the run folder and skips what is finished."""

from nemo_qad.noise import silence

silence()  # before the imports below bring in Megatron-Core and ModelOpt

from nemo_qad.stages.pipeline import run  # noqa: E402

__all__ = ["run"]
