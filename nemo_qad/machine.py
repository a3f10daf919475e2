"""What a machine has, as far as training on it depends on it, and which sets of it are known not to work.

`look` gathers facts; `findings` judges them and reads nothing, so that each judgement can be tested without the machine
it is about. Torch is imported when looked for, and may be missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

Version = tuple[int, ...]

PACKAGES = (
    "nemo-qad", "torch", "megatron-core", "nvidia-modelopt", "transformers", "triton", "transformer-engine",
    "mamba-ssm", "hydra-core",
)  # fmt: skip
TESTED = {"torch": (2, 14), "megatron-core": (0, 19), "nvidia-modelopt": (0, 47), "transformers": (5, 24)}
PYTHONS = ((3, 12), (3, 14))  # from, below: Megatron-Core's
BLACKWELL = (10, 0)
# First CUDA release whose ptxas knows a GPU (NVIDIA's release notes of CUDA 12.8, 12.9 and 13.0).
_PTXAS_OF: dict[Version, Version] = {
    (10, 0): (12, 8), (12, 0): (12, 8), (10, 3): (12, 9), (12, 1): (12, 9), (11, 0): (13, 0)
}  # fmt: skip
_NCCL_OF_BLACKWELL = (2, 25, 1)  # NCCL's release notes
# Hangs of mixture-of-experts models on B300 and GB10 were reported of these (NVIDIA/nccl issue 2167); not settled.
_NCCL_IN_DOUBT = ((2, 30, 4), (2, 30, 7))
_LEAST_FREE = 20 * 10**9  # bytes: a small run with its checkpoints


@dataclass(frozen=True)
class Gpu:
    """capability: 10.3 is (10, 3). memory: bytes."""

    name: str
    capability: Version
    memory: int


@dataclass(frozen=True)
class Machine:
    """Versions are None where a thing is missing. architectures: what torch has kernels for, as it spells them."""

    python: Version
    packages: dict[str, str | None]
    cpus: int
    memory: int
    free_disk: int
    cuda: Version | None = None
    driver: str | None = None
    nccl: Version | None = None
    ptxas: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    architectures: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())  # met while looking


@dataclass(frozen=True)
class Finding:
    """`bad`: this does not work; otherwise something to know. The text names what is there and what to do."""

    bad: bool
    text: str


def look(folder: Path) -> Machine:
    """Facts of this machine; `folder` is where runs will be written."""
    common = {
        "python": version(platform.python_version()),
        "packages": {name: _installed(name) for name in PACKAGES},
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_disk": shutil.disk_usage(folder).free,
    }
    if importlib.util.find_spec("torch") is None:
        return Machine(**common, problems=("torch is not installed",))  # type: ignore[arg-type]
    import torch

    gpus, problems = [], []
    try:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(found.name, (found.major, found.minor), found.total_memory))
    except RuntimeError as error:
        problems.append(f"torch cannot use the GPU: {error}")
    return Machine(
        **common,  # type: ignore[arg-type]
        cuda=version(torch.version.cuda) if torch.version.cuda else None,
        driver=_driver(),
        nccl=torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None,
        ptxas=_ptxas(max((gpu.capability for gpu in gpus), default=(0, 0))),
        gpus=tuple(gpus),
        architectures=tuple(torch.cuda.get_arch_list()) if gpus else (),
        problems=tuple(problems),
    )


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this machine's processes may still take: what Linux has, or less where a control group allows less."""
    known = re.search(r"^MemAvailable: +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    assert known is not None, "Linux since 3.14 says it"
    free = [int(known[1]) * 1024]
    try:
        group = (root / "proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/")
    except OSError:
        return free[0]
    place = root / "sys/fs/cgroup" / group
    for folder in (place, *place.parents):  # a limit of a job or of its node holds too
        try:
            limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
            cache = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if limit != "max":
            free.append(int(limit) - int(used) + (int(cache[1]) if cache else 0))
    return max(0, min(free))


def findings(machine: Machine) -> list[Finding]:
    """What does not work on the machine first, then what its user should know."""
    found = [Finding(True, problem) for problem in machine.problems]
    found += _software(machine)
    for gpu in sorted(set(machine.gpus), key=lambda gpu: gpu.capability):
        found += _gpu(machine, gpu)
    if machine.gpus and None in (machine.packages.get("transformer-engine"), machine.packages.get("mamba-ssm")):
        problem = "transformer-engine or mamba-ssm is missing: attention and Mamba run as plain torch operations"
        found.append(Finding(False, f"{problem}. pip install '.[te]'"))
    if not machine.gpus:
        problem = "no GPU: runs use the CPU, enough for the demo and for models of up to about 0.2 billion weights"
        found.append(Finding(False, problem))
    if machine.free_disk < _LEAST_FREE:
        problem = f"{machine.free_disk / 1e9:.1f} GB free where runs are written"
        found.append(Finding(False, f"{problem}. Give output_dir=FOLDER on a larger disk"))
    return sorted(found, key=lambda finding: not finding.bad)


def _software(machine: Machine) -> list[Finding]:
    found = []
    low, below = PYTHONS
    if not low <= machine.python[:2] < below:
        needed = f"Megatron-Core 0.19 needs {dotted(low)} or newer, below {dotted(below)}"
        found.append(Finding(True, f"Python {dotted(machine.python)}: {needed}"))
    for name, tested in TESTED.items():
        text = machine.packages.get(name)
        if text is None:
            found.append(Finding(True, f"{name} is not installed: pip install -c constraints.txt ."))
        elif version(text)[:2] != tested:
            found.append(Finding(False, f"{name} {text}: the tests ran with {dotted(tested)}"))
    return found


def _gpu(machine: Machine, gpu: Gpu) -> list[Finding]:
    what, found = f"{gpu.name} (compute capability {dotted(gpu.capability)})", []
    if not _has_kernels(machine.architectures, gpu.capability):
        problem = f"this torch has kernels for {', '.join(machine.architectures)} alone"
        found.append(Finding(True, f"{what}: {problem}. Install one that is built for it"))
    wanted = _PTXAS_OF.get(gpu.capability)
    if wanted and machine.ptxas and machine.ptxas[:2] < wanted:
        problem = f"Triton's ptxas is of CUDA {dotted(machine.ptxas)}, and only {dotted(wanted)} or newer knows it"
        remedy = "Set TRITON_PTXAS_PATH (TRITON_PTXAS_BLACKWELL_PATH in newer Triton) to that of such a toolkit"
        found.append(Finding(True, f"{what}: {problem}. {remedy}"))
    if gpu.capability < BLACKWELL:
        problem = "no NVFP4 arithmetic. PTQ and QAD work, as they compute in BF16; engines here unpack W4A16 weights"
        found.append(Finding(False, f"{what}: {problem}, and refuse or emulate W4A4"))
    elif machine.nccl and machine.nccl < _NCCL_OF_BLACKWELL:
        problem = f"NCCL {dotted(machine.nccl)} is older than it"
        found.append(Finding(True, f"{what}: {problem}. Install {dotted(_NCCL_OF_BLACKWELL)} or newer"))
    elif machine.nccl and _NCCL_IN_DOUBT[0] <= machine.nccl <= _NCCL_IN_DOUBT[1]:
        problem = f"hangs of NCCL {dotted(machine.nccl)} were reported with models of many experts"
        remedy = "If a run stands still at its start, try NCCL_NVLS_ENABLE=0"
        found.append(Finding(False, f"{what}: {problem}. {remedy}"))
    return found


def _has_kernels(architectures: tuple[str, ...], capability: Version) -> bool:
    """Kernels run on GPUs of their major version from their minor one up; PTX (compute_NN) on all newer ones."""
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if match:
            built = (int(match[2]), int(match[3]))
            if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
                return True
    return False


def version(text: str) -> Version:
    """The leading numbers: "2.14.1+cpu" is (2, 14, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dotted(numbers: Version) -> str:
    return ".".join(str(number) for number in numbers)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"[\d.]+")


def _ptxas(capability: Version) -> Version | None:
    """Of the assembler that Triton takes for such a GPU."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    bundled = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin"
    given = [os.environ.get("TRITON_PTXAS_PATH"), bundled / "ptxas"]
    if capability >= BLACKWELL:
        given = [os.environ.get("TRITON_PTXAS_BLACKWELL_PATH"), bundled / "ptxas-blackwell", *given]
    for path in given:
        if path and Path(path).is_file():
            text = _output([str(path), "--version"], r"release ([\d.]+)")
            return version(text) if text else None
    return None


def _output(command: list[str], pattern: str) -> str | None:
    """The first match in what a program prints; None where it is missing, fails or says something else."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(pattern, done.stdout)
    return match[match.re.groups] if match else None
