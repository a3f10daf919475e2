"""The machine's examination: sets of GPUs and software that are known not to work are refused by name."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_qad import doctor
from nemo_qad.machine import Gpu, Machine, findings, look, version

PACKAGES: dict[str, str | None] = {
    "torch": "2.14.1", "megatron-core": "0.19.2", "nvidia-modelopt": "0.47.0", "transformers": "5.24.0",
    "transformer-engine": "2.9", "mamba-ssm": "2.3",
}  # fmt: skip
B300, H100 = Gpu("NVIDIA B300", (10, 3), 288 << 30), Gpu("NVIDIA H100", (9, 0), 80 << 30)
SOUND = Machine(
    python=(3, 12, 1), packages=PACKAGES, cpus=64, memory=1 << 40, free_disk=10**13, cuda=(13, 0), driver="580.1",
    nccl=(2, 28, 9), ptxas=(12, 9), gpus=(B300,) * 8, architectures=("sm_90", "sm_100", "sm_120"),
)  # fmt: skip


def test_a_sound_b300_node_has_nothing_to_say() -> None:
    """10.3 runs the kernels of 10.0 and needs no entry of its own."""
    assert findings(SOUND) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ptxas": (12, 8)}, ["NVIDIA B300", "10.3", "CUDA 12.8", "12.9", "TRITON_PTXAS"]),
        ({"architectures": ("sm_80", "sm_90")}, ["kernels for sm_80, sm_90 alone"]),
        ({"architectures": ("sm_90", "sm_120")}, ["kernels for"]),  # kernels of 12.0 do not run on 10.3
        ({"architectures": ("sm_90", "compute_110")}, ["kernels for"]),
        ({"nccl": (2, 24, 3)}, ["NCCL 2.24.3", "2.25.1"]),
        ({"python": (3, 11, 7)}, ["Python 3.11.7", "3.12"]),
        ({"python": (3, 14)}, ["Python 3.14", "below 3.14"]),
        ({"packages": {**PACKAGES, "megatron-core": None}}, ["megatron-core is not installed", "pip install"]),
        ({"problems": ("torch cannot use the GPU: no driver",)}, ["no driver"]),
    ],
)
def test_what_is_known_not_to_work_is_named(
    changes: dict[str, object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(SOUND, **changes)  # type: ignore[arg-type]
    (finding,) = findings(machine)
    assert finding.bad and all(word in finding.text for word in words), finding.text
    assert doctor.show(machine) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 thing to put right before a run."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": (), "nccl": None, "ptxas": None}, ["no GPU", "demo"]),
        ({"gpus": (H100,)}, ["NVIDIA H100", "no NVFP4 arithmetic", "W4A16"]),
        ({"nccl": (2, 30, 7)}, ["2.30.7", "NCCL_NVLS_ENABLE=0"]),
        ({"packages": {**PACKAGES, "mamba-ssm": None}}, ["mamba-ssm is missing", "plain torch"]),
        ({"packages": {**PACKAGES, "torch": "2.15.0+cu130"}}, ["torch 2.15.0+cu130", "2.14"]),
        ({"free_disk": 10**9}, ["1.0 GB free", "output_dir"]),
    ],
)
def test_what_is_worth_knowing_stops_nothing(
    changes: dict[str, object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(SOUND, **changes)  # type: ignore[arg-type]
    (finding,) = findings(machine)
    assert not finding.bad and all(word in finding.text for word in words), finding.text
    assert doctor.show(machine) == 0 and "Nothing known to be wrong" in capsys.readouterr().out


def test_ptx_runs_on_all_newer_gpus() -> None:
    assert findings(replace(SOUND, architectures=("sm_90", "compute_90"))) == []


def test_this_machine_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = look(tmp_path)
    assert found.python == sys.version_info[:3] and found.packages["torch"] == torch.__version__.partition("+")[0]
    assert len(found.gpus) == torch.cuda.device_count() and found.cpus >= 1 and found.free_disk > 0
    assert doctor.main(["--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if line.startswith(("+", "|"))) <= 80
    with pytest.raises(SystemExit):
        doctor.main(["--folder", str(tmp_path / "none")])
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["Cuda compilation tools, release 12.8, V12.8.93", "nonsense", None])
def test_the_assembler_that_triton_will_take_is_asked(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if look(tmp_path).ptxas is None:
        pytest.skip("Triton is not installed here")
    program = tmp_path / "ptxas"
    program.write_text(f"#!/bin/sh\necho '{text}'\n" if text else "#!/bin/sh\nexit 1\n")
    os.chmod(program, 0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(program))
    assert look(tmp_path).ptxas == ((12, 8) if text and "release" in text else None)


def test_versions_are_their_leading_numbers() -> None:
    assert version("2.14.1+cu130") == (2, 14, 1) and version("0.19.0rc3") == (0, 19, 0) and version("dev") == ()
