"""The simulator obeys the bound and the closed forms, and comes near to what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import Compute, choose_placement
from deep_offload.model.cost import StateFormat, link_bytes, op_cost, op_seconds
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.memory import host_state_bytes
from deep_offload.model.performance import share_of_bound, work_seconds
from deep_offload.model.simulator import (
    SimBackend,
    SimHost,
    Simulation,
    iteration_cost,
    main_seconds,
    settled_iteration,
    simulate,
    submit_iterations,
    timeline_of,
)
from deep_offload.plan.check import check_plan
from deep_offload.plan.layout import ShardLayout, ShardSpec, build_layout
from deep_offload.plan.ops import Lane, OpKind, Place, Plan
from deep_offload.plan.placement import place_by_share
from deep_offload.plan.planner import build_plan
from tests.plan.strategies import PlacedCase, placed_cases, profiles, state_formats

NUMEL = 1 << 26
DOCS = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"


def even_layout(num: int, grad_bytes: int = 2) -> ShardLayout:
    return build_layout([ShardSpec(num * NUMEL, 2, grad_bytes)], NUMEL)


def calm(**changes: float) -> HardwareProfile:
    """A machine without contention or overhead: lanes do not feel each other."""
    values = dict(
        h2d_bytes_per_s=50e9,
        d2h_bytes_per_s=50e9,
        h2d_both_bytes_per_s=50e9,
        d2h_both_bytes_per_s=50e9,
        h2d_busy_bytes_per_s=50e9,
        d2h_busy_bytes_per_s=50e9,
        dram_bytes_per_s=1e15,
        host_dram_bytes_per_s=1e15,
        cpu_adam_fp32_params_per_s=4e9,
        cpu_adam_param_params_per_s=4e9,
        cpu_adam_fp32_busy_params_per_s=4e9,
        cpu_adam_param_busy_params_per_s=4e9,
        op_overhead_seconds=0.0,
    )
    return replace(BUILT_IN_PROFILES["h200"], **{**values, **changes})


def plan_of(case: PlacedCase, state: StateFormat, profile: HardwareProfile) -> Plan:
    return build_plan(case.layout, case.placement, case.num_slots, op_seconds(case.layout, state, profile))


def makespan(plan: Plan, layout: ShardLayout, state: StateFormat, profile: HardwareProfile, ranks: int = 1) -> float:
    timeline = simulate(plan, layout, state, profile, num_ranks=ranks).timeline
    return max((span.end for span in timeline.spans), default=0.0)


@settings(max_examples=60)
@given(placed_cases(), state_formats, profiles(), st.integers(1, 4))
def test_nothing_beats_the_bound(case, state, profile, ranks):
    """No simulated iteration takes less than any lane's or the memory's own work."""
    plan = plan_of(case, state, profile)
    bound = work_seconds(((op, 1.0) for op in plan.ops), case.layout, state, profile, num_ranks=ranks)
    assert makespan(plan, case.layout, state, profile, ranks) >= max(bound.values()) * (1 - 1e-9)


@settings(max_examples=40)
@given(placed_cases(), state_formats, profiles(), st.floats(1.0, 10.0))
def test_a_faster_machine_is_never_slower(case, state, profile, factor):
    """With all rates times f the same plan takes exactly 1/f of the time."""
    plan = plan_of(case, state, profile)
    before = makespan(plan, case.layout, state, profile)
    after = makespan(plan, case.layout, state, profile.scaled(factor))
    assert after == pytest.approx(before / factor, rel=1e-9)


@settings(max_examples=40)
@given(placed_cases(), state_formats, profiles())
def test_spans_obey_lanes_and_edges(case, state, profile):
    """Each lane does one operation at a time in plan order, and nothing starts before what it waits for is done."""
    plan = plan_of(case, state, profile)
    check_plan(plan)
    spans = simulate(plan, case.layout, state, profile).timeline.spans
    assert tuple(span.op for span in spans) == plan.ops
    last: dict[Lane, float] = {}
    for span in spans:
        assert span.end >= span.start >= max([last.get(span.op.lane, 0.0), *(spans[a].end for a in span.op.after)])
        last[span.op.lane] = span.end
    again = simulate(plan, case.layout, state, profile).timeline
    assert again.spans == spans


@settings(max_examples=60)
@given(placed_cases(), state_formats)
def test_bytes_of_the_plan_are_the_bytes_of_the_arrays(case, state):
    """What the plan moves is what the host arrays hold: state up and down, gradients down, weights up."""
    plan = build_plan(case.layout, case.placement, case.num_slots)
    moved = dict.fromkeys(OpKind, 0)
    for op in plan.ops:
        if op.lane is not Lane.MAIN:
            moved[op.kind] += link_bytes(op.kind, case.layout.subgroups[op.subgroup], state)
    host = host_state_bytes(case.layout, case.placement, state)
    by_place = {place: [h for h, p in zip(host.subgroups, case.placement) if p is place] for place in Place}
    streamed = sum(h.master + h.exp_avg + h.exp_avg_sq for h in by_place[Place.GPU])
    assert moved[OpKind.PREFETCH] == moved[OpKind.FLUSH] == streamed
    assert moved[OpKind.GRAD_FLUSH] == host.grad == sum(h.grad for h in by_place[Place.CPU])
    on_cpu = [s for s, p in zip(case.layout.subgroups, case.placement) if p is Place.CPU]
    assert moved[OpKind.PARAM_H2D] == sum(s.numel * s.param_bytes for s in on_cpu)
    assert all(h.total == 0 for h in by_place[Place.RESIDENT])


def test_share_0_is_the_cpu_alone():
    """All on the CPU: what the norm leaves of the last gradient's way, the updates, the last subgroup's upload."""
    layout, state, profile = even_layout(8), StateFormat(wire="param"), calm()
    plan = build_plan(layout, place_by_share(8, 0.0), 1)
    seconds = simulate(plan, layout, state, profile, backward_seconds=10.0).timeline.update_seconds
    gradient = 2 * NUMEL / 50e9 - 8 * NUMEL / profile.gpu_upcast_params_per_s
    assert seconds == pytest.approx(gradient + 8 * NUMEL / 4e9 + 2 * NUMEL / 50e9, rel=1e-9)


@pytest.mark.parametrize("split", [False, True])
def test_share_1_is_the_link_alone(split):
    """All streamed without a head start: one prefetch, one update, then flushes back to back."""
    layout, state, profile = even_layout(8), StateFormat(split, "param"), calm()
    plan = build_plan(layout, place_by_share(8, 1.0), 4)
    per_param = (10 if split else 12) / 50e9
    expected = NUMEL * (per_param + 1 / profile.gpu_adam_params_per_s + 8 * per_param)
    assert makespan(plan, layout, state, profile) == pytest.approx(expected, rel=1e-9)


def test_one_slot_takes_turns():
    """With one slot every prefetch waits for the flush before it: both directions add up."""
    layout, state, profile = even_layout(8), StateFormat(wire="param"), calm()
    plan = build_plan(layout, place_by_share(8, 1.0), 1)
    expected = 8 * NUMEL * (2 * 12 / 50e9 + 1 / profile.gpu_adam_params_per_s)
    assert makespan(plan, layout, state, profile) == pytest.approx(expected, rel=1e-9)


def test_steady_state_overlaps_flush_and_forward():
    """In the steady state an iteration costs compute plus what the update cannot hide, never less than the compute."""
    layout, state, profile = even_layout(8), StateFormat(wire="param"), calm()
    plan = build_plan(layout, place_by_share(8, 0.5), 4, op_seconds(layout, state, profile))
    one = simulate(plan, layout, state, profile, forward_seconds=0.1, backward_seconds=0.2, num_iterations=3)
    long = simulate(plan, layout, state, profile, forward_seconds=0.1, backward_seconds=5.0, num_iterations=3)
    assert one.iteration_seconds >= 0.3
    exposed = one.iteration_seconds - 0.3
    assert exposed < one.timeline.update_seconds
    assert long.iteration_seconds - 5.1 <= exposed + 1e-9
    accumulated = simulate(
        plan, layout, state, profile, forward_seconds=0.1, backward_seconds=0.2, other_seconds=2.0, num_iterations=3
    )
    assert accumulated.iteration_seconds == pytest.approx(one.iteration_seconds + 2.0, rel=0.05)


def test_memory_bound_lanes_share_as_measured():
    """While all three lanes work each keeps its busy rate; when the copies end the CPU speeds up again."""
    profile = BUILT_IN_PROFILES["h200"]
    layout, state = even_layout(16), StateFormat(wire="param")
    plan = build_plan(layout, place_by_share(16, 0.5), 4, op_seconds(layout, state, profile))
    spans = simulate(plan, layout, state, profile).timeline.lane(Lane.CPU)
    alone = op_cost(OpKind.UPDATE_CPU, layout.subgroups[0], state, profile).seconds
    busy = op_cost(OpKind.UPDATE_CPU, layout.subgroups[0], state, profile, busy=True).seconds
    durations = [span.seconds for span in spans]
    assert min(durations) >= alone * (1 - 1e-9) and max(durations) <= busy * (1 + 1e-9)
    assert max(durations) > 1.2 * min(durations)


@settings(max_examples=20)
@given(placed_cases(), state_formats, profiles(), st.integers(2, 4))
def test_one_rank_stands_for_equal_ranks(case, state, profile, ranks):
    """Playing several equal ranks on one host gives each the timeline that a single rank with its part gets."""
    plan = plan_of(case, state, profile)
    host = SimHost(profile)
    main = main_seconds(case.layout, profile, forward_seconds=0.0, backward_seconds=0.0)
    runs = [submit_iterations(plan, SimBackend(host, case.layout, state, main, rank), 1)[0] for rank in range(ranks)]
    host.run()
    single = simulate(plan, case.layout, state, profile, num_ranks=ranks).timeline
    for run in runs:
        for span, expected in zip(timeline_of(host, run).spans, single.spans, strict=True):
            assert span.op == expected.op
            assert (span.start, span.end) == pytest.approx((expected.start, expected.end), rel=1e-9, abs=1e-15)


def test_stuck_plans_are_named():
    """Operations that wait for each other over two lanes end with their names, not with a hang."""
    layout = even_layout(2)
    plan = build_plan(layout, place_by_share(2, 0.0), 1)
    host = SimHost(calm())
    backend = SimBackend(host, layout, StateFormat(), lambda kind, i: 0.0)
    submit_iterations(plan, backend, 1)
    host.tasks[0].waits_for += 1
    with pytest.raises(ValueError, match="the plan cannot go on: grads_ready"):
        host.run()


# Measured on the machine of the built-in profile, G parameters/s at GPU shares of `SHARES`; 16 subgroups, 4 slots.
SHARES = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
MEASURED = {
    ("h200", 1, False): (3.65, 4.3, 4.8, 5.08, 4.6, 4.2, 4.0, 3.6),
    ("h200", 1, True): (3.7, 4.4, 5.0, 5.5, 5.2, 5.0, 4.5, 4.3),
    ("h200x2", 2, False): (2.85, 3.3, 3.4, 3.6, 3.6, 3.45, 3.4, 3.2),
    ("h200x2", 2, True): (2.85, 3.3, 3.7, 4.0, 4.2, 4.1, 3.95, 3.7),
}


TOLERANCE = 0.10
"""Of every point of the sweeps but these."""

MISSES = {("h200x2", 2, False, 1.0): 0.162, ("h200x2", 2, True, 1.0): 0.205}
"""Predicted over measured rate, less 1. docs/simulator.md lists them with their likely cause."""

_AS_KNOWN = 0.01
"""How far a known miss may move before this test and the docs must say so: either way."""


def share_errors(case):
    """Predicted over measured rate, less 1, of one sweep by GPU share."""
    name, ranks, split = case
    profile, layout, state = BUILT_IN_PROFILES[name], even_layout(16), StateFormat(split, "param")
    errors = {}
    for share, measured in zip(SHARES, MEASURED[case], strict=True):
        plan = build_plan(layout, place_by_share(16, share), 4, op_seconds(layout, state, profile))
        errors[share] = layout.numel / makespan(plan, layout, state, profile, ranks) / 1e9 / measured - 1
    return errors


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_near_the_measured_share_sweeps(case):
    """Each point of four measured sweeps over the share is met within 10 %, but for two, which stay what they are."""
    errors = share_errors(case)
    beyond = {share: error for share, error in errors.items() if abs(error) > TOLERANCE}
    known = {share: error for (*where, share), error in MISSES.items() if tuple(where) == case}
    assert beyond == pytest.approx(known, abs=_AS_KNOWN)


def test_misses_are_in_the_docs():
    """docs/simulator.md has a line for each, with its size."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| sweep, two ranks")]
    for (_, _, split, share), error in MISSES.items():
        kind = "split" if split else "full"
        assert any(f"share {share:g}, {kind} master" in line and f"({100 * error:+.0f} %)" in line for line in lines)
    assert len(lines) == len(MISSES)


