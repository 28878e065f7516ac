"""`python -m benchmarks.resume`: equal runs are told from unequal ones, and what a save costs is printed."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.resume import Log, differences


def test_smoke_run_finds_one_digest(tmp_path):
    """A tiny model is saved and resumed; seconds and memory of save and load are there, the checkpoint is gone."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.resume", "--smoke", "--output", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DEEP_OFFLOAD_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "one digest, one loss curve: saved at 6, share 0.5, then 0.25" in result.stdout
    for words in (
        "saved checkpoint of iteration 6",
        "> memory before and after the save: host",
        "> loaded weights and",
    ):
        assert words in result.stdout
    assert not (tmp_path / "checkpoint").exists()


def _log(numbers, digest):
    return Log({n: (f"{10 - n}.5", "1.0") for n in numbers}, digest, (), 1.0)


def test_what_differs_is_named():
    """A loss, a norm, a step that is missing, a digest."""
    whole, first, resumed = _log(range(1, 11), "sha256:a"), _log(range(1, 7), None), _log(range(7, 11), "sha256:a")
    assert differences(whole, first, resumed, 6) == []
    assert differences(whole, first, replace(resumed, digest="sha256:b"), 6) == [
        "the resumed run's digest is sha256:b, not sha256:a"
    ]
    changed = replace(resumed, losses={**resumed.losses, 8: ("2.5", "1.1")})
    assert differences(whole, first, changed, 6) == [
        "iteration 8 of the resumed run: loss and norm ('2.5', '1.1'), not ('2.5', '1.0')"
    ]
    assert (
        "the resumed run did iterations [7, 8, 9], not"
        in differences(whole, first, _log(range(7, 10), "sha256:a"), 6)[0]
    )
