"""Convert HuggingFace checkpoints to ours and back: `python tools/checkpoint/convert.py --help`. Needs no GPU."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

# In place of this folder, whose inspect.py would hide the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[2])

warnings.filterwarnings("ignore")  # megatron-core's, on packages that conversion does not need

from megatron.training.conversion.cli import main  # noqa: E402 - the path must be set first

if __name__ == "__main__":
    sys.exit(main())