def test_a_miss_at_share_1_is_that_of_the_link():
    """Two ranks that only stream: with the rate that the sweep itself moved each way both points are met."""
    profile = BUILT_IN_PROFILES["h200x2"]
    for split, bytes_per_param in ((False, 12), (True, 10)):
        measured = MEASURED["h200x2", 2, split][-1]
        link = bytes_per_param * measured * 1e9
        assert 36e9 < link < 39e9 < 46e9 < profile.h2d_both_bytes_per_s
        slower = replace(profile, h2d_both_bytes_per_s=link, d2h_both_bytes_per_s=link)
        layout, state = even_layout(16), StateFormat(split, "param")
        plan = build_plan(layout, place_by_share(16, 1.0), 4, op_seconds(layout, state, slower))
        rate = layout.numel / makespan(plan, layout, state, slower, 2) / 1e9
        assert rate == pytest.approx(measured, rel=0.05)


# The engine itself on that machine (benchmarks/update_phase.py, split master, wire param): milliseconds of an update
# until all parameters are in place, and G parameters/s of update after update, by GPU share.
ENGINE = {
    0.0: (290, 3.49),
    0.375: (197, 4.56),
    0.5: (177, 5.14),
    0.625: (151, 5.48),
    0.75: (162, 5.28),
    1.0: (185, 4.73),
}


