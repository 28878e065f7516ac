"""Refuse to start beside another `megatron.training`. Standard library only.

`megatron` is a namespace package that we share with megatron-core. From version 0.17 on its wheel ships a
`megatron/training` of its own: whichever folder comes first on `sys.path` would win, silently.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

OUR_FOLDER = Path(__file__).resolve().parent
_OLDEST = (0, 16, 1)
_TOO_NEW = (0, 17)


def check_namespace(megatron_path: Iterable[str], core_version: str | None = None) -> None:
    """Check that this `megatron.training` is the only one and that megatron-core is a version we know.

    megatron_path: `megatron.__path__`, every folder that adds to the namespace.
    core_version: version of megatron-core; None asks the installed package.
    Raises ValueError, one sentence naming both places, for a second `megatron.training`.
    """
    for folder in megatron_path:
        other = Path(folder).resolve() / "training"
        if other != OUR_FOLDER and (other / "__init__.py").exists():
            raise ValueError(
                f"two packages are named megatron.training, ours in {OUR_FOLDER} and another in {other}: "
                "install megatron-core>=0.16.1,<0.17 in its place"
            )
    version = _installed_version() if core_version is None else core_version
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not _OLDEST <= numbers < _TOO_NEW:
        raise ValueError(
            f"megatron-core {version} is installed, this version works with >=0.16.1,<0.17: "
            "pip install 'megatron-core>=0.16.1,<0.17'"
        )


def _installed_version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("megatron-core is not installed: pip install 'megatron-core>=0.16.1,<0.17'") from None
