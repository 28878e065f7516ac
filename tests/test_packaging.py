"""The wheel works without the repository: compiled extension, training layer, and megatron.core beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("csrc", "deep_offload", "megatron", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the wheel is made of, without anything that an earlier build left in the tree."""
    folder = tmp_path_factory.mktemp("source") / "repo"
    folder.mkdir()
    left_over = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=left_over)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """Build the wheel with this environment's build tools and nothing downloaded."""
    output = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(output), str(source)], capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-4000:]
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel into a folder of its own and return that folder."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    result = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-4000:]
    return target


def run_outside(code: str, target: Path) -> list[str]:
    """Run code away from the repository with the installed folder first on sys.path; return the printed lines."""
    # -I: neither the current folder nor PYTHONPATH is searched.
    code = f"import sys\nsys.path.insert(0, {str(target)!r})\n" + code
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=target.parent, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()


def test_wheel_holds_what_is_ours(wheel, source):
    """The wheel holds both trees and the extension, and no file of megatron-core's or of the tests."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {tuple(name.split("/")[:2]) for name in names if name.startswith("megatron/")}
    assert tops == {("megatron", "training")}
    assert "megatron/__init__.py" not in names
    assert any(name.startswith("deep_offload/_C.") and name.endswith(".so") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"deep_offload", "megatron"}
    for tree in ("deep_offload", "megatron/training"):
        modules = {str(path.relative_to(source)) for path in (source / tree).rglob("*.py")}
        assert modules - set(names) == set()


def test_wheel_names_its_requirements(wheel):
    """The wheel declares its license and pins megatron-core below the releases with their own megatron.training."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist")
    assert any(r.startswith("megatron-core") and "<0.17" in r and ">=0.16.1" in r for r in requirements)
    assert any(r.startswith("psutil") for r in requirements)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.10"


def test_extension_comes_from_the_wheel(installed):
    """The installed package imports its own compiled module."""
    (place,) = run_outside("import deep_offload._C as c\nprint(c.__file__)\n", installed)
    assert Path(place).parent == installed / "deep_offload"


def test_installed_update_runs(installed):
    """The installed extension runs one Adam update through its checked entry."""
    code = (
        "import torch\n"
        "from deep_offload.kernels import cpu\n"
        "print(cpu.__file__)\n"
        "print(cpu.selected_isa() in cpu.supported_isas())\n"
    )
    place, selected = run_outside(code, installed)
    assert Path(place).is_relative_to(installed)
    assert selected == "True"


def test_both_namespaces_resolve(installed):
    """From outside the repository megatron.training is the installed one and megatron.core still imports."""
    code = (
        "import megatron.core, megatron.training.namespace as ours\n"
        "print(ours.__file__)\nprint(megatron.core.__version__)\n"
    )
    place, version = run_outside(code, installed)
    assert Path(place).is_relative_to(installed / "megatron" / "training")
    assert version.startswith("0.16.")
