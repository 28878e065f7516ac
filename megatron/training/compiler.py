"""Whether functions can be compiled for the GPU on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil


def can_compile() -> bool:
    """Whether torch.compile with Triton can work here: it needs the package triton and a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    return importlib.util.find_spec("triton") is not None and compiler is not None
