"""What marks cost is told apart from a drift of the machine and from what returns every second step."""

import random
import re

import pytest

from benchmarks.trace_overhead import is_marked, overhead_line

NUM_STEPS = 128


@pytest.mark.parametrize("cost", [0.0, 0.8, -0.8])
def test_the_cost_of_marks_is_found(cost):
    """Beside a drift, a rhythm of two steps, noise and single late steps."""
    luck = random.Random(1)
    elapsed = [
        200 + 0.1 * i + 2 * (i % 2) + luck.gauss(0, 0.3) + 90 * (i % 40 == 11) + cost * is_marked(i, NUM_STEPS)
        for i in range(NUM_STEPS)
    ]
    line = overhead_line("share 1", elapsed, [0.25 * is_marked(i, NUM_STEPS) for i in range(NUM_STEPS)])
    found, error = map(float, re.findall(r"take ([-+.0-9]+) \+- ([.0-9]+) ms", line)[0])
    assert 0.01 < error < 0.12
    assert abs(found - cost) < 3 * error
    assert "marks for 0.250 ms of an iteration" in line


def test_each_half_marks_half_of_its_steps():
    """Even ones first, odd ones then."""
    assert [is_marked(i, 8) for i in range(8)] == [True, False, True, False, False, True, False, True]
