"""The reserve for a lower share, and moves to a share that corrected rates make faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_offload.config import OffloadConfig
from deep_offload.model import moves
from deep_offload.model.choose import Compute, choose_placement
from deep_offload.model.cost import StateFormat, op_seconds
from deep_offload.model.dry_run import dry_run_report, forecast
from deep_offload.model.gpt import NAMED_SHAPES
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.memory import format_bytes, host_state_bytes
from deep_offload.model.moves import LEAST_GAIN, best_move
from deep_offload.model.trace import Expectation
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Place
from deep_offload.plan.placement import gpu_share_of, place_by_share
from deep_offload.plan.planner import build_plan
from tests.model.run_cases import single_gpu_run

H200 = BUILT_IN_PROFILES["h200"]
LAYOUT = build_layout([ShardSpec(1 << 26, 2, 2)] * 48, 1 << 26)
SMALL = build_layout([ShardSpec(1 << 26, 2, 2)] * 16, 1 << 26)
STATE = StateFormat(True, "param")
AUTO = OffloadConfig(interleaved_offload=True, offload_resident_fraction=0.0, offload_num_slots=4)


def choose(config=AUTO, profile=H200, **options):
    return choose_placement(LAYOUT, config, profile, can_split=True, may_move=True, **options)


def test_an_eighth_is_reserved_and_counted():
    """Streamed subgroups, spread over the update, own the CPU's 14 bytes a parameter instead of 10."""
    choice = choose()
    assert len(choice.reserved) == 6 and all(choice.placement[i] is Place.GPU for i in choice.reserved)
    assert choice.host_bytes.reserve == 6 * 4 * (1 << 26)
    without = choose_placement(LAYOUT, AUTO, H200, can_split=True)
    assert without.placement == choice.placement and without.reserved == frozenset()
    assert choice.host_bytes.total == without.host_bytes.total + choice.host_bytes.reserve


@pytest.mark.parametrize(
    ("config", "profile"),
    [
        (replace(AUTO, offload_gpu_share=0.5), H200),
        (replace(AUTO, offload_stride=2), H200),
        (AUTO, replace(H200, num_gpus=0)),
        (replace(AUTO, interleaved_offload=False), H200),
    ],
    ids=["share", "stride", "no GPU", "no offload"],
)
def test_nothing_is_reserved(config, profile):
    """Given shares and machines without a GPU never move."""
    choice = choose(config, profile)
    assert choice.reserved == frozenset() and choice.host_bytes.reserve == 0


def test_a_reserve_never_presses_on_the_limit():
    """It is taken whole within 90 % of the host's limit, else not at all; the placement is the same."""
    free = choose()
    for limit, is_there in ((free.host_bytes.total / 0.9 + 1, True), (free.host_bytes.total / 0.9 - 9, False)):
        choice = choose(host_limit_bytes=int(limit))
        assert choice.placement == free.placement and bool(choice.reserved) == is_there


def test_the_dry_run_names_it():
    """The line of host bytes has the reserve, which its total holds."""
    run = single_gpu_run(NAMED_SHAPES["7b"])
    stage = forecast(run, AUTO, H200).stages[0]
    host = stage.choice.host_bytes
    (line,) = [line for line in dry_run_report(run, AUTO, H200).lines if "host bytes of a rank" in line]
    assert host.reserve > 0 and f"reserve for a lower GPU share {format_bytes(host.reserve)}" in line
    assert f"host bytes of a rank: {format_bytes(host.total)} " in line
    plain = host_state_bytes(stage.layout, stage.choice.placement, stage.choice.state)
    assert host.total == plain.total + host.reserve


def expectation(share, profile=H200, layout=LAYOUT):
    placement = place_by_share(len(layout.subgroups), share)
    return Expectation(
        build_plan(layout, placement, 4, op_seconds(layout, STATE, profile)), layout, STATE, profile, 1, 1.0, "cpu"
    )


def move(expected, movable=None, can_move=lambda _placement: True, backward=0.1):
    movable = list(range(len(expected.layout.subgroups))) if movable is None else movable
    return best_move(expected, Compute(0.0, backward), movable, 4, (), can_move)


@pytest.mark.parametrize("layout", [LAYOUT, SMALL], ids=["steps", "all"])
@pytest.mark.parametrize("share", [0.25, 0.95])
def test_moves_to_a_better_share(share, layout):
    """From too little and too much on the GPU to what the choice at start would take."""
    best = choose_placement(layout, AUTO, H200, can_split=True).gpu_share
    found = move(expectation(share, layout=layout))
    assert found is not None and abs(gpu_share_of(found) - best) <= 1 / 8


def test_small_gains_move_nothing(monkeypatch):
    """At the best share all stays; a gain below 3 % of the iteration, compute included, is none."""
    placed = expectation(choose().gpu_share)
    assert move(placed) is None
    low = expectation(0.45)
    assert move(low) is not None and move(low, backward=20.0) is None
    monkeypatch.setattr(moves, "LEAST_GAIN", 0.9)
    assert LEAST_GAIN == 0.03 and move(low) is None


def test_only_allowed_placements_are_candidates():
    """Movable subgroups alone are on the CPU; what memory does not allow is not taken."""
    low, high = expectation(0.4), expectation(0.95)
    on_cpu = [i for i, place in enumerate(low.plan.placement) if place is Place.CPU]
    found = move(low, on_cpu)
    assert found is not None and all(i in on_cpu for i, place in enumerate(found) if place is Place.CPU)
    assert move(high, [i for i, place in enumerate(high.plan.placement) if place is Place.CPU]) is None
    assert move(low, can_move=lambda _placement: False) is None
