"""The demo's judgment of a run: it passes a good one and names each thing that a bad one did not do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deep_offload.plan.draw import trace_to_json
from deep_offload.plan.ops import parse_op
from deep_offload.plan.timeline import Span, Timeline
from examples.demo import run
from examples.demo.outcome import check_outcome, read_outcome, summary_lines

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "0123456789abcdef" * 4
GOOD_LOG = f"""
 validation loss at iteration 0 | lm loss value: 9.050000E+00 | lm loss PPL: 8.5E+03 |
 [2026-01-01 10:00:00.000000] iteration       50/     100 | consumed samples: 400 | lm loss: 7.000000E+00 | x: 1 |
 validation loss at iteration 50 | lm loss value: 7.100000E+00 | lm loss PPL: 1.2E+03 |
 validation loss at iteration 100 | lm loss value: 6.900000E+00 | lm loss PPL: 9.9E+02 |
> moved by lane h2d: 1.00 GiB (1073741824 bytes)
> moved by lane d2h: 1.00 GiB (1073741824 bytes)
> moved by lane cpu: 5242880 params
> moved by lane gpu: 5242880 params
> moved by lane upcast: 0.00 MiB (0 bytes)
state digest: {DIGEST}
"""


GOOD_OPS = ("update_cpu[0] @cpu", "update_gpu[1] @gpu", "update_gpu[3] @gpu")


def outcome_of(tmp_path, log=GOOD_LOG, ops=GOOD_OPS):
    trace = tmp_path / "trace.json"
    spans = tuple(Span(parse_op(op), float(i), float(i + 1)) for i, op in enumerate(ops))
    trace.write_text(trace_to_json({"measured": Timeline(spans)}))
    return read_outcome(log, trace)


def test_good_run_passes(tmp_path):
    """A run that did everything has no problems, and its summary holds loss, subgroups and digest."""
    outcome = outcome_of(tmp_path)
    assert check_outcome(outcome) == []
    assert outcome.num_subgroups == 3
    assert outcome.loss_fall == pytest.approx(2.15)
    text = "\n".join(summary_lines(outcome, 12.0))
    assert DIGEST in text and "9.050 -> 6.900" in text and "1.07 GB moved" in text


def test_machine_without_a_gpu_is_said(tmp_path):
    """Where the CPU stood in for a GPU the summary says so, and nowhere else."""
    log = "> training on the CPU (2 threads), torch 2.13.0+cpu, 1 rank\n" + GOOD_LOG
    assert any(line.startswith("no GPU: ") for line in summary_lines(outcome_of(tmp_path, log=log), 12.0))
    assert not any(line.startswith("no GPU: ") for line in summary_lines(outcome_of(tmp_path), 12.0))


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("value: 6.900000E+00", "value: 7.060000E+00", "fell by 1.99 nats"),
        ("value: 6.900000E+00", "value: nan", "fell by nan nats"),
        ("at iteration 0 ", "at iteration 1 ", "before the first step"),
        ("h2d: 1.00 GiB (1073741824 bytes)", "h2d: 0.00 MiB (0 bytes)", "lane h2d"),
        ("lane d2h", "lane other", "lane d2h"),
        ("gpu: 5242880 params", "gpu: 0 params", "lane gpu"),
        ("state digest: ", "state: ", "no state digest"),
    ],
)
def test_each_fault_of_the_log_is_named(tmp_path, old, new, problem):
    """Each promise that the output does not keep is one problem with its name."""
    assert old in GOOD_LOG
    (found,) = check_outcome(outcome_of(tmp_path, log=GOOD_LOG.replace(old, new)))
    assert problem in found


@pytest.mark.parametrize("kind, side", [("update_cpu", "CPU"), ("update_gpu", "GPU")])
def test_idle_side_is_named(tmp_path, kind, side):
    """A step in which one side updated nothing is a problem."""
    ops = [op for op in GOOD_OPS if not op.startswith(kind)]
    (found,) = check_outcome(outcome_of(tmp_path, ops=ops))
    assert f"the {side} side updated no subgroup" in found


def test_missing_trace_is_an_error(tmp_path):
    """Without a trace file there is one sentence that names the file."""
    with pytest.raises(ValueError, match="wrote no trace to .*none.json"):
        read_outcome(GOOD_LOG, tmp_path / "none.json")


@pytest.mark.parametrize(
    "code, sentence",
    [("raise SystemExit(3)", "ended with code 3"), ("print('nothing')", "wrote no trace to .*timeline.json")],
)
def test_demo_that_shows_nothing_fails(tmp_path, monkeypatch, capsys, code, sentence):
    """A training that fails or leaves no trace ends the demo with code 1 and one sentence."""
    monkeypatch.setattr(run, "NEEDED", ())
    monkeypatch.setattr(run, "prepare_data", lambda output: None)
    monkeypatch.setattr(run, "training_command", lambda *a: [sys.executable, "-c", code])
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", str(tmp_path)])
    monkeypatch.chdir(ROOT)
    assert run.main() == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("demo: ")
    assert re.search(sentence, line)


def test_make_starts_the_demo():
    """The command of `make demo` imports from the repository alone, without an installed `examples`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (module,) = re.findall(r"^demo: setup\n\t\$\(RUN\) -m ([\w.]+) ", makefile, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "--iterations" in result.stdout
