"""Check indexed datasets before training does: `python tools/data.py check --help`. Needs no torch, no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.datasets.check_cli import main  # noqa: E402 - the path must be set first

if __name__ == "__main__":
    sys.exit(main())
