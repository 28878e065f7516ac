"""What `make setup` decides before it installs anything, and that it does nothing when nothing changed."""

from __future__ import annotations

import json
import re
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tools import setup_venv

ROOT = Path(__file__).resolve().parents[2]
Version = namedtuple("Version", "major minor micro releaselevel serial")


@pytest.mark.parametrize("minor, supported", [(9, False), (10, True), (13, True), (14, False)])
def test_python_versions(monkeypatch, minor, supported):
    """3.10 to 3.13 pass; others are refused with the range and the way out."""
    monkeypatch.setattr(sys, "version_info", Version(3, minor, 0, "final", 0))
    if supported:
        setup_venv.check_python()
        return
    with pytest.raises(setup_venv.SetupError, match=r"from 3\.10 to 3\.13 with PYTHON="):
        setup_venv.check_python()


@pytest.mark.parametrize(
    "version, kept", [("2.5.1+cu121", False), ("2.6.0", True), ("2.11.0+cu130", True), ("2.9.0a0+nv", True)]
)
def test_old_torch_is_refused(version, kept):
    """A torch below the oldest supported one is not kept silently."""
    if kept:
        setup_venv.check_torch(version)
        return
    with pytest.raises(setup_venv.SetupError, match=r"2\.5\.1\+cu121, older than 2\.6"):
        setup_venv.check_torch(version)


def test_versions_agree_with_the_metadata():
    """The script, which cannot read pyproject.toml on Python 3.10, repeats its limits faithfully."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    low, high = setup_venv.SUPPORTED
    assert f'requires-python = ">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"' in text
    assert f'"torch>={setup_venv.OLDEST_TORCH[0]}.{setup_venv.OLDEST_TORCH[1]}"' in text
    build = re.search(r"^requires = (\[.*\])$", text, re.MULTILINE)
    lines = (ROOT / "requirements" / "build.txt").read_text(encoding="utf-8").splitlines()
    assert json.loads(build[1]) == [line for line in lines if not line.startswith("#")]


def test_missing_folder_of_wheels_is_named(tmp_path):
    """WHEELS= that names no folder is refused before anything is made."""
    with pytest.raises(setup_venv.SetupError, match="nowhere, which is not a folder"):
        setup_venv.prepare(tmp_path / "venv", tmp_path / "nowhere")
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """An environment that counts as ready, in a small project of its own; the returned list collects commands."""
    commands = []
    monkeypatch.setattr(setup_venv, "ROOT", tmp_path)
    monkeypatch.setattr(setup_venv, "run", commands.append)
    monkeypatch.setattr(setup_venv, "install_dependencies", lambda *a: commands.append("dependencies"))
    monkeypatch.setattr(setup_venv, "pip_command", lambda *a: ["pip"])
    monkeypatch.setattr(setup_venv, "same_minor_version", lambda folder: True)
    for name in (
        "setup.py",
        "pyproject.toml",
        "csrc/adam.cpp",
        "requirements/torch.txt",
        "deep_offload/_C.so",
        "venv/bin/python",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    setup_venv.prepare(tmp_path / "venv", None)
    assert commands == ["dependencies"]
    commands.clear()
    return tmp_path, commands


def test_second_run_does_nothing(ready):
    """Unchanged inputs need no command."""
    root, commands = ready
    setup_venv.prepare(root / "venv", None)
    assert commands == []


@pytest.mark.parametrize("change", ["csrc/adam.cpp", "setup.py"])
def test_changed_source_builds_only_the_extension(ready, change):
    """A change of the C++ sources rebuilds without looking at dependencies."""
    root, commands = ready
    (root / change).write_text("second")
    setup_venv.prepare(root / "venv", None)
    assert len(commands) == 1
    assert "--no-deps" in commands[0]
    setup_venv.prepare(root / "venv", None)
    assert len(commands) == 1


def test_lost_extension_is_built_again(ready):
    """A removed compiled module is noticed although no source changed."""
    root, commands = ready
    (root / "deep_offload/_C.so").unlink()
    setup_venv.prepare(root / "venv", None)
    assert len(commands) == 1


@pytest.mark.parametrize("change", ["pyproject.toml", "requirements/torch.txt"])
def test_changed_requirements_install_again(ready, change):
    """A change of the requirements installs them."""
    root, commands = ready
    (root / change).write_text("second")
    setup_venv.prepare(root / "venv", None)
    assert commands == ["dependencies"]


def test_other_python_is_refused(ready, monkeypatch):
    """An environment of another Python version is not reused."""
    root, _ = ready
    monkeypatch.setattr(setup_venv, "same_minor_version", lambda folder: False)
    with pytest.raises(setup_venv.SetupError, match="make clean"):
        setup_venv.prepare(root / "venv", None)


def test_optional_packages_are_listed_once():
    """The probe for missing optional packages runs and names each package once."""
    found = (setup_venv.probe(sys.executable, setup_venv.PROBE_MISSING) or "").split()
    assert len(found) == len(set(found))


def test_kept_torch_is_pinned_as_its_metadata_says(tmp_path, monkeypatch):
    """A build whose __version__ has a local part that its metadata lacks is still the one that is kept."""
    answers = {setup_venv.PROBE_TORCH: "2.11.0+cu130", setup_venv.PROBE_TORCH_METADATA: "2.11.0"}
    monkeypatch.setattr(setup_venv, "probe", lambda _python, code: answers.get(code))
    monkeypatch.setattr(setup_venv, "run", lambda _command: None)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    setup_venv.install_dependencies(python, ["pip"], None)
    assert (tmp_path / "deep_offload_constraints.txt").read_text() == "torch==2.11.0\n"
