"""A process beside each rank that writes for it, so that training goes on.

It is forked once, before the model is in memory. What it is to write it gets as a job: tensors are copied into memory
that both processes see and that stays from one save to the next, everything else goes through a pipe. So training waits
for one copy. Forking at each save would need no copy at first, but every page that training then changes would be
copied on its way, at six times the cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from nemo_qad.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # prctl(2)
_ALIGNED = 64  # bytes
Work = Callable[..., Any]  # a function of a module; what it returns can be pickled


class Writer:
    """One process of this rank, which does one job at a time."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("checkpoint")
        self._shared: mmap.mmap | None = None
        self._clearing: threading.Thread | None = None
        self.is_alive = True  # as far as is known
        self._pipe, end = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads stay behind: the child needs none
            parent, self.process = os.getpid(), os.fork()
        if self.process == 0:
            _serve(self._memory, end, parent)
        end.close()

    @property
    def num_bytes(self) -> int:
        """Of the memory that both processes see."""
        return 0 if self._shared is None else len(self._shared)

    def reserve(self, num_bytes: int) -> None:
        """Makes the shared memory so large, in the background: the kernel clears its pages, which takes as long as
        writing them several times."""
        shared = self._room(num_bytes)
        self._clearing = threading.Thread(target=_region(shared, 0, torch.uint8, (num_bytes,)).zero_, daemon=True)
        self._clearing.start()

    def start(self, work: Work, *arguments: Any) -> None:
        """Begins `work(*arguments)` there. When it returns, tensors of `arguments` may change."""
        job = io.BytesIO()
        pickler = _Pickler(job)
        pickler.dump((work, arguments))
        shared = self._room(pickler.num_bytes)
        for offset, tensor in pickler.tensors:
            _region(shared, offset, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `result` says it
            self._pipe.send_bytes(job.getbuffer())

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._pipe.poll()

    def result(self) -> Any:
        """Waits. What the work returned, or a text with its error."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.is_alive = False
            return "the process that writes was ended"

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self.process:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
            self._pipe.close()
            os.close(self._memory)
            self.process, self._shared = 0, None

    def _room(self, num_bytes: int) -> mmap.mmap:
        if self._clearing is not None:
            self._clearing.join()
            self._clearing = None
        if self._shared is None or len(self._shared) < num_bytes:
            self._shared = None
            os.ftruncate(self._memory, max(num_bytes, mmap.PAGESIZE))
            self._shared = mmap.mmap(self._memory, os.fstat(self._memory).st_size)
        return self._shared


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and lists them with the place where they will stand."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[int, Tensor]] = []
        self.num_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        place = (self.num_bytes, value.dtype, tuple(value.shape))
        self.tensors.append((self.num_bytes, value.detach()))
        self.num_bytes += -(-value.nbytes // _ALIGNED) * _ALIGNED
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: mmap.mmap | None) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: Any) -> Tensor:
        return _region(self._shared, *place)


def _region(shared: mmap.mmap | None, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor there with a storage of its own: torch writes a tensor's whole storage."""
    count = torch.Size(shape).numel()
    if shared is None or count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(shared, dtype=dtype, count=count, offset=offset).view(shape)


def _serve(memory: int, pipe: Connection, parent: int) -> None:
    """Does jobs and never returns. It outlives no parent, keeps no lock of it, and leaves stop signals to it."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # ended before it was asked for
            os._exit(0)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        kept = sorted((memory, pipe.fileno()))
        os.closerange(3, kept[0])
        os.closerange(kept[0] + 1, kept[1])
        os.closerange(kept[1] + 1, 2**16)
        torch.set_num_threads(1)  # the threads of the parent's pool are not here
        while True:
            job = io.BytesIO(pipe.recv_bytes())
            pipe.send(_attempt(job, memory))
    except EOFError:
        pass
    finally:
        os._exit(0)


def _attempt(job: io.BytesIO, memory: int) -> Any:
    """Any exception becomes words: torch's reach its caller as RuntimeError with the disk's words inside."""
    try:
        num_bytes = os.fstat(memory).st_size
        shared = mmap.mmap(memory, num_bytes) if num_bytes else None
        work, arguments = _Unpickler(job, shared).load()
        return work(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
