"""Write a Llama with random weights: `python tools/checkpoint/random_model.py --help`. To try conversion out."""

from __future__ import annotations

import sys
from pathlib import Path

# In place of this folder, whose inspect.py would hide the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from megatron.training.conversion.random_model import main  # noqa: E402 - the path must be set first

if __name__ == "__main__":
    sys.exit(main())
