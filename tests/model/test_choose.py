"""The choice honors what is forced, fits what is limited, and is the best of what it may choose from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import Choice, choose_placement
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.plan.layout import ShardLayout, ShardSpec, build_layout
from deep_offload.plan.ops import Place
from deep_offload.plan.placement import place_by_share, place_by_stride
from tests.plan.strategies import placed_cases, profiles

H200 = BUILT_IN_PROFILES["h200"]
GIB = 1 << 30


def layout_of(num: int = 12, numel: int = 1 << 24, grad_bytes: int = 2, param_bytes: int = 2) -> ShardLayout:
    return build_layout([ShardSpec(num * numel, param_bytes, grad_bytes)], numel)


def choose(layout: ShardLayout, profile=H200, device=None, host=None, can_split=True, ranks=1, **settings) -> Choice:
    config = OffloadConfig(**{"interleaved_offload": True, **settings})
    return choose_placement(
        layout,
        config,
        profile,
        device_budget_bytes=device,
        host_limit_bytes=host,
        can_split=can_split,
        num_ranks=ranks,
    )


@pytest.mark.parametrize("share", [0.0, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
def test_forced_shares_and_residents(share, resident):
    """A given share and resident fraction are placed exactly as the placement functions do."""
    options = dict(offload_gpu_share=share, offload_resident_fraction=resident, offload_num_slots=4)
    choice = choose(layout_of(), **options)
    assert choice.placement == place_by_share(12, share, resident)
    assert choice.resident_fraction == resident and choice.num_slots == min(4, choice.placement.count(Place.GPU))


@pytest.mark.parametrize("stride", [1, 2, 3, 5, "none"])
def test_forced_strides(stride):
    """A given stride places every k-th subgroup on the GPU and is reported as given."""
    choice = choose(layout_of(), offload_stride=stride)
    assert choice.placement == place_by_stride(12, None if stride == "none" else stride)
    assert choice.stride == (None if stride == "none" else stride)
    assert "as asked" in choice.why


def test_the_best_of_all_shares():
    """With few subgroups no forced share is predicted to be faster than the automatic one."""
    layout = layout_of()
    best = choose(layout)
    for streamed in range(13):
        forced = choose(layout, offload_gpu_share=streamed / 12)
        assert best.predicted_iteration_seconds <= forced.predicted_iteration_seconds * (1 + 1e-9)
    assert 0.3 < best.gpu_share < 0.8 and best.binding_lane in best.lane_shares
    assert max(best.lane_shares.values()) == best.lane_shares[best.binding_lane] <= 1.001


def test_a_grid_finds_the_best_of_many():
    """With many subgroups the grid and its neighbors come within 2 % of the best of all shares."""
    layout = layout_of(60, 1 << 22)
    best = choose(layout)
    every = [choose(layout, offload_gpu_share=j / 60).predicted_iteration_seconds for j in range(0, 61, 2)]
    assert best.predicted_iteration_seconds <= 1.02 * min(every)


def test_slow_links_and_slow_cpus():
    """A link that is too slow leaves the CPU nearly everything, a CPU that is too slow the GPU everything."""
    slow = {name: 1e9 for name in H200.__dataclass_fields__ if name.startswith(("h2d_", "d2h_"))}
    assert choose(layout_of(), replace(H200, **slow)).gpu_share < 0.2
    lame = {name: 1e7 for name in H200.__dataclass_fields__ if name.startswith("cpu_adam")}
    assert choose(layout_of(), replace(H200, **lame)).gpu_share == 1.0


def test_master_and_wire():
    """Masters are split where parameters are bf16, and the wire is narrow where the gradient buffer is."""
    assert choose(layout_of()).split_master and choose(layout_of()).wire == "param"
    assert not choose(layout_of(), can_split=False).split_master
    assert not choose(layout_of(), offload_split_master="off").split_master
    assert choose(layout_of(grad_bytes=4)).wire == "fp32"
    assert choose(layout_of(), offload_grad_wire="fp32").wire == "fp32"
    slow_16 = replace(H200, cpu_adam_param_params_per_s=1e9, cpu_adam_param_busy_params_per_s=1e9)
    assert choose(layout_of(), slow_16).wire == "fp32"
    fp32 = choose(layout_of(param_bytes=4, grad_bytes=4), can_split=False)
    assert not fp32.split_master and fp32.wire == "fp32"


def test_no_offload():
    """Without --interleaved-offload all state is resident, streams nothing and needs no host memory."""
    choice = choose(layout_of(), interleaved_offload=False)
    assert choice.placement == (Place.RESIDENT,) * 12 and choice.host_bytes.total == 0
    assert choice.binding_lane == "gpu" and choice.device_bytes.slots == 0
    with pytest.raises(ValueError, match="add --interleaved-offload"):
        choose(layout_of(), interleaved_offload=False, device=1 << 20)


def test_an_empty_rank():
    """A rank without parameters has an empty placement and predicts no time."""
    choice = choose(build_layout([ShardSpec(0, 2, 2)], 1024))
    assert choice.placement == () and choice.predicted_update_seconds == 0.0 and choice.binding_lane == "none"


def test_residents_fill_the_device_budget():
    """With a device budget as many subgroups stay as fit beside the slots; all of them where all fit."""
    layout = layout_of()
    each = 10 * (1 << 24)
    choice = choose(layout, device=9 * each)
    assert choice.placement.count(Place.RESIDENT) == 5 and choice.device_bytes.total <= 9 * each
    assert choose(layout, device=12 * each).placement == (Place.RESIDENT,) * 12
    assert choose(layout, device=9 * each, offload_resident_fraction=0.25).placement.count(Place.RESIDENT) == 3
    assert choose(layout).placement.count(Place.RESIDENT) == 0


@settings(max_examples=40)
@given(placed_cases(), profiles(), st.integers(0, 120_000), st.booleans())
def test_budgets_hold(case, profile, device, split):
    """Whatever is chosen within a device budget takes no more than it; where nothing fits, a sentence says so."""
    try:
        choice = choose(case.layout, profile, device=device, can_split=split, offload_num_slots=case.num_slots)
    except ValueError as error:
        assert "GiB" in str(error) or " KiB" in str(error) or " B" in str(error) or "MiB" in str(error)
        return
    assert choice.device_bytes.total <= device
    assert len(choice.placement) == len(case.layout.subgroups)


def test_host_limits_move_state_to_the_gpu_path():
    """A host limit between the needs of CPU and streamed subgroups is met by streaming more."""
    layout = layout_of()
    free = choose(layout)
    limit = free.host_bytes.total - 1
    tight = choose(layout, host=limit)
    assert tight.host_bytes.total <= limit and tight.gpu_share > free.gpu_share


ERRORS = [
    (dict(host=1 << 20), r"needs 1\.88 GiB of host memory, but this rank has 1\.00 MiB: raise --offload-resident-frac"),
    (dict(host=1 << 20, offload_gpu_share=0.5), r"needs .* of host memory, .*--offload-host-budget-gib"),
    (
        dict(device=1 << 20, offload_gpu_share=0.5),
        r"4 staging slots for subgroups of 16777216 elements need .*lower --offload-subgroup-numel or --offload-num-sl",
    ),
    (dict(device=1 << 20, offload_subgroup_numel=1 << 24), r"staging slots .* but the device budget is 1\.00 MiB"),
    (
        dict(device=1 << 30, offload_resident_fraction=0.9, offload_gpu_share=0.5),
        r"exceed the device budget of 1\.00 GiB: lower --offload-resident-fraction",
    ),
    (dict(can_split=False, offload_split_master="on"), r"--offload-split-master on needs bf16 parameters"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_what_does_not_fit_is_told_with_numbers(options, message):
    """Each refusal names what is needed, what is there and the flag to change, in one sentence."""
    with pytest.raises(ValueError, match=message) as error:
        choose(layout_of(), **options)
    assert "\n" not in str(error.value) and ". " not in str(error.value)


def test_narrow_wire_needs_a_narrow_buffer():
    """The wire `param` over an fp32 gradient buffer would round and is refused."""
    with pytest.raises(ValueError, match="--offload-grad-wire param .* the buffer is fp32"):
        choose(layout_of(grad_bytes=4), offload_grad_wire="param")


def test_no_room_for_slots_falls_back_to_the_cpu():
    """Where nothing is forced and no slots fit, all is updated on the CPU and the reason is given."""
    choice = choose(layout_of(), device=1 << 20)
    assert choice.gpu_share == 0.0 and "holds no staging slots" in choice.why
