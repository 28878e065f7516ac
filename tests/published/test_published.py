"""The simulator against the published runs: rates from each machine's 20B runs, everything else predicted."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings

from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.published import FitRuns, PublishedRun, fit_rates, predicted_step_seconds, published_plan
from deep_offload.plan.check import check_plan
from deep_offload.plan.ops import OpKind
from tests.plan.strategies import placed_cases
from tests.published.published_runs import MACHINES, error, flush_gain, flush_pairs, rates, rows, step_ms

MISSES = {"a100x4 20B, offloaded 1, stride 5": 0.23}
"""Runs missed by more than 15 %, with the error reached. docs/simulator.md says why."""


def predicted_rows():
    return [row for row in rows() if not row.is_fitted]


def test_every_published_step_is_predicted():
    """Every other stride, ratio and model is within 15 % but for the listed miss, and the median is within 2 %."""
    errors = {row.name: abs(error(row)) for row in predicted_rows()}
    assert {name for name, e in errors.items() if e > 0.15} == set(MISSES)
    assert all(errors[name] <= limit for name, limit in MISSES.items())
    assert median(errors.values()) <= 0.02
    assert len(errors) >= 60


@pytest.mark.parametrize("machine", MACHINES)
def test_fitted_runs_are_met(machine):
    """The three runs that the rates come from are met within 0.2 %."""
    fitted = [row for row in rows() if row.machine == machine and row.is_fitted]
    assert len(fitted) == 3 and all(abs(error(row)) < 0.002 for row in fitted)


def test_strides_are_ordered_as_published():
    """Of two strides of one model whose published times differ by more than 5 % the right one is faster."""
    compared = 0
    for a in rows():
        for b in rows():
            same = (a.machine, a.nominal, a.run.offloaded) == (b.machine, b.nominal, b.run.offloaded)
            if same and a.step * 1.05 < b.step and not {a.name, b.name} & set(MISSES):
                assert step_ms(a) < step_ms(b), (a.name, b.name)
                compared += 1
    assert compared > 100


def test_gain_of_the_asynchronous_flush():
    """The gain of an iteration from the asynchronous flush is predicted within 15 %, the fitted one exactly."""
    gains = {blocking.name: flush_gain(blocking, asynchronous) for blocking, asynchronous in flush_pairs()}
    assert len(gains) >= 12
    assert all(predicted == pytest.approx(published, rel=0.15) for published, predicted in gains.values())
    published, predicted = gains["h100x4 20B, offloaded 1, stride none, blocking flush"]
    assert published > 1.9 and predicted == pytest.approx(published, rel=0.01)


def test_static_ratios():
    """20B with 50 to 90 % offloaded is predicted within 3 %, and each step of the ratio in the right direction."""
    for stride in (None, 2):
        series = [r for r in rows() if r.nominal == "20" and r.run.stride == stride and r.run.is_flush_async]
        series = sorted((r for r in series if r.machine == "h100x4"), key=lambda r: r.run.offloaded)
        assert {r.run.offloaded for r in series} >= {0.5, 0.6, 0.7, 0.8, 0.9, 1.0}
        assert all(abs(error(r)) <= 0.03 for r in series)
        assert all(step_ms(a) < step_ms(b) for a, b in zip(series, series[1:]) if a.run.offloaded < b.run.offloaded)


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_memory_lane_stride_2_is_missed(machine):
    """The break that the suite must see: memory that slows nobody makes stride 2 look much faster than it was."""
    free = replace(rates(machine), dram_bytes_per_s=1e13)
    row = next(r for r in rows() if r.machine == machine and r.is_fitted and r.run.stride == 2)
    seconds = predicted_step_seconds(row.run, free, BUILT_IN_PROFILES[machine])
    assert 1e3 * seconds < 0.85 * row.step


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(placed_cases())
def test_the_published_order_is_free_of_hazards(case):
    """With its waits written down the published order passes the check that our own plans pass."""
    for is_interleaved in (False, True):
        for is_flush_async in (False, True):
            check_plan(published_plan(case.placement, is_interleaved=is_interleaved, is_flush_async=is_flush_async))


def test_one_staging_set_and_a_waiting_host():
    """Each prefetch waits for the flush before it, and the CPU update after a GPU subgroup for that prefetch."""
    run = PublishedRun(numel=1200, subgroups=12, stride=3)
    plan = published_plan(run.placement, is_interleaved=True)
    at = {(op.kind, op.subgroup): index for index, op in enumerate(plan.ops)}
    for i in (5, 8):
        assert at[OpKind.FLUSH, i - 3] in plan.ops[at[OpKind.PREFETCH, i]].after
        assert at[OpKind.PREFETCH, i] in plan.ops[at[OpKind.UPDATE_CPU, i + 1]].after
    assert plan.num_slots == 1


def test_runs_that_no_memory_explains_are_refused():
    """A stride 2 below what the CPU alone takes ends with one sentence."""
    impossible = FitRuns(10**9, 8, plain=1.0, stride_2=0.01, stride_10=0.9, blocking_backward=2.0, async_backward=1.0)
    with pytest.raises(ValueError, match="no memory rate explains"):
        fit_rates(impossible, BUILT_IN_PROFILES["h100x4"])
