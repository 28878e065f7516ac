"""Drawings show what the timeline says, and a trace reads back into it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_offload.plan.draw import LEGEND, chrome_trace, draw_lanes, read_trace, trace_to_json
from deep_offload.plan.ops import Lane, Op, OpKind
from deep_offload.plan.planner import build_plan
from deep_offload.plan.timeline import Span, Timeline
from tests.plan.strategies import placed_cases

EXAMPLE = Timeline(
    (
        Span(Op(OpKind.NORM_READY), 0.0, 0.0),
        Span(Op(OpKind.UPDATE_CPU, 0, (0,)), 0.0, 0.5),
        Span(Op(OpKind.PARAM_H2D, 0, (1,)), 0.5, 0.75, 4_000_000_000),
        Span(Op(OpKind.PREFETCH, 1, (), (), 0), 0.0, 0.25, 1_000_000_000),
        Span(Op(OpKind.UPDATE_GPU, 1, (0, 3), (), 0), 0.25, 0.3),
        Span(Op(OpKind.FLUSH, 1, (4,), (), 0), 0.5, 1.0, 2_000_000_000),
    )
)


def test_text_lanes():
    """Lanes, widths, subgroup numbers, busy shares and the scale of a small timeline are drawn exactly."""
    main, cpu, gpu, h2d, d2h = draw_lanes(EXAMPLE, 20).splitlines()[:5]
    assert main == "main ||                   |"
    assert cpu == " cpu |0#########          |  50 %"
    assert gpu == " gpu |     #              |   5 %"
    assert h2d == " h2d |1====     0----     |  50 %"
    assert d2h == " d2h |          1=========|  50 %"
    assert draw_lanes(EXAMPLE, 20).splitlines()[-1] == LEGEND
    assert "'1000 ms" in draw_lanes(EXAMPLE, 20)
    assert draw_lanes(Timeline(())) == "(an empty timeline)"


@settings(max_examples=30)
@given(placed_cases(), st.floats(1e-6, 10), st.integers(10, 200))
def test_any_timeline_draws_and_reads_back(case, seconds, width):
    """Every line has its width, and a trace of any plan's spans gives the same timeline again."""
    ops = build_plan(case.layout, case.placement, case.num_slots).ops
    timeline = Timeline(tuple(Span(op, i * seconds, (i + 0.7) * seconds, i) for i, op in enumerate(ops)))
    for line in draw_lanes(timeline, width).splitlines()[: len(Lane)]:
        assert line[5] == "|" and line[6 + width] == "|"
    both = {"measured": timeline, "predicted": EXAMPLE}
    assert read_trace(json.loads(trace_to_json(both))) == both


def test_trace_events():
    """An event has its lane's thread, microseconds, subgroup, slot and bytes, and the link has a counter in GB/s."""
    events = chrome_trace({"measured": EXAMPLE})["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (flush,) = [e for e in events if e["name"] == "flush[1]"]
    assert names[flush["tid"]] == "d2h" and flush["cat"] == "flush"
    assert (flush["ts"], flush["dur"]) == (0.5e6, 0.5e6)
    assert flush["args"]["subgroup"] == 1 and flush["args"]["slot"] == 0 and flush["args"]["bytes"] == 2_000_000_000
    counters = [(e["name"], e["ts"], e["args"]["GB/s"]) for e in events if e["ph"] == "C"]
    assert ("d2h GB/s", 0.5e6, 4.0) in counters and ("d2h GB/s", 1.0e6, 0.0) in counters


def trace_with(**args: object) -> dict:
    """A trace of one operation in which some arguments are other ones."""
    trace = chrome_trace({"measured": Timeline((Span(Op(OpKind.UPDATE_CPU, 0), 0.0, 1.0),))})
    (event,) = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    event["args"].update(args)
    return trace


FOREIGN = [
    {},
    {"traceEvents": [{"ph": "X", "pid": 0}]},
    {"traceEvents": 3},
    [],
    trace_with(seconds=["a", None]),
    trace_with(seconds=[1.0]),
    trace_with(seconds=1.0),
    trace_with(seconds=[0.0, float("nan")]),
    trace_with(seconds=[0.0, 10**400]),
    trace_with(bytes="many"),
    trace_with(bytes=None),
    trace_with(waited=[]),
    trace_with(op=3),
    trace_with(op="dance[1] @cpu"),
    trace_with(op="update_cpu[1] @cpu after ,"),
    {"traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": ["measured"]}}]},
]


@pytest.mark.parametrize("trace", FOREIGN)
def test_foreign_traces_are_refused(trace):
    """A trace that is not ours gets one sentence."""
    assert read_trace(trace_with(bytes=7))["measured"].spans[0].num_bytes == 7
    with pytest.raises(ValueError, match="was not written by deep_offload"):
        read_trace(trace)


def test_busy_shares_and_update():
    """The update phase runs from the norm to the last flush, and a lane's share counts its time in that phase."""
    assert EXAMPLE.update_seconds == 1.0
    assert EXAMPLE.busy_share(Lane.D2H) == 0.5 and EXAMPLE.busy_share(Lane.CPU) == 0.5
    assert EXAMPLE.start_of(OpKind.FLUSH) == 0.5 and EXAMPLE.start_of(OpKind.GRAD_FLUSH) is None
