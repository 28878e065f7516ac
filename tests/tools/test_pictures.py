"""The two drawing tools: what they read, and that a wrong file gets one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deep_offload.plan.draw import trace_to_json
from deep_offload.plan.ops import LANE_OF, Lane, parse_op
from deep_offload.plan.timeline import Span, Timeline
from tools.draw_timeline import LANE_TITLES, WORK, read_timeline, update_window, whole_window
from tools.plot_loss import read_losses

ROOT = Path(__file__).resolve().parents[2]
LOG = """
 validation loss at iteration 0 | lm loss value: 9.050000E+00 | lm loss PPL: 8.5E+03 |
 [2026-01-01 10:00:00.000000] iteration       10/     100 | consumed samples: 80 | lm loss: 7.000000E+00 | x: 1 |
 [2026-01-01 10:00:01.000000] iteration       20/     100 | consumed samples: 160 | lm loss: 6.500000E+00 | x: 1 |
 validation loss at iteration 20 | lm loss value: 6.600000E+00 | lm loss PPL: 7.3E+02 |
 validation loss at iteration 20 on validation set | lm loss value: 6.600000E+00 | lm loss PPL: 7.3E+02 |
"""
TIMELINE = Timeline(
    (
        Span(parse_op("norm_ready @main"), 1.0, 1.0),
        Span(parse_op("prefetch[5] @h2d slot 0"), 1.0, 1.5, num_bytes=100),
        Span(parse_op("update_gpu[5] @gpu slot 0"), 1.5, 2.0),
        Span(parse_op("update_cpu[4] @cpu"), 1.0, 2.0),
    )
)


def run_tool(name, *arguments):
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_losses_are_read():
    """Training and validation losses come with their iterations; a final line for the same iteration adds none."""
    curve = read_losses(LOG)
    assert curve.training == ((10, 7.0), (20, 6.5))
    assert curve.validation == ((0, 9.05), (20, 6.6))


def test_first_timeline_is_read(tmp_path):
    """Of a trace with several timelines the first one is drawn, unchanged."""
    path = tmp_path / "trace.json"
    path.write_text(trace_to_json({"measured": TIMELINE, "simulated": Timeline(TIMELINE.spans[:1])}))
    assert read_timeline(path) == TIMELINE


def test_windows():
    """The upper panel holds everything; the lower one starts at the norm and ends with the last work."""
    spans = (
        Span(parse_op("grad_flush[4] @d2h"), 0.5, 0.75),
        *TIMELINE.spans,
        Span(parse_op("params_needed[4] @main"), 3.0, 3.0),
    )
    assert whole_window(Timeline(spans)) == (0.5, 3.0)
    assert update_window(Timeline(spans)) == (1.0, 2.0)
    assert update_window(Timeline(spans[:1])) == (0.5, 0.75)


def test_every_kind_of_work_has_a_color():
    """Each operation that a lane works on is in the legend; only moments of the loop are not."""
    assert set(WORK) == {kind for kind, lane in LANE_OF.items() if lane is not Lane.MAIN}
    assert set(LANE_TITLES) == set(Lane)


@pytest.mark.parametrize(
    "tool, content", [("plot_loss.py", LOG), ("draw_timeline.py", trace_to_json({"measured": TIMELINE}))]
)
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
        ("draw_timeline.py", "{", "cannot be read ("),
        ("draw_timeline.py", "[]", "was not written by deep_offload"),
        ("draw_timeline.py", trace_to_json({"measured": Timeline(())}), "holds no operations"),
    ],
)
def test_wrong_file_gets_one_sentence(tmp_path, tool, content, words):
    """A file of another kind ends the tool with code 2 and one line."""
    (tmp_path / "input").write_text(content)
    result = run_tool(tool, tmp_path / "input", "--output", tmp_path / "picture.png")
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
