"""What all ranks of a run know and decide together. Alone, each of these is its argument.

Calls are collective: every rank makes them in the same order. The first rank is rank 0 of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from nemo_qad.errors import EXIT_INTERRUPTED, Stopped, StoppedElsewhereError, UserError


def is_first() -> bool:
    """Whether this is the rank that writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def number() -> int:
    """This rank among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def from_first[Value](value: Value) -> Value:
    """The first rank's value, which is picklable, on every rank."""
    if _alone():
        return value
    box = [value if is_first() else None]
    dist.broadcast_object_list(box, src=0)
    found: Value = box[0]  # type: ignore[assignment]
    return found


def of_all[Value](value: Value) -> list[Value]:
    """Every rank's value, in the order of the ranks."""
    if _alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def to_first[Value](value: Value) -> list[Value]:
    """Every rank's value on the first rank, in the order of the ranks; nothing on the others."""
    if _alone():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if is_first() else None
    dist.gather_object(value, values, dst=0)
    return values or []


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on a rank."""
    if _alone():
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def first_alone[Value](work: Callable[[], Value]) -> Value:
    """What `work` returns, done on the first rank while the others wait.

    Raises:
        what `work` raised: on the first rank. StoppedElsewhereError, KeyboardInterrupt: on the others.
    """
    if _alone():
        return work()
    if not is_first():
        error: BaseException | None
        value, error = from_first((None, None))
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
    try:
        value = work()
    except BaseException as error:
        from_first((None, _to_others(error)))
        raise
    return from_first((value, None))[0]


def _to_others(error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return Stopped(str(error), getattr(error, "exit_status", EXIT_INTERRUPTED))
    stopped = StoppedElsewhereError(str(error))
    if isinstance(error, UserError):
        stopped.exit_status = error.exit_status
    return stopped


def first_reads[Item, Value](items: Iterator[Item], use: Callable[[Iterator[Item]], Value]) -> Value:
    """What `use(items)` returns on the first rank; `items` is a collective iterator, which the others run through."""
    if _alone():
        return use(items)
    if is_first():
        return from_first(use(items))
    for _ in items:
        pass
    return from_first(None)  # type: ignore[return-value]


def require_same(what: str, value: Any) -> None:
    """Raises UserError on every rank where a rank has another value than the first."""
    values = of_all(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UserError(
                f"rank {rank} has {what} {other}, rank 0 has {values[0]}. Every rank must see the same files: "
                "put run_dir, cache_dir and output_dir on a disk that all machines share"
            )


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1
