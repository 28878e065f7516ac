"""`python -m benchmarks [--smoke]`: the benchmarks in turn; --smoke runs them small, on any machine."""

from __future__ import annotations

import argparse
import subprocess
import sys

PARTS = {
    "cpu_adam": ([], ["--numel", "2000000", "--threads", "2", "--repeats", "3"]),
    "update_phase": ([], ["--num-subgroups", "8", "--numel", "200000", "--shares", "0,0.5,1", "--repeats", "2"]),
}
"""Part: its arguments, and those of a smoke run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    options = parser.parse_args()
    for name, (full, smoke) in PARTS.items():
        if options.part in (None, name):
            print(f"== {name}", flush=True)
            code = subprocess.call([sys.executable, "-m", f"benchmarks.{name}", *(smoke if options.smoke else full)])
            if code != 0:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
