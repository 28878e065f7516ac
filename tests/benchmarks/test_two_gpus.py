"""The program for two GPUs, small on the CPU: it compares, it goes on where it stopped, and it keeps to its time."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def two_gpus(folder, *words):
    """Run it; returns the exit code and what it printed."""
    command = [sys.executable, "-m", "benchmarks.two_gpus", "--smoke", "--output", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def test_ranks_agree_and_nothing_is_done_twice(tmp_path):
    """One digest for both settings; a second start trains nothing; a digest that differs is a problem."""
    code, text = two_gpus(tmp_path, "--parts", "dp2")
    assert code == 0, text
    assert "dp2: one digest, one loss curve" in text and "| resident |" in text and "| auto |" in text
    code, text = two_gpus(tmp_path, "--parts", "dp2", "--seconds", "0")
    assert code == 0 and "dp2: one digest, one loss curve" in text
    path = tmp_path / "dp2_auto.rank0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"digest": "sha256:0"}))
    code, text = two_gpus(tmp_path, "--parts", "dp2")
    assert code == 1 and "PROBLEM dp2: digests or losses differ" in text


def test_what_does_not_fit_into_the_time_is_named(tmp_path):
    """Nothing is started that would not end in time."""
    code, text = two_gpus(tmp_path, "--parts", "digests,13b", "--seconds", "4")
    assert code == 1
    assert "digests: left out" in text and "13b_auto: left out" in text and "13b_share0: left out" in text
    assert not list(tmp_path.glob("*.log"))
