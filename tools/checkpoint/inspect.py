"""Look at checkpoints without a GPU: `verify DIR`, `inspect DIR`, `diff DIR DIR`."""

import os
import sys

# This folder must not be searched: this file's name is that of a module of the standard library.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.training.quiet import leave_out_known_warnings  # noqa: E402 - the path must be set first

leave_out_known_warnings()

from megatron.training.checkpointing_inspect_cli import main  # noqa: E402 - after the warnings of what it imports

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
