"""Bytes of optimizer state on host and device, before anything is allocated. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deep_offload.model.cost import StateFormat, state_bytes_per_param
from deep_offload.plan.layout import MOMENTS_BYTES_PER_PARAM, ShardLayout, Subgroup
from deep_offload.plan.ops import Place, Placement

PAGE_BYTES = 4096
"""Host arrays start at page borders, so that each can be first touched by the threads that use it."""

DEVICE_ALIGNMENT_BYTES = 512
"""Device arrays start at multiples of this, as torch's allocator hands them out."""


def round_up(num_bytes: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `num_bytes`."""
    return -(-num_bytes // multiple) * multiple


@dataclass(frozen=True, slots=True)
class SubgroupHostBytes:
    """Exact bytes of one subgroup's host arrays; 0 where it has none.

    weight: outgoing 16-bit weights of the CPU update. With 16-bit gradients on the wire they are written over the
    gradient, and with fp32 parameters the master itself goes up: both need no array of their own.
    """

    index: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    weight: int

    @property
    def arrays(self) -> tuple[int, int, int, int, int]:
        return self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.weight

    @property
    def total(self) -> int:
        """Bytes in the arena: every array takes whole pages."""
        return sum(round_up(size, PAGE_BYTES) for size in self.arrays)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host bytes of one rank's optimizer state, by subgroup and by kind."""

    subgroups: tuple[SubgroupHostBytes, ...]
    master: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    weight: int
    rounding: int
    """What whole pages add to the arrays."""

    @property
    def total(self) -> int:
        return self.master + self.exp_avg + self.exp_avg_sq + self.grad + self.weight + self.rounding

    @property
    def state(self) -> int:
        """Master and moments."""
        return self.master + self.exp_avg + self.exp_avg_sq


def host_state_bytes(layout: ShardLayout, placement: Placement, state: StateFormat) -> HostBytes:
    """Host bytes of every subgroup: exactly what the pinned arena holds. Residents take none."""
    subgroups = tuple(_host_bytes(s, place, state) for s, place in zip(layout.subgroups, placement))
    kinds = [sum(column) for column in zip(*(s.arrays for s in subgroups))] or [0] * 5
    return HostBytes(subgroups, *kinds, rounding=sum(s.total for s in subgroups) - sum(kinds))


def _host_bytes(subgroup: Subgroup, place: Place, state: StateFormat) -> SubgroupHostBytes:
    if place is Place.RESIDENT:
        return SubgroupHostBytes(subgroup.index, 0, 0, 0, 0, 0)
    n = subgroup.numel
    master = state.storage_of(subgroup, place).bytes_per_param * n
    moment = MOMENTS_BYTES_PER_PARAM // 2 * n
    grad = weight = 0
    if place is Place.CPU:
        grad = state.wire_bytes_per_param(subgroup) * n
        has_own_weight = subgroup.param_bytes < 4 and state.wire_bytes_per_param(subgroup) != subgroup.param_bytes
        weight = subgroup.param_bytes * n if has_own_weight else 0
    return SubgroupHostBytes(subgroup.index, master, moment, moment, grad, weight)


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Device bytes of one rank's optimizer state, without weights and gradient buffers.

    resident: state of subgroups that stay; slots: staging slots; upcast: buffers in which 16-bit gradients become
    fp32 before they leave the device.
    """

    resident: int
    slots: int
    upcast: int

    @property
    def total(self) -> int:
        return self.resident + self.slots + self.upcast


def device_state_bytes(
    layout: ShardLayout, placement: Placement, state: StateFormat, num_slots: int, num_upcast_buffers: int = 0
) -> DeviceBytes:
    """Device bytes of residents, of the staging slots in use and of `num_upcast_buffers` upcast buffers."""
    placed = list(zip(layout.subgroups, placement))
    resident = sum(_device_state_bytes(s, Place.RESIDENT, state) for s, place in placed if place is Place.RESIDENT)
    upcast = max((4 * s.numel for s, place in placed if place is Place.CPU and state.needs_upcast(s)), default=0)
    streamed = [s for s, place in placed if place is Place.GPU]
    return DeviceBytes(
        resident,
        min(num_slots, len(streamed)) * slot_bytes(streamed, state),
        num_upcast_buffers * round_up(upcast, DEVICE_ALIGNMENT_BYTES),
    )


def slot_bytes(streamed: Iterable[Subgroup], state: StateFormat) -> int:
    """Bytes of one staging slot: the largest streamed subgroup fits."""
    return max((_device_state_bytes(s, Place.GPU, state) for s in streamed), default=0)


def resident_bytes(subgroup: Subgroup, state: StateFormat) -> int:
    """Device bytes of a subgroup's state while it stays there."""
    return _device_state_bytes(subgroup, Place.RESIDENT, state)


def _device_state_bytes(subgroup: Subgroup, place: Place, state: StateFormat) -> int:
    storage = state.storage_of(subgroup, place)
    arrays = (storage.bytes_per_param, MOMENTS_BYTES_PER_PARAM // 2, MOMENTS_BYTES_PER_PARAM // 2)
    total = sum(round_up(size * subgroup.numel, DEVICE_ALIGNMENT_BYTES) for size in arrays)
    assert total >= state_bytes_per_param(storage) * subgroup.numel
    return total


def format_bytes(num_bytes: float) -> str:
    """Bytes for people: 12.3 GiB, 4.5 MiB, 678 B."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
