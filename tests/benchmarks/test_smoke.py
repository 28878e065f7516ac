"""`make bench` runs on a machine without a GPU; it makes no claim about time there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What a smoke pass over all parts printed. A folder of its own gets the post-mortems of the injected steps."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DEEP_OFFLOAD_CACHE": str(tmp_path_factory.mktemp("cache"))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_kernel_parts_print_rates_and_ratios(output):
    """The CPU update, the update phase and the flush print figures and what they are compared with."""
    assert "x the pattern" in output
    assert "subnormal moments take" in output
    assert output.count("G/s") >= 6
    assert "of the link" in output


def test_trained_parts_compare_with_another_system(output):
    """An iteration of ours and one of plain torch become a ratio."""
    assert "none / ours_r0: " in output


def test_sweep_prints_predicted_beside_measured(output):
    """The table has both update times and says how far they were apart."""
    assert "| stride_2 | " in output
    assert "predicted update: off by" in output


def test_traces_have_a_price_and_explain_the_time(output):
    """Iterations with and without a trace are compared, and parts of the update and of the iteration attributed."""
    assert re.search(r"steps with marks take [-+][\d.]+ \+- [\d.]+ ms more .* [1-9]\d* steps beside", output)
    assert re.search(r"makes marks for (0\.0*[1-9]\d*|[1-9][\d.]*) ms of an iteration", output), "none was counted"
    assert "| share 1/2 (GPU share 0." in output
    explained = re.findall(r"([\d.]+) % of the update attributed .*?, ([\d.]+) % of the iteration", output)
    assert len(explained) == 1
    assert all(0 < float(update) <= 100 and 20 < float(whole) <= 100 for update, whole in explained)


def test_exactness_skips_the_injected_step_and_finds_one_digest(output):
    """Both settings skip the step with an infinite gradient and end with the same bits."""
    assert "1 skipped" in output
    assert "one digest, one loss curve" in output
