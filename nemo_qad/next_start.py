"""What a start of a run will do, told from what its folder holds. No torch.

It follows the rules of stages/pipeline.py and stages/qad_record.py without doing their work.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_qad.errors import show
from nemo_qad.run_state import RunState
from nemo_qad.schema import RunConfig, Stage
from nemo_qad.stage_order import NEEDS, OPTIONAL, applies, made, needed


@dataclass(frozen=True)
class Next:
    """text: what it does, for a sentence. stops: it ends with an error. pending: the stages that run."""

    text: str
    stops: bool = False
    pending: tuple[Stage, ...] = ()


def next_start(state: RunState) -> Next:
    """For the folder's own configuration. The text of the data is not looked at, nor a teacher on another machine."""
    run = state.run
    if run is None:
        return _stops(state.problems[0])
    unreadable = [part.problems[0] for part in state.stages.values() if not part.found]
    if unreadable:
        return _stops(unreadable[0])
    pending: list[Stage] = []
    if Stage.teacher not in state.stages:
        pending.append(Stage.teacher)
    elif problems := state.stages[Stage.teacher].problems:
        return _stops(problems[0])
    for stage in NEEDS:
        if stage not in run.stages or not applies(stage, run):
            continue
        trouble = _trouble_of_needs(state, run, stage, pending)
        if trouble is None and _holds(state, run, stage, pending):
            trouble = next(iter(state.stages[stage].problems), None)
        elif trouble is None:
            pending.append(stage)
            trouble = _obstacle(state, run) if stage is Stage.qad and Stage.ptq not in pending else None
        if trouble is not None:
            return _stops(trouble)
    if not pending:
        return Next("finds nothing left to do")
    text = _qad_text(state, run) if pending[0] is Stage.qad else f"begins with stage {pending[0].value}"
    return Next(text, pending=tuple(pending))


def _stops(why: str) -> Next:
    return Next(f"stops: {why}", stops=True)


def _holds(state: RunState, run: RunConfig, stage: Stage, pending: list[Stage]) -> bool:
    """Whether the stage is finished, and was made from what its needs are now."""
    known, needs = state.stages.get(stage), needed(stage, run)
    if known is None or any(need in pending for need in needs):
        return False
    now = {need.value: made(state.stages[need].found if need in state.stages else None) for need in needs}
    return bool(known.found.get("inputs") == now)


def _trouble_of_needs(state: RunState, run: RunConfig, stage: Stage, pending: list[Stage]) -> str | None:
    for need in needed(stage, run):
        known = state.stages.get(need)
        if need in pending:
            continue
        if known is None and need not in OPTIONAL:
            return f"stage {stage.value} needs stage {need.value}, which is not finished"
        if known is not None and known.problems:
            return known.problems[0]
    return None


def _obstacle(state: RunState, run: RunConfig) -> str | None:
    """Why QAD cannot go on from its newest whole checkpoint."""
    if not state.checkpoints:
        return None
    step = state.newest_whole
    if step is None:
        return f"none of the {len(state.checkpoints)} checkpoints of QAD is whole"
    found = state.checkpoints[step].found
    if "made_from" not in found or "position" not in found:
        return f"the checkpoint of step {step} is not QAD's"
    origin = found["made_from"]
    if origin.get("ptq") != state.stages[Stage.ptq].found.get("files"):
        return f"the checkpoint of step {step} was trained from another PTQ student than the run has now"
    if origin.get("teacher") != state.stages[Stage.teacher].found.get("digest"):
        return f"the checkpoint of step {step} was trained from another teacher than the run has now"
    if step > run.qad.steps:
        return f"the newest checkpoint is of step {step}, and qad.steps={run.qad.steps}"
    return None


def _qad_text(state: RunState, run: RunConfig) -> str:
    step = state.newest_whole
    if step is None:
        return "begins QAD from the PTQ student"
    sample = state.checkpoints[step].found["position"]["sample"]
    damaged = [str(each) for each in state.checkpoints if each > step]
    passed = f"; the damaged one of step {show(damaged)} is passed over" if damaged else ""
    return f"continues QAD after step {step} of {run.qad.steps}, with sample {sample:,}{passed}"
