"""Deterministic mode reads this variable when CUDA starts, which another test may have done before."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
