"""Look at checkpoints without a GPU: `verify DIR`, `inspect DIR`, `diff DIR DIR`."""

import os
import sys
import warnings

# This folder must not be searched: this file's name is that of a module of the standard library.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

warnings.filterwarnings("ignore")  # megatron-core's, on packages that looking at files does not need

from megatron.training.checkpointing_inspect_cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
