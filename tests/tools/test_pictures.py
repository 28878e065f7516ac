"""The two drawing tools: what they read, and that a wrong file gets one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.draw_timeline import Bar, order_lanes, read_trace
from tools.plot_loss import read_losses

ROOT = Path(__file__).resolve().parents[2]
LOG = """
 validation loss at iteration 0 | lm loss value: 9.050000E+00 | lm loss PPL: 8.5E+03 |
 [2026-01-01 10:00:00.000000] iteration       10/     100 | consumed samples: 80 | lm loss: 7.000000E+00 | x: 1 |
 [2026-01-01 10:00:01.000000] iteration       20/     100 | consumed samples: 160 | lm loss: 6.500000E+00 | x: 1 |
 validation loss at iteration 20 | lm loss value: 6.600000E+00 | lm loss PPL: 7.3E+02 |
 validation loss at iteration 20 on validation set | lm loss value: 6.600000E+00 | lm loss PPL: 7.3E+02 |
"""
EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "H2D"}},
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 0"}},
    {"ph": "X", "name": "prefetch[5]", "pid": 1, "tid": 7, "ts": 2000.0, "dur": 500.0},
    {"ph": "X", "name": "norm_ready", "pid": 1, "tid": 9, "ts": 1000.0},
]


def run_tool(name, *arguments):
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_losses_are_read():
    """Training and validation losses come with their iterations; a final line for the same iteration adds none."""
    curve = read_losses(LOG)
    assert curve.training == ((10, 7.0), (20, 6.5))
    assert curve.validation == ((0, 9.05), (20, 6.6))


def test_trace_is_read():
    """Lanes have their threads' names, times start at 0 in milliseconds, and the subgroup is cut off the kind."""
    assert read_trace(json.dumps({"traceEvents": EVENTS})) == [
        Bar("h2d", "prefetch", 1.0, 0.5),
        Bar("9", "norm_ready", 0.0, 0.0),
    ]


def test_lanes_are_ordered():
    """The known lanes come in the project's order, unknown ones after them."""
    bars = [Bar(lane, "x", 0, 1) for lane in ("d2h", "zzz", "cpu", "main", "gpu", "h2d")]
    assert order_lanes(bars) == ["main", "gpu", "cpu", "h2d", "d2h", "zzz"]


@pytest.mark.parametrize("tool, content", [("plot_loss.py", LOG), ("draw_timeline.py", json.dumps(EVENTS))])
def test_tool_writes_a_png(tmp_path, tool, content):
    """Each tool writes a PNG and says where."""
    pytest.importorskip("matplotlib")
    (tmp_path / "input").write_text(content)
    result = run_tool(tool, tmp_path / "input", "--output", tmp_path / "new" / "picture.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "picture.png" in result.stdout


@pytest.mark.parametrize(
    "tool, content, words",
    [
        ("plot_loss.py", "no losses here", "holds no line with an lm loss"),
        ("draw_timeline.py", "{", "no Chrome trace"),
        ("draw_timeline.py", "[]", "no complete events"),
    ],
)
def test_wrong_file_gets_one_sentence(tmp_path, tool, content, words):
    """A file of another kind ends the tool with code 2 and one line."""
    (tmp_path / "input").write_text(content)
    result = run_tool(tool, tmp_path / "input", "--output", tmp_path / "picture.png")
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
