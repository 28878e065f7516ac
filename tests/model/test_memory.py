"""Predicted bytes against the arrays that the runtime really makes, and against tensors that layers really save."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_offload.model.cost import StateFormat
from deep_offload.model.memory import device_state_bytes, format_bytes, host_state_bytes
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Place
from tests.plan.strategies import placed_cases, state_formats

torch = pytest.importorskip("torch")


@settings(max_examples=40)
@given(placed_cases(), state_formats, st.booleans())
def test_host_bytes_are_the_arena_s(case, state, reserves):
    """The total, page rounding included, is what the runtime's arena holds for the same placement."""
    from deep_offload.runtime.state import DeviceState, HostState, StatePlan

    if any(s.param_bytes == 4 and s.grad_bytes == 2 for s in case.layout.shards):
        return  # no such buffers exist: gradients are fp32 or of the parameter's type
    wire = torch.bfloat16 if state.wire == "param" else torch.float32
    dtypes = tuple(torch.bfloat16 if s.param_bytes == 2 else torch.float32 for s in case.layout.shards)
    reserved = frozenset(i for i, place in enumerate(case.placement) if reserves and place is Place.GPU and i % 2)
    plan = StatePlan(case.layout, case.placement, state.split_master, wire, dtypes, reserved)
    host = HostState(plan, pin=False, num_threads=1, warn=pytest.fail)
    try:
        counted = host_state_bytes(case.layout, case.placement, state, reserved)
        assert counted.total == host.num_bytes and (counted.reserve > 0) == bool(reserved)
        assert counted.total - counted.reserve == host_state_bytes(case.layout, case.placement, state).total
    finally:
        host.close()
    device = DeviceState(plan, case.num_slots, torch.device("cpu"))
    predicted = device_state_bytes(case.layout, case.placement, state, case.num_slots)
    arrays = sum(len(a) for a in (*device.resident, *device.slots))
    assert 0 <= predicted.resident + predicted.slots - device.num_bytes < 512 * arrays + 1
    upcast = 0 if device.upcast is None else device.upcast.nbytes
    assert 0 <= predicted.upcast - upcast < 512 and bool(predicted.upcast) == bool(upcast)


@pytest.mark.parametrize(
    ("place", "param_bytes", "grad_bytes", "state", "per_param"),
    [
        (Place.CPU, 2, 2, StateFormat(wire="param"), 14),
        (Place.CPU, 2, 2, StateFormat(wire="fp32"), 18),
        (Place.CPU, 2, 4, StateFormat(wire="fp32"), 18),
        (Place.CPU, 2, 2, StateFormat(True, "param"), 14),
        (Place.CPU, 4, 4, StateFormat(wire="fp32"), 16),
        (Place.GPU, 2, 2, StateFormat(wire="param"), 12),
        (Place.GPU, 2, 2, StateFormat(True, "param"), 10),
        (Place.GPU, 4, 4, StateFormat(True, "fp32"), 8),
        (Place.RESIDENT, 2, 2, StateFormat(True, "param"), 0),
    ],
)
def test_host_bytes_per_parameter(place, param_bytes, grad_bytes, state, per_param):
    """Host bytes of one parameter by place, types, wire and storage are those of the design."""
    layout = build_layout([ShardSpec(4096, param_bytes, grad_bytes)], 4096)
    host = host_state_bytes(layout, (place,), state)
    assert host.total == per_param * 4096 and host.rounding == 0
    assert host.state == host.master + host.exp_avg + host.exp_avg_sq


@given(st.integers(1, 8))
def test_slots_in_use(num_slots):
    """No more slots are made than subgroups are streamed, and residents need none."""
    layout = build_layout([ShardSpec(4 * 1024, 2, 2)], 1024)
    state = StateFormat(True, "param")
    streamed = device_state_bytes(layout, (Place.GPU, Place.CPU, Place.GPU, Place.GPU), state, num_slots)
    assert streamed.slots == min(3, num_slots) * 10 * 1024 and streamed.upcast == 0
    assert device_state_bytes(layout, (Place.RESIDENT,) * 4, state, num_slots).total == 4 * 10 * 1024
    widened = device_state_bytes(layout, (Place.CPU,) * 4, StateFormat(), num_slots)
    assert widened.upcast == 4 * 1024 and widened.slots == 0


def test_bytes_for_people():
    """Sizes are printed in the unit that fits."""
    assert [format_bytes(n) for n in (5, 1536, 3 << 20, 5 << 30)] == ["5 B", "1.50 KiB", "3.00 MiB", "5.00 GiB"]
