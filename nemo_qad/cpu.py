"""The one seam that lets Megatron-Core run where CUDA is absent.

Megatron-Core asks for the current CUDA device, makes CUDA streams and creates scalars with `device="cuda"`
in code that is otherwise device-neutral. `install` answers those questions with the CPU. Every replacement
says why it is needed; `RELIED_ON` names what it touches, so that a test notices when a new release of
Megatron-Core moves it. Nothing here runs when a GPU is present.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

# Modules that write `device="cuda"` (or pass it on, `mapping`) on paths that a CPU run takes.
_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
# Modules that compare `Tensor.type()` with the string "torch.cuda.FloatTensor".
_MODULES_WITH_CUDA_TYPE_NAMES = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
)
_FACTORIES = ("empty", "empty_like", "full", "full_like", "ones", "ones_like", "tensor", "zeros", "zeros_like")
_CUDA_RUNTIME = ("Event", "Stream", "current_device", "current_stream", "set_device", "stream", "synchronize")

# (module, attribute path, text that its source must still hold or None)
RELIED_ON: tuple[tuple[str, str, str | None], ...] = (
    *(
        (name, "torch", "device=device" if name.endswith(".mapping") else "cuda")
        for name in _MODULES_WITH_CUDA_LITERALS
    ),
    *((name, "torch", "torch.cuda.FloatTensor") for name in _MODULES_WITH_CUDA_TYPE_NAMES),
    *(("torch.cuda", name, None) for name in _CUDA_RUNTIME),
    ("megatron.core.tensor_parallel.random", "CudaRNGStatesTracker.add", "torch.cuda.manual_seed"),
    ("megatron.core.tensor_parallel.random", "CudaRNGStatesTracker.fork", "_get_cuda_rng_state"),
    ("megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER_INITIALIZED", None),
    ("megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER", None),
    ("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", None),
    ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", None),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "tensors[key]",
    ),
    ("megatron.core.ssm.mamba_mixer", "MambaMixer.__init__", "if not HAVE_MAMBA_SSM"),
    ("megatron.core.ssm.mamba_mixer", "ExtendedRMSNorm", None),
    ("megatron.core.ssm.mamba_mixer", "MambaMixer._ssm_training", "mamba_split_conv1d_scan_combined"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream", None),
)

_installed = False


def install() -> None:
    """Make Megatron-Core usable on the CPU. Idempotent; does nothing when CUDA is available.

    Imports Megatron-Core, so that the compile switches below are set before its decorators read them.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _disable_compilation()
    _replace_cuda_runtime()
    for name in _MODULES_WITH_CUDA_LITERALS:
        vars(importlib.import_module(name))["torch"] = _CpuFactories()
    _replace_tensor_methods()
    _replace_rng_tracker()
    _repair_optimizer_load()
    _installed = True


def _disable_compilation() -> None:
    """Megatron decorates small functions with torch.compile: minutes of C++ compilation for no gain here.

    Both switches are read when a function is decorated; the second is for a dynamo imported earlier.
    """
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True


class _Event:
    """A CUDA event on a device whose work is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        return

    def record(self, stream: object = None) -> None:
        return

    def wait(self, stream: object = None) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on a device that runs everything in program order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        return

    def wait_stream(self, stream: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


_DEFAULT_STREAM = _Stream()


def _replace_cuda_runtime() -> None:
    """Megatron passes torch.cuda.current_device() as a device and overlaps copies on side streams."""
    replacements: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "current_device": lambda: "cpu",
        "current_stream": lambda device=None: _DEFAULT_STREAM,
        "set_device": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }
    for name in _CUDA_RUNTIME:
        setattr(torch.cuda, name, replacements[name])


class _CpuFactories(ModuleType):
    """Stands for `torch` inside the modules that write device="cuda": their factories make CPU tensors.

    Replacing the name in those modules alone keeps every other torch call at full speed, which a global
    TorchFunctionMode would not.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _replace_tensor_methods() -> None:
    """`.cuda()` is called on scalars; `.type()` is compared with CUDA type names to sort parameters."""
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__")
        if isinstance(result, str) and caller in _MODULES_WITH_CUDA_TYPE_NAMES:
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _replace_rng_tracker() -> None:
    """The tracker keeps CUDA generator states; here the default CPU generator takes that part.

    Activation recomputation saves the CPU and the CUDA state: with one generator the second is the same,
    so restoring it must not undo what the first restored.
    """
    from megatron.core.tensor_parallel import random as parallel_random

    class CpuRngStatesTracker(parallel_random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name} with seed {seed} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = parallel_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    parallel_random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda *args, **kwargs: None


def _repair_optimizer_load() -> None:
    """torch's AdamW, used where apex and Transformer Engine are absent, keeps a tensor `step` in its state.

    The distributed optimizer looks for it among the loaded tensors, where it is not, and copies into
    leaf parameters outside no_grad.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def load(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            original(self, model_param, {"step": None, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = load


@contextlib.contextmanager
def without_mamba_ssm(norm: type[torch.nn.Module]) -> Iterator[None]:
    """Let MambaMixer's constructor run without the mamba-ssm package, with `norm` as its gated norm.

    mamba-ssm needs CUDA to import. The constructor uses two of its names only: a flag, and the class of
    the gated norm, which is a mock when the package is absent.
    """
    from megatron.core.ssm import mamba_mixer

    saved = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, norm
    try:
        yield
    finally:
        mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = saved
