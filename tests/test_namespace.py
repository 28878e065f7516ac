"""megatron.training is ours, megatron.core is megatron-core's, and a second megatron.training is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECK = (
    "import megatron, sys\n"
    "from megatron.training.namespace import check_namespace\n"
    "try:\n"
    "    check_namespace(megatron.__path__)\n"
    "except ValueError as error:\n"
    "    sys.exit(str(error))\n"
)


def run_python(code: str, *paths: Path, cwd: Path) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter with `paths` first on sys.path."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def foreign(tmp_path):
    """A folder that holds another megatron.training, as newer megatron-core wheels do."""
    package = tmp_path / "foreign" / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return tmp_path / "foreign"


def test_both_halves_resolve(tmp_path):
    """From any folder megatron.training comes from this repository and megatron.core from megatron-core."""
    code = (
        "import importlib.util as u\n"
        "print(u.find_spec('megatron.training').submodule_search_locations[0])\n"
        "print(u.find_spec('megatron.core').origin)\n"
    )
    result = run_python(code, ROOT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    training, core = result.stdout.splitlines()
    assert Path(training) == ROOT / "megatron" / "training"
    assert Path(core).parts[-3:] == ("megatron", "core", "__init__.py")
    assert not Path(core).is_relative_to(ROOT / "megatron")


def test_imported_here_is_ours():
    """The test run itself imports the training layer of this repository."""
    from megatron.training import namespace

    assert Path(namespace.__file__) == ROOT / "megatron" / "training" / "namespace.py"


def test_alone_is_accepted(tmp_path):
    """Without a second megatron.training the start-up check passes."""
    result = run_python(CHECK, ROOT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_second_package_is_refused(foreign, tmp_path):
    """A second megatron.training later on sys.path is refused with both places named."""
    result = run_python(CHECK, ROOT, foreign, cwd=tmp_path)
    assert result.returncode == 1
    assert str(ROOT / "megatron" / "training") in result.stderr
    assert str(foreign / "megatron" / "training") in result.stderr


@pytest.mark.parametrize("script_folder_first", [True, False])
def test_foreign_is_refused_at_start(foreign, tmp_path, script_folder_first):
    """A foreign megatron.training before or behind ours on sys.path stops pretrain_gpt.py with both places named."""
    # -P leaves the script's folder off sys.path: then the foreign package comes first, as with an editable install.
    if not script_folder_first and sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    paths = [foreign] if script_folder_first else [foreign, ROOT]
    command = [sys.executable, *([] if script_folder_first else ["-P"]), str(ROOT / "pretrain_gpt.py")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert str(ROOT / "megatron" / "training") in result.stderr
    assert str(foreign / "megatron" / "training") in result.stderr
    assert "Traceback" not in result.stderr
