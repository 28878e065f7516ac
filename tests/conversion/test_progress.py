"""The progress of a conversion: a bar on terminals, a line for each tenth elsewhere."""

from __future__ import annotations

import io

from megatron.training.conversion.progress import ByteProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_come_with_each_tenth():
    """A log gets at most eleven lines, however small the steps, with share, speed and remaining time."""
    stream = io.StringIO()
    progress = ByteProgress("importing", 1000, stream)
    for _ in range(1000):
        progress.add(1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("importing:  10 %, ") and "ETA 0:00:00" in lines[-1]


def test_a_terminal_gets_one_line():
    """A terminal sees one bar that is drawn over itself and ends with the line."""
    stream = Terminal()
    progress = ByteProgress("exporting", 4, stream)
    for _ in range(4):
        progress.add(1)
    drawn = stream.getvalue()
    assert drawn.endswith("\n") and drawn.count("\n") == 1
    assert "[##############################] exporting: 100 %" in drawn.split("\r")[-1]


def test_nothing_to_do_is_no_error():
    """A job of no bytes prints nothing and divides by nothing."""
    ByteProgress("importing", 0, io.StringIO()).add(0)
