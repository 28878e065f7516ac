"""Automatic residents: the budget rule, what a dry run makes of it, and who may stay after a measured peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_offload.config import OffloadConfig
from deep_offload.model.cost import StateFormat
from deep_offload.model.dry_run import dry_run_report, forecast
from deep_offload.model.gpt import NAMED_SHAPES, ParallelShape
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.memory import device_state_bytes
from deep_offload.model.residency import (
    GPU_MEMORY_SHARE,
    choose_with_residents,
    is_automatic,
    num_residents_that_fit,
    state_budget_bytes,
    working_bytes,
)
from deep_offload.model.run import ModelBytes, model_bytes
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Place
from deep_offload.plan.placement import place_by_share
from tests.model.run_cases import single_gpu_run

GIB = 1 << 30
H200 = BUILT_IN_PROFILES["h200"]
AUTO = OffloadConfig(interleaved_offload=True)
LAYOUT = build_layout([ShardSpec(16 << 20, 2, 2)], 1 << 20)
SPLIT = StateFormat(True, "param")
SUBGROUP = 10 << 20
"""Bytes of one subgroup's state on the device: two moments and 16 bits of the master."""


@pytest.mark.parametrize(
    ("free", "total", "estimate", "expected"),
    [
        (100 * GIB, 100 * GIB, 0, 95 * GIB),
        (80 * GIB, 100 * GIB, 20 * GIB, 53 * GIB),  # 80 - 5 - 1.1 x 20
        (10 * GIB, 100 * GIB, 5 * GIB, 0),
        (3 * GIB, 100 * GIB, 0, 0),
        (80 * GIB, 100 * GIB, None, 0),
        (0, 0, 1, 0),
    ],
)
def test_the_budget_rule(free, total, estimate, expected):
    """Free memory, less 5 % of the GPU, less 1.1 times the estimate; nothing where nobody knows an estimate."""
    assert state_budget_bytes(free, total, estimate) == pytest.approx(expected, abs=1)


def test_only_what_is_estimated_gets_a_margin():
    """Weights and gradients are counted exactly; the margin is on activations, logits and temporary tensors."""
    given = dict(weights=1000, gradients=2000, activations=30)
    assert working_bytes(ModelBytes(**given, recomputed=20, head=5, working=7)) == 37
    assert working_bytes(ModelBytes(**given, recomputed=20, head=29, working=7)) == 39


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"offload_resident_fraction": 0.0}, False),
        ({"offload_device_budget_gib": 4.0}, False),
        ({"interleaved_offload": False}, False),
        ({"offload_gpu_share": 0.5}, True),
    ],
)
def test_when_the_number_is_ours_to_find(changes, expected):
    """A fraction or a budget that is given is kept."""
    assert is_automatic(replace(AUTO, **changes)) is expected


@pytest.mark.parametrize(
    ("budget", "residents"),
    [
        (0, 0),
        (4 * SUBGROUP, 0),  # slots take it all
        (7 * SUBGROUP, 3),
        (16 * SUBGROUP - 1, 11),
        (16 * SUBGROUP, 16),
        (1000 * SUBGROUP, 16),
    ],
)
def test_as_many_as_the_budget_holds(budget, residents):
    """None, some beside the slots, or all."""
    config = replace(AUTO, offload_num_slots=4)
    choice = choose_with_residents(LAYOUT, config, H200, budget, device_budget_bytes=None, can_split=True)
    assert sum(place is Place.RESIDENT for place in choice.placement) == residents
    assert not residents or choice.device_bytes.total <= budget


