"""Tokenize JSONL files into indexed datasets: `python tools/preprocess_data.py --help`. Needs no torch, no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# numpy's linear algebra would start threads that nobody here uses, and forking with threads is frowned upon.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron.training.datasets.preprocess_cli import main  # noqa: E402 - the path must be set first

if __name__ == "__main__":
    sys.exit(main())
