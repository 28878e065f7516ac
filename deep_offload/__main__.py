"""`python -m deep_offload`: see cli.py."""

import sys

from deep_offload.cli import main

sys.exit(main(sys.argv[1:]))
