"""`make bench` runs on a machine without a GPU; it makes no claim about time there."""

import os
import subprocess
import sys
from pathlib import Path


def test_smoke_pass_prints_rates_and_ratios(tmp_path):
    """Every part runs at small sizes and prints its figures."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DEEP_OFFLOAD_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    assert "x the pattern" in result.stdout
    assert result.stdout.count("G/s") >= 6
