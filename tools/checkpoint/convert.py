"""Convert HuggingFace checkpoints to ours and back: `python tools/checkpoint/convert.py --help`. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

# In place of this folder, whose inspect.py would hide the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from megatron.training.quiet import leave_out_known_warnings  # noqa: E402 - the path must be set first

leave_out_known_warnings()

from megatron.training.conversion.cli import main  # noqa: E402 - after the warnings of what it imports

if __name__ == "__main__":
    sys.exit(main())
