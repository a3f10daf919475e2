"""Imports go one way: entries -> stages -> packages -> pure numerics; a login node needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import nemo_qad

PACKAGE = Path(nemo_qad.__file__).parent
PACKAGES = (
    "checkpoint",
    "data",
    "distillation",
    "evaluation",
    "huggingface",
    "models",
    "quantization",
    "training",
)
ABOVE_PACKAGES = ("stages", "config", "command_line", "train", "sweep", "export")
ENTRIES = ("train", "command_line", "sweep", "export", "doctor")
NUMERICS = (
    "quantization.nvfp4",
    "quantization.nvfp4_fast",
    "quantization.nvfp4_oracle",
    "quantization.nvfp4_search",
    "quantization.fp8",
    "distillation.kl",
    "distillation.tokens",
    "distillation.fused",
    "distillation.linear_kl",
    "distillation.sparse_kl",
    "distillation.sparse_logits",
)
HEAVY = ("torch", "megatron", "modelopt", "transformers")
WITHOUT_TORCH = (
    "files",
    "resume",
    "run_state",
    "next_start",
    "stage_order",
    "huggingface.weight_files",
    "checkpoint.manifest",
    "checkpoint.steps",
    "recipe_validation",
    "command_line",
    "config",
    "errors",
    "described",
    "evaluation.recovery",
    "evaluation.report",
    "doctor",
    "export",
    "fields",
    "huggingface.architectures",
    "huggingface.engines",
    "huggingface.inspect",
    "huggingface.stored",
    "huggingface.verify",
    "choices",
    "launcher",
    "signals",
    "machine",
    "ranks",
    "schema",
    "sharding",
    "sweep",
    "train",
    "validation",
)
FORBIDDEN_NAMES = ("utils", "common", "helpers", "misc")


@cache
def modules() -> dict[str, Path]:
    """Module names below nemo_qad, "" for the package itself."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    assert len(found) > 20
    return found


@cache
def imports(module: str, *, lazy: bool = True) -> frozenset[str]:
    """Absolute names that `module` imports, those inside functions too unless `lazy` is False."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{name.name}" for name in node.names}
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return frozenset(found)


def roots(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imports(module)}


def own(module: str, *, lazy: bool = True) -> set[str]:
    """Modules of this package that `module` imports, with the packages they are in."""
    names = {name.removeprefix("nemo_qad.") for name in imports(module, lazy=lazy)}
    return {name for name in names if name in modules()}


def reached(module: str) -> set[str]:
    """What importing `module` imports of this package."""
    seen: set[str] = set()
    pending = {module}
    while pending:
        name = pending.pop()
        seen.add(name)
        parents = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
        pending |= (own(name, lazy=False) | parents) - seen
    return seen


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("numerics", NUMERICS)
def test_numerics_import_torch_and_each_other_alone(numerics: str) -> None:
    others = roots(numerics) - set(sys.stdlib_module_names) - {"torch", "nemo_qad"}
    assert others == set()
    assert own(numerics) <= set(NUMERICS)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_nothing_above_them(package: str) -> None:
    below = [module for module in modules() if within(module, package)]
    assert below
    wrong = [(m, up) for m in below for name in own(m) for up in ABOVE_PACKAGES if within(name, up)]
    assert wrong == []


def test_nothing_below_imports_an_entry() -> None:
    wrong = [
        (module, entry)
        for module in modules()
        if module not in ENTRIES
        for name in own(module)
        for entry in ENTRIES
        if name == entry
    ]
    assert wrong == []


def test_each_host_is_reached_from_its_own_place() -> None:
    def users(host: str) -> set[str]:
        return {module for module in modules() if host in roots(module)}

    assert users("omegaconf") <= {"config", "sweep"}
    assert users("hydra") <= {"config", "command_line", "train", "sweep"}
    assert users("modelopt") == {"quantization.modelopt", "distillation.modelopt"}
    assert not [m for m in users("megatron") if m.startswith(("evaluation", "huggingface"))]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_login_node_modules_do_not_reach_torch(module: str) -> None:
    heavy = {(name, host) for name in reached(module) for host in HEAVY for i in imports(name, lazy=False)
             if within(i, host)}  # fmt: skip
    assert heavy == set()


def test_login_node_modules_import_without_torch() -> None:
    """The same of the imports that really happen, third-party packages included."""
    names = ", ".join(f"nemo_qad.{module}" for module in WITHOUT_TORCH)
    program = f"import sys, {names}; print([host for host in {HEAVY!r} if host in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_modules_are_named_for_what_they_hold() -> None:
    assert [m for m in modules() if m.rpartition(".")[2] in FORBIDDEN_NAMES] == []
