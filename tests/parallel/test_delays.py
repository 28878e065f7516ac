"""Slow lanes and slow collectives change no bit; a wait that is left out does."""

from __future__ import annotations

import pytest

from tests.parallel.delay_cases import (
    COLLECTIVES,
    LANES,
    delayed,
    waiting_twice,
    watching_gathers,
    watching_waits,
    with_copying_gathers,
    without_waiting_for_collectives,
    without_waiting_for_params,
)
from tests.parallel.parallel_cases import run_all

FLAGS = "--bf16 --global-batch-size 4 --overlap-grad-reduce --overlap-param-gather --offload-num-slots 2"
PLACE = "--offload-resident-fraction 0.2 --offload-gpu-share 0.5"
LAYOUT = "pp2 dp2"


@pytest.fixture(scope="module")
def want(train):
    """Of the all-resident run."""
    return train(LAYOUT, [f"{FLAGS} --offload-resident-fraction 1"])[0]


@pytest.mark.parametrize("what", LANES + COLLECTIVES)
def test_a_delay_changes_no_bit(train, want, what):
    """Each kind of op in turn sleeps, another time on each rank."""
    (got,) = train(LAYOUT, [f"{FLAGS} {PLACE}"], delayed, what, 0.004 if what in LANES else 0.02)
    assert got[-1].losses == want[-1].losses
    assert got[0].digest == want[0].digest


@pytest.mark.parametrize("mutation", [without_waiting_for_collectives, without_waiting_for_params, waiting_twice])
def test_mutation_a_wait_left_out(train, want, mutation):
    """A gradient flushed before its reduction has ended or reduced anew later, and old weights gathered: noticed."""
    # Without streaming nothing else makes the loop wait for uploads.
    place = "--offload-resident-fraction 0 --offload-gpu-share 0"
    (got,) = train(LAYOUT, [f"{FLAGS} {place}"], mutation)
    assert got[0].digest != want[0].digest


def test_forward_waits_per_bucket_group(train):
    """With --overlap-param-gather a gather starts when its own subgroups are in place, in forward order."""
    (got,) = train("dp2", [f"{FLAGS} {PLACE}"], watching_gathers)
    for outcome in got:
        counts = [count for count, _ in outcome.notes]
        total = outcome.num_subgroups
        first = counts[: counts.index(total) + 1]
        assert len(first) == outcome.num_buckets
        assert first == sorted(first) and first[0] < total // 2


@pytest.mark.parametrize(
    ("layout", "flags", "in_passes"),
    [("one", "", True), ("dp2", "", False), ("dp2", "--overlap-grad-reduce --overlap-param-gather", True)],
)
def test_the_optimizer_says_where_it_waits(train, layout, flags, in_passes):
    """Inside forward passes, whose timer then counts the wait, or before the first one; the end is outside."""
    (got,) = train(layout, [f"--bf16 --global-batch-size 4 {PLACE} {flags}"], watching_waits)
    for outcome in got:
        assert outcome.notes == [in_passes, in_passes, in_passes, False]


def test_one_data_parallel_rank_gathers_nothing(train):
    """With --overlap-param-gather, and weights in place one after the other: no copy of old ones over new ones."""
    place = "--offload-resident-fraction 0 --offload-gpu-share 0"
    (want,) = train("pp2", [f"{FLAGS} --offload-resident-fraction 1"])
    (got,) = train("pp2", [f"{FLAGS} {place}"], with_copying_gathers)
    assert (got[0].digest, got[-1].losses) == (want[0].digest, want[-1].losses)


def test_the_healthy_run_has_the_digest(train, want):
    """What the mutations are compared with."""
    (got,) = train(LAYOUT, [f"{FLAGS} {PLACE}"], run_all)
    assert got[0].digest == want[0].digest
