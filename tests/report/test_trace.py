"""Traces of several steps: one clock, predicted lanes beside measured, waits, counters, and what they explain."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings

from deep_offload.model.choose import Compute
from deep_offload.model.cost import dram_bytes
from deep_offload.model.trace import Expectation, attributed_share, run_trace
from deep_offload.plan.draw import chrome_trace, read_trace
from deep_offload.plan.ops import Lane, Op, OpKind
from deep_offload.plan.timeline import Span, Timeline
from tests.plan.strategies import placed_cases, profiles, state_formats
from tests.report.run_files import expectation, measured_steps


def test_predicted_lanes_stand_beside_measured():
    """Two processes; each predicted update starts when the measured one did."""
    steps = measured_steps(3)
    lanes = read_trace(json.loads(json.dumps(run_trace(steps, expectation()))))
    assert list(lanes) == ["measured", "predicted"]
    norms = {
        name: [s.end for s in timeline.spans if s.op.kind is OpKind.NORM_READY] for name, timeline in lanes.items()
    }
    assert norms["measured"] == [step.norm_end for step in steps]
    assert norms["predicted"] == pytest.approx(norms["measured"])
    assert list(read_trace(run_trace(steps, None))) == ["measured"]


def test_counters_begin_and_end_at_nothing():
    """Link, host memory and staging slots have counter tracks, which rise above zero and return to it."""
    events = run_trace(measured_steps(2), expectation())["traceEvents"]
    tracks: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "C" and event["pid"] == 0:
            tracks.setdefault(event["name"], []).append(next(iter(event["args"].values())))
    assert set(tracks) == {"h2d GB/s", "d2h GB/s", "host memory GB/s", "GPU bytes"}
    for name, values in tracks.items():
        assert max(values) > 0 and values[-1] == pytest.approx(0, abs=1e-3), name


def test_waits_are_slices_and_read_back():
    """Time that the loop stood still is a slice of its own before the operation, and survives the file."""
    span = Span(Op(OpKind.PARAMS_NEEDED, 0), 2.0, 2.0, 0, 0.5)
    trace = chrome_trace({"measured": Timeline((span,))})
    wait = next(e for e in trace["traceEvents"] if e.get("cat") == "wait")
    assert (wait["ts"], wait["dur"], wait["name"]) == (1.5e6, 0.5e6, "wait for params_needed[0]")
    assert read_trace(trace)["measured"].spans == (span,)


def test_gaps_are_not_explained():
    """A phase whose lanes stand still for half of it is half explained."""
    norm = Span(Op(OpKind.NORM_READY), 0.0, 1.0)
    one, two = (Span(Op(OpKind.UPDATE_CPU, i), start, start + 1.0) for i, start in ((0, 1.0), (1, 4.0)))
    assert attributed_share(Timeline((norm, one, two))) == pytest.approx(0.5)
    assert attributed_share(Timeline((norm, one))) == 1.0


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(placed_cases(), state_formats, profiles())
def test_simulated_updates_are_all_explained(case, state, profile):
    """In a simulation some lane works all the time: nothing waits for nothing."""
    from deep_offload.plan.planner import build_plan

    plan = build_plan(case.layout, case.placement, case.num_slots)
    expected = Expectation(plan, case.layout, state, profile, 1, 0.0, "cpu")
    timeline = expected.timeline(Compute(0.0, 0.001))
    facts = expected.judge(timeline)
    assert (facts is None) == (not timeline.update_spans)
    if facts is not None:
        assert facts.attributed >= 0.95 - 1e-9
        assert all(0 <= share <= 1 + 1e-9 for share in facts.busy.values())
        assert f"bound by {facts.lane}" in str(facts)
        if all(span.start >= timeline.norm_end for span in timeline.update_spans):
            ops = [span.op for span in timeline.update_spans]
            moved = sum(dram_bytes(op.kind, case.layout.subgroups[op.subgroup], state) for op in ops)
            seconds = moved / profile.rank_dram_bytes_per_s(1)
            assert facts.busy["dram"] == pytest.approx(seconds / timeline.update_seconds)


def test_judging_a_step_is_cheap():
    """What a log line adds takes milliseconds even for 200 subgroups' worth of operations."""
    expected, step = expectation(), measured_steps(1)[0]
    many = Timeline(step.spans * 25)
    started = time.process_time()
    expected.judge(many)
    assert time.process_time() - started < 0.1
    assert sum(s.op.lane is not Lane.MAIN for s in many.spans) > 500
