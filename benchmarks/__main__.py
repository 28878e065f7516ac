"""`python -m benchmarks [--smoke]`: the benchmarks in turn; --smoke runs them small, on any machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

PARTS = {
    "cpu_adam": ([], ["--numel", "2000000", "--threads", "2", "--repeats", "3"]),
    "update_phase": ([], ["--num-subgroups", "8", "--numel", "200000", "--shares", "0,0.5,1", "--repeats", "2"]),
    "flush": ([], ["--num-subgroups", "4", "--numel", "200000", "--wires", "param", "--repeats", "2"]),
    "exactness": (["--output", "{output}/exactness"], ["--smoke", "--output", "{output}/exactness"]),
    "trace_overhead": (["--output", "{output}/trace"], ["--smoke", "--output", "{output}/trace"]),
    "iteration": (["--output", "{output}"], ["--smoke", "--output", "{output}"]),
    "sweeps": (["--output", "{output}"], ["--smoke", "--output", "{output}"]),
}
"""Part: its arguments, and those of a smoke run. One that ends before its end is gone on with by the same command."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes, timings without meaning")
    parser.add_argument("--part", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; a comma between")
    parser.add_argument("--output", default="out/bench", help="results and logs of the parts that train")
    options = parser.parse_args()
    unknown = [name for name in options.part.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--part {','.join(unknown)} is unknown, allowed are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as scratch:
        output = scratch if options.smoke else options.output
        for name in options.part.split(","):
            print(f"== {name}", flush=True)
            words = [word.format(output=output) for word in PARTS[name][options.smoke]]
            code = subprocess.call([sys.executable, "-m", f"benchmarks.{name}", *words])
            if code != 0:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
