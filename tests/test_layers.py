"""Imports point downward: the contracts of import-linter, the training layer's rule, and torch-free pure layers."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = ("deep_offload.config", "deep_offload.plan", "deep_offload.model")
HEAVY = ("torch", "numpy", "triton", "megatron")

# What each tree may import of the others; everything else is refused.
TRAINING_MAY_IMPORT = ("deep_offload.optimizer", "deep_offload.config", "deep_offload.plan", "deep_offload.model")


def imported_names(path: Path) -> set[str]:
    """Return the absolute names that a source file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative imports hide the layer, write it in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def engine_faults(folder: Path) -> list[str]:
    """Return the imports of the training layer by the engine; its command line tool alone may start it."""
    return [
        f"{path.name} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        if path.parent != folder or not path.name.startswith("cli")
        for name in sorted(imported_names(path))
        if is_within(name, ("megatron.training",))
    ]


def training_faults(folder: Path) -> list[str]:
    """Return the imports by the training layer of engine parts that it must not know."""
    return [
        f"{path.name} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in sorted(imported_names(path))
        if is_within(name, ("deep_offload",)) and not is_within(name, TRAINING_MAY_IMPORT)
    ]


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    pytest.importorskip("importlinter")
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command as run; run(sys.argv[1:])",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copied_engine(tmp_path):
    """A copy of the engine's sources under the same contracts, to break on purpose."""
    shutil.copytree(
        ROOT / "deep_offload", tmp_path / "deep_offload", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold():
    """The import contracts of pyproject.toml hold for the whole engine."""
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    "module, line, broken",
    [
        ("plan/layout.py", "import deep_offload.runtime", "layers point downward"),
        ("model/__init__.py", "import torch", "plan, model and config are pure"),
        ("runtime/__init__.py", "import megatron.core", "only the optimizer seam knows Megatron"),
    ],
)
def test_contracts_catch_a_violation(copied_engine, module, line, broken):
    """Each contract fails when one import against it is added."""
    path = copied_engine / "deep_offload" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    result = lint_imports(copied_engine)
    assert result.returncode != 0
    assert f"{broken} BROKEN" in result.stdout


@pytest.mark.parametrize("package", PURE)
def test_pure_layer_loads_nothing_heavy(package):
    """Importing every module of a pure layer loads neither torch nor numpy, triton or megatron."""
    code = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({package!r})\n"
        "for found in pkgutil.walk_packages(getattr(package, '__path__', []), package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        f"print(sorted(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_engine_does_not_know_the_training_layer():
    """No module of deep_offload but the command line tool imports megatron.training."""
    assert engine_faults(ROOT / "deep_offload") == []


def test_training_layer_knows_only_the_door_of_the_engine():
    """megatron.training imports the optimizer, the config, and plan and model for printing, nothing below."""
    assert training_faults(ROOT / "megatron" / "training") == []


def test_source_rules_catch_a_violation(tmp_path):
    """The two rules that import-linter cannot express see an import inside a function too."""
    (tmp_path / "bad.py").write_text(
        "def f():\n    from megatron.training import model\n    import deep_offload.runtime.arena\n"
    )
    assert engine_faults(tmp_path) == ["bad.py imports megatron.training.model"]
    assert training_faults(tmp_path) == ["bad.py imports deep_offload.runtime.arena"]


def test_engine_package_is_empty():
    """deep_offload/__init__.py holds a docstring only: code there would run on every import of a pure layer."""
    tree = ast.parse((ROOT / "deep_offload" / "__init__.py").read_text())
    assert [node for node in tree.body if not isinstance(node, ast.Expr)] == []