@pytest.mark.parametrize("share", ENGINE)
def test_near_the_measured_engine(share):
    """One update and a steady loop of updates are predicted within 10 % at every share, and within 4 % at the best."""
    profile, layout = BUILT_IN_PROFILES["h200"], even_layout(16)
    config = OffloadConfig(interleaved_offload=True, offload_gpu_share=share, offload_resident_fraction=0.0)
    choice = choose_placement(layout, config, profile, can_split=True)
    milliseconds, steady = ENGINE[share]
    tolerance = 0.04 if share == 0.625 else 0.10
    assert 1e3 * choice.predicted_update_seconds == pytest.approx(milliseconds, rel=tolerance)
    plan = build_plan(layout, choice.placement, 4, op_seconds(layout, choice.state, profile))
    loop = simulate(plan, layout, choice.state, profile, num_iterations=3)
    assert layout.numel / loop.iteration_seconds / 1e9 == pytest.approx(steady, rel=tolerance)


# A trained GPT of 1,067,671,552 parameters on an H200, share 1, 8 slots, two micro-batches (benchmarks.trace_overhead):
# rates as its start measured them, compute as its trace did.
STREAMED = replace(
    BUILT_IN_PROFILES["h200"],
    h2d_bytes_per_s=55.3e9,
    h2d_both_bytes_per_s=51.8e9,
    h2d_busy_bytes_per_s=31.1e9,
    d2h_bytes_per_s=55.2e9,
    d2h_both_bytes_per_s=50.2e9,
    d2h_busy_bytes_per_s=49.9e9,
    dram_bytes_per_s=177e9,
    host_dram_bytes_per_s=177e9,
    cpu_adam_param_params_per_s=5.33e9,
    cpu_adam_param_busy_params_per_s=3.36e9,
)
STREAMED_LAYOUT = build_layout([ShardSpec(1_067_671_552, 2, 2)], 66_729_472)
STREAMED_COMPUTE = dict(forward_seconds=0.0125, backward_seconds=0.0197, other_seconds=0.0272)


