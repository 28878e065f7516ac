"""The benchmark of fine-tuning goes through all its stages on a CPU, goes on where it stopped, and can fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from benchmarks import fine_tune

ROOT = Path(__file__).resolve().parents[2]


def options(work, **changes):
    base = dict(shape="tiny", work=work, scratch=None, keep=False, extra="", iterations=3, minutes=5.0)
    return Namespace(**{**base, **changes})


def benchmark(work, *words):
    """Run it as a user would; returns exit code and output."""
    command = [sys.executable, "-m", "benchmarks.fine_tune", "--work", str(work), "--iterations", "3", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def test_all_stages_in_two_calls(tmp_path):
    """The second call does what the first has left; transformers' loss is the one of training; folders are removed."""
    code, printed = benchmark(tmp_path, "--stages", "make,import")
    assert code == 0, printed
    code, printed = benchmark(tmp_path, "--stages", "make,import,text,tune,export,reload")
    assert code == 0, printed
    assert "\nmake: " not in printed and "| make | " in printed, "it is in the table, but not done again"
    assert "tokens/s" in printed and "27 tensors" in printed
    rows = json.loads((tmp_path / "stages.json").read_text())["rows"]
    assert list(rows) == ["make", "import", "text", "tune", "export", "reload"]
    assert all(row["seconds"] > 0 for name, row in rows.items() if name != "text")
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"ours"} and not (tmp_path / "ours" / "release").exists()


def test_wrong_loss_fails(tmp_path, monkeypatch):
    """A loss in transformers that is not the one of training fails the stage."""
    run = fine_tune.Run(options(tmp_path))
    line = " validation loss at iteration 3 on validation set | lm loss value: 5.000000E+00 | lm loss PPL: 1.0 | \n"
    test = line.replace("validation set", "test set").replace("5.0", "6.0")
    (tmp_path / "tune.log").write_text(line + test)
    monkeypatch.setattr(fine_tune.Run, "training_words", lambda self: [])
    for loss, is_good in ((5.005, True), (5.02, False), (6.0, False), (float("nan"), False)):
        text = json.dumps({"loss": loss, "tokens": 1, "peak_gpu": None})
        monkeypatch.setattr(fine_tune.Run, "call", lambda self, *words, text=text: (text, fine_tune.Row(1.0, 1.0)))
        if is_good:
            fine_tune.reload(run)
        else:
            with pytest.raises(fine_tune.StageError, match="differ by more than"):
                fine_tune.reload(run)


def test_time_is_over(tmp_path):
    """At the end of the time the running stage is ended, and what comes before stays done."""
    run = fine_tune.Run(options(tmp_path, minutes=0.01))
    started = time.monotonic()
    with pytest.raises(fine_tune.OutOfTime):
        run.call("make", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert time.monotonic() - started < 30
    with pytest.raises(fine_tune.StageError, match="no such stage"):
        fine_tune.Run(options(tmp_path)).call("make", [sys.executable, "-c", "raise SystemExit('no such stage')"])


def test_another_shape_is_refused(tmp_path):
    """A folder with another run is not mixed up with this one."""
    fine_tune.Run(options(tmp_path)).done("make", fine_tune.Row(1.0, 1.0))
    with pytest.raises(ValueError, match="holds a run of --shape tiny"):
        fine_tune.Run(options(tmp_path, shape="1b"))


def test_full_disk_is_seen_first(tmp_path, monkeypatch):
    """What will not fit on the disk is refused before anything is written."""
    monkeypatch.setitem(fine_tune.SHAPES, "7b", fine_tune.Shape(gigabytes=1e9, batch="", tune_seconds=0))
    with pytest.raises(ValueError, match="GB free"):
        fine_tune.Run(options(tmp_path, shape="7b"))
