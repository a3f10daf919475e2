"""What ranks decide together, and how an error of one reaches the others."""

from __future__ import annotations

import torch
from ranks import Results, run_ranks

from nemo_qad import agreement
from nemo_qad.errors import ConfigError, StoppedElsewhereError, UserError


def agree(rank: int) -> Results:
    assert agreement.is_first() == (rank == 0)
    assert agreement.from_first({"rank": rank}) == {"rank": 0}
    assert agreement.of_all(rank * 10) == [0, 10]
    assert agreement.any_rank(rank == 1) and not agreement.any_rank(False)
    worked: list[int] = []
    assert agreement.first_alone(lambda: worked.append(rank) or "made") == "made"
    assert worked == ([0] if rank == 0 else [])
    read: list[int] = []
    assert agreement.first_reads(iter(range(3)), lambda items: read.extend(items) or sum(read)) == 3
    assert read == ([0, 1, 2] if rank == 0 else [])
    agreement.require_same("a file of", "4 bytes")
    return {"messages": torch.tensor([_refused(rank), _stopped(rank), _interrupted()])}


def _refused(rank: int) -> bool:
    try:
        agreement.require_same("a checkpoint of step", rank + 4)
    except UserError as error:
        return "rank 1 has a checkpoint of step 5, rank 0 has 4" in str(error)
    return False


def _stopped(rank: int) -> bool:
    """The first rank keeps its own error, the other gets its words and exit status."""
    def fail() -> None:
        raise ConfigError("qad.steps", 0, "too few", "Give more.")

    try:
        agreement.first_alone(fail)
    except StoppedElsewhereError as error:
        return rank == 1 and error.exit_status == 2 and str(error) == "qad.steps=0: too few. Give more."
    except ConfigError:
        return rank == 0
    return False


def _interrupted() -> bool:
    def stop() -> None:
        raise KeyboardInterrupt

    try:
        agreement.first_alone(stop)
    except KeyboardInterrupt:
        return True
    return False


def test_two_ranks_agree() -> None:
    for found in run_ranks(agree, 2):
        assert found["messages"].all(), found


def test_alone_everything_is_its_argument() -> None:
    assert agreement.is_first() and agreement.from_first(3) == 3 and agreement.of_all(3) == [3]
    assert agreement.any_rank(True) and not agreement.any_rank(False)
    assert agreement.first_alone(lambda: 5) == 5 and agreement.first_reads(iter([1, 2]), sum) == 3
    agreement.require_same("anything", 1)