def streamed(share: float, slots: int, compute: dict[str, float], num: int = 16) -> Callable[..., Simulation]:
    """What plays iterations of such a training of so many subgroups, and so many following ones."""
    state = StateFormat(True, "param")
    layout = build_layout([ShardSpec(num * 66_729_472, 2, 2)], 66_729_472)
    placement = place_by_share(num, share)
    plan = build_plan(layout, placement, slots, op_seconds(layout, state, STREAMED))

    def play(num_iterations: int, num_following: int) -> Simulation:
        counts = {"num_iterations": num_iterations, "num_following": num_following}
        return simulate(plan, layout, state, STREAMED, **compute, **counts)

    return play


def test_flushes_that_pile_up_settle_as_measured():
    """16 flushes take longer than the compute and the updates they hide behind: each step's end a bit later than the
    last one's, until prefetches wait for slots. Iteration, update and last flush are then as measured, within 2 %; the
    second iteration still misses the last flush by 14 %."""
    play = streamed(1.0, 8, STREAMED_COMPUTE)
    settled, second = settled_iteration(play), play(2, 0)
    assert settled.iteration_seconds == pytest.approx(0.2108, rel=0.02)
    assert settled.timeline.in_place_seconds == pytest.approx(0.1601, rel=0.02)
    assert settled.timeline.update_seconds == pytest.approx(0.252, rel=0.02)
    assert second.piles_up and second.timeline.update_seconds < 0.87 * 0.252