def test_a_budget_too_small_for_slots_does_not_forbid_streaming():
    """The estimate may be too large: state is then placed as with nothing resident, subgroup size given or not."""
    for numel in ("auto", 1 << 20):
        config = replace(AUTO, offload_subgroup_numel=numel, offload_num_slots=4)
        small = choose_with_residents(LAYOUT, config, H200, SUBGROUP // 2, device_budget_bytes=GIB, can_split=True)
        nothing = replace(config, offload_resident_fraction=0.0)
        assert small == choose_with_residents(LAYOUT, nothing, H200, GIB, device_budget_bytes=GIB, can_split=True)
        assert small.gpu_share > 0


def test_what_does_not_fit_the_host_is_still_refused():
    """A host limit that no placement meets is a ValueError with the flag to change, whatever the budget."""
    for budget in (0, 5 * SUBGROUP):
        with pytest.raises(ValueError, match="--offload-host-budget-gib"):
            choose_with_residents(LAYOUT, AUTO, H200, budget, device_budget_bytes=None, host_limit_bytes=1000)


@pytest.mark.parametrize(
    ("name", "data", "kind"), [("7b", 1, "all"), ("20b", 1, "some"), ("20b", 4, "all"), ("13b", 1, "some")]
)
def test_the_dry_run_follows_the_rule(name, data, kind):
    """A dry run places as the rule says for the profile's GPU, fits, and says how many stay."""
    run = replace(single_gpu_run(NAMED_SHAPES[name]), parallel=ParallelShape(data=data), global_batch_size=data)
    profile = replace(H200, num_gpus=data)
    stage = forecast(run, AUTO, profile).stages[0]
    model, total = model_bytes(run), profile.gpu_memory_bytes
    budget = state_budget_bytes(total - model.weights - model.gradients, total, working_bytes(model))
    expected = int(GPU_MEMORY_SHARE * total - model.weights - model.gradients - 1.1 * working_bytes(model))
    assert budget == pytest.approx(expected, abs=2)
    used = stage.choice.device_bytes
    assert used.total <= budget
    if kind == "all":
        assert stage.choice.resident_fraction == 1 and stage.host_bytes == 0
    else:
        assert 0 < stage.choice.resident_fraction < 1
        largest = device_state_bytes(stage.layout, (Place.RESIDENT,) * len(stage.layout.subgroups), SPLIT, 0).resident
        assert used.total + 2 * largest / len(stage.layout.subgroups) > budget  # no more would have fit
    report = dry_run_report(run, AUTO, profile)
    count = sum(place is Place.RESIDENT for place in stage.choice.placement)
    assert report.fits and any(f"{count} resident" in line for line in report.lines)


def test_a_profile_without_a_gpu_keeps_nothing():
    """Where a GPU's memory is not known nothing is resident, as in a run without one."""
    profile = replace(H200, gpu_memory_bytes=0)
    assert forecast(single_gpu_run(NAMED_SHAPES["7b"]), AUTO, profile).stages[0].choice.resident_fraction == 0


SHARE_HALF = place_by_share(16, 0.5)


@pytest.mark.parametrize(
    ("headroom", "residents"),
    [
        (-1, 2),
        (SUBGROUP - 1, 2),
        (SUBGROUP, 3),
        (5 * SUBGROUP, 7),
        # 14 more in place of 4 slots; 12 more in place of 3
        (10 * SUBGROUP - 1, 14),
        (10 * SUBGROUP, 16),
        (100 * SUBGROUP, 16),
    ],
)
def test_who_may_stay_after_the_peak(headroom, residents):
    """As many as the room that was left at the peak holds; slots that are no longer needed make room."""
    placement = (Place.RESIDENT,) * 2 + SHARE_HALF[2:]
    assert num_residents_that_fit(LAYOUT, placement, SPLIT, 4, headroom) == residents


def test_the_upcast_buffer_makes_room():
    """With gradients upcast on the device, the last CPU-updated subgroup gives back the buffer too."""
    state = StateFormat(True, "fp32")
    placement = (Place.RESIDENT,) * 15 + (Place.CPU,)
    upcast = device_state_bytes(LAYOUT, placement, state, 4).upcast
    assert upcast == 4 << 20
    need = SUBGROUP - upcast
    assert num_residents_that_fit(LAYOUT, placement, state, 4, need) == 16
    assert num_residents_that_fit(LAYOUT, placement, state, 4, need - 1) == 15
