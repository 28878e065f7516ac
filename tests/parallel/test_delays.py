"""Slow lanes and slow collectives change no bit; a wait that is left out does."""

from __future__ import annotations

import pytest

from tests.parallel.delay_cases import COLLECTIVES, LANES, delayed, waiting_twice, without_waiting_for_collectives
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


@pytest.mark.parametrize("mutation", [without_waiting_for_collectives, waiting_twice])
def test_mutation_a_wait_left_out(train, want, mutation):
    """Flushing a gradient before its reduction has ended, or reducing it anew after others changed it, is noticed."""
    (got,) = train(LAYOUT, [f"{FLAGS} {PLACE}"], mutation)
    assert got[0].digest != want[0].digest


def test_the_healthy_run_has_the_digest(train, want):
    """What the mutations are compared with."""
    (got,) = train(LAYOUT, [f"{FLAGS} {PLACE}"], run_all)
    assert got[0].digest == want[0].digest