LONG_TRAININGS = [
    *((share, slots, 1.0, 16) for share in (0.0, 0.5, 0.75, 0.875, 1.0) for slots in (4, 8)),
    *((share, 8, scale, 16) for share in (0.5, 0.875, 1.0) for scale in (0.0, 0.5)),
    (1.0, 16, 52 / 16, 52),
]


@pytest.mark.parametrize(("share", "slots", "scale", "num"), LONG_TRAININGS)
def test_settled_iterations_are_those_of_a_long_training(share, slots, scale, num):
    """Where work piles up, iteration and last flush are within 2 % of the mean of iterations 30 to 33, of which some
    alternate by 15 %, and the cost that placements are compared by within 5 %; elsewhere the second iteration is as
    the later ones within 3 %."""
    play = streamed(share, slots, {name: scale * seconds for name, seconds in STREAMED_COMPUTE.items()}, num)
    late = [play(n, 1) for n in range(30, 34)]
    seconds = sum(one.iteration_seconds for one in late) / len(late)
    last_flush = sum(one.timeline.update_seconds for one in late) / len(late)
    settled, second = settled_iteration(play), play(2, 0)
    tolerance = 0.02 if second.piles_up else 0.03
    assert settled.iteration_seconds == pytest.approx(seconds, rel=tolerance)
    assert settled.timeline.update_seconds == pytest.approx(last_flush, rel=tolerance)
    assert iteration_cost(play) == pytest.approx(seconds, rel=0.05)
    assert second.piles_up or settled == second


def test_the_choice_counts_what_piles_up():
    """More slots promise no more than they keep in a long training, and the predicted iteration is that one's."""
    compute = Compute(*STREAMED_COMPUTE.values())
    config = OffloadConfig(interleaved_offload=True, offload_gpu_share=1.0, offload_resident_fraction=0.0)
    choice = choose_placement(STREAMED_LAYOUT, config, STREAMED, can_split=True, compute=compute)
    assert choice.num_slots == 8
    assert choice.predicted_iteration_seconds == pytest.approx(0.2108, rel=0.02)
    four = settled_iteration(streamed(1.0, 4, STREAMED_COMPUTE)).iteration_seconds
    promised = re.search(r"8 slots instead of 4 shorten the iteration by (\d+) %", choice.why)
    assert promised and int(promised[1]) / 100 == pytest.approx(1 - 0.2108 / four, abs=0.02)


@settings(max_examples=30)
@given(placed_cases(), state_formats, profiles())
def test_no_simulated_update_beats_its_bound(case, state, profile):
    """Without a head start the update phase is at most the whole of its bound."""
    timeline = simulate(plan_of(case, state, profile), case.layout, state, profile).timeline
    share, lane = share_of_bound(timeline, case.layout, state, profile)
    assert 0.0 <= share <= 1 + 1e-9 and lane in ("dram", "cpu", "gpu", "h2d", "d2h")


@given(placed_cases(), state_formats, profiles(), st.floats(0.0, 0.01), st.floats(0.0, 0.01))
def test_work_before_the_norm_is_no_work_of_the_update(case, state, profile, forward, backward):
    """Of an operation that the norm cuts in two only the part behind it counts: no lane beats its bound."""
    play = partial(
        simulate,
        plan_of(case, state, profile),
        case.layout,
        state,
        profile,
        forward_seconds=forward,
        backward_seconds=backward,
    )
    timeline = settled_iteration(play).timeline
    share, lane = share_of_bound(timeline, case.layout, state, profile)
    # Memory is shared by turns, so that the part of the time is not quite the part of the bytes.
    assert share <= (1 + 1e-6 if lane != "dram" else 1.2)


def test_lanes_that_did_not_share_memory_would_be_seen(monkeypatch):
    """Without contention the simulator beats the bound of a machine with little memory bandwidth."""
    from deep_offload.model import simulator

    profile = calm(dram_bytes_per_s=60e9, host_dram_bytes_per_s=60e9)
    layout, state = even_layout(8), StateFormat(wire="param")
    plan = build_plan(layout, place_by_share(8, 0.5), 4)
    bound = max(work_seconds(((op, 1.0) for op in plan.ops), layout, state, profile).values())
    assert makespan(plan, layout, state, profile) >= bound
    monkeypatch.setattr(simulator, "_share", lambda tasks, wanted, capacity: [most for _, most in tasks])
    assert makespan(plan, layout, state, profile) < bound
