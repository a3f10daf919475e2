"""What a checkpoint of QAD says beside its tensors, and whether and where a run goes on from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from nemo_qad import resume
from nemo_qad.checkpoint.newest import Found
from nemo_qad.config import from_yaml
from nemo_qad.data.position import Position, Stream, moved
from nemo_qad.errors import UserError
from nemo_qad.schema import RunConfig, Stage
from nemo_qad.stages.session import Session

RESTART = (
    "give resume.restart=N, one more than before (1 the first time): QAD's checkpoints are set aside then, and it "
    "begins anew from the PTQ student"
)


@dataclass(frozen=True)
class Best:
    """The lowest held-out KL so far, in nats per token: whose weights, at which step."""

    kl: float = float("inf")
    step: int = -1
    kind: str = "none"


@dataclass(frozen=True)
class Record:
    """step: global batches taken; updates: how many of them changed the weights, the others were passed over.

    loss: of the last step's samples, those before `position.sample`, under the weights after it. ranks: how many wrote.
    """

    step: int
    updates: int
    skipped: int
    ranks: int
    loss: float
    best: Best
    first_kl: float
    last_kl: float
    position: Position
    made_from: dict[str, Any]  # teacher and PTQ student, by digest
    config: dict[str, Any]
    config_hash: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "position": self.position.to_json()}

    @classmethod
    def from_json(cls, found: Found) -> Record:
        """Raises UserError where the checkpoint is of another kind."""
        missing = [name for name in cls.__dataclass_fields__ if name not in found.meta]
        if missing:
            raise UserError(f"{found.folder}: does not say {missing[0]}, so it is not QAD's. Bring the right one back")
        meta: dict[str, Any] = {name: found.meta[name] for name in cls.__dataclass_fields__}
        meta |= {"best": Best(**meta["best"]), "position": Position.from_json(meta["position"])}
        return cls(**meta)


@dataclass(frozen=True)
class Start:
    """Where training begins. sample: the next one to read.

    record: of the checkpoint, if there is one. same_samples: those of its last step can be read again, to compare the
    loss. comparable: held-out numbers before and after are of the same kind.
    """

    sample: int = 0
    record: Record | None = None
    same_samples: bool = False
    comparable: bool = True


def made_from(session: Session) -> dict[str, Any]:
    """What the student began as."""
    ptq = session.folder.result(Stage.ptq)
    assert ptq is not None, "the stage ptq runs first"
    return {"teacher": session.teacher_digest, "ptq": ptq["files"]}


def start_from(session: Session, found: Found, stream: Stream) -> Start:
    """Where a run goes on that has a checkpoint.

    Raises:
        UserError: it belongs to another teacher, PTQ student, data, or to a longer run.
    """
    record, run = Record.from_json(found), session.run
    _refuse_other_origin(session, found, record)
    if record.step > run.qad.steps:
        raise UserError(
            f"qad.steps={run.qad.steps}: {found.folder} is of step {record.step} already. Give at least that many, "
            f"or {RESTART}"
        )
    changed = resume.changes(from_yaml(json.dumps(record.config), check=False), run)
    _refuse_other_data(run, found, record, stream, [change.name for change in changed])
    move = moved(record.position, stream)
    if stream != record.position.stream or record.config["qad"]["global_batch_size"] != run.qad.global_batch_size:
        session.say(
            f"qad: goes on at sample {move.sample:,} of the new order, after sample {record.position.sample:,} of the "
            f"old one: of this epoch {move.repeated:,} tokens are read twice and {move.skipped:,} not at all"
        )
    return Start(
        move.sample,
        record,
        same_samples=stream == record.position.stream and not resume.changes_loss(changed),
        comparable=not resume.breaks_comparison(changed) and stream.digest == record.position.stream.digest,
    )


def _refuse_other_origin(session: Session, found: Found, record: Record) -> None:
    now = made_from(session)
    for name, what in (("teacher", "another teacher"), ("ptq", "another PTQ student")):
        if record.made_from.get(name) != now[name]:
            raise UserError(
                f"{found.folder}: trained from {what} than this run has now ({record.made_from.get(name)} there, "
                f"{now[name]} now). Bring the first one back, or {RESTART}"
            )


def _refuse_other_data(
    run: RunConfig, found: Found, record: Record, stream: Stream, changed: list[str]
) -> None:
    known = record.position.stream.digest
    asked = [name for name in changed if not resume.is_free(name)] + run.resume.allow
    asked = [name for name in asked if name.split(".")[0] == "data"]
    if stream.digest != known and not asked:
        raise UserError(
            f"data: the text has digest {stream.digest}, {found.folder} was trained on {known}. Bring the first text "
            "back, or give resume.allow=[data] to go on with this one from its start"
        )
