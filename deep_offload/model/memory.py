"""Bytes of optimizer state on host and device, before anything is allocated. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from deep_offload.model.cost import StateFormat
from deep_offload.plan.layout import ShardLayout, Subgroup
from deep_offload.plan.ops import Place, Placement
from deep_offload.plan.storage import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    MASTER,
    WEIGHT_OUT,
    host_fields,
    page_rounded,
    state_fields,
)

DEVICE_ALIGNMENT_BYTES = 512
"""Device arrays take multiples of this, as torch's allocator hands them out."""

UPCAST_STAGING_NUMEL = 1 << 25
"""Elements of the fp32 buffer through which 16-bit gradients become fp32 before they leave the device. The link idles
while a piece is cast: half as many elements cost it 1 % of its rate on an H200. (A kernel that casts straight into
pinned memory is 2 % slower than cast and copy.)"""


PROCESS_HOST_BYTES = int(1.8 * (1 << 30))
"""Host bytes of a rank's process, with torch and the CUDA context: the 1.8 GiB peak of runs without offload on an H200
(docs/performance.md, "Iteration of a 3.48 B model"), as much as peaks of offloading runs lie above their state. NCCL's
buffers and large tokenizers are not in it. Not held against a profile's host memory, which was measured by such a
process: it is the limit less what was in use."""

SAVE_HOST_BYTES = 1 << 30
"""Host bytes that a save adds: at most 8 boxes of 128 MiB (tests/checkpoint/test_memory.py). A whole fine-tuning of 7 B
with saves took 2.35 GiB beside its state, process and save together."""


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
        return sum(page_rounded(size) for size in self.arrays)


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
    reserve: int = 0
    """What streamed subgroups own beyond that, so that the CPU may update them later; whole pages."""

    @property
    def total(self) -> int:
        return self.state + self.grad + self.weight + self.rounding + self.reserve

    @property
    def state(self) -> int:
        """Master and moments."""
        return self.master + self.exp_avg + self.exp_avg_sq


def host_state_bytes(
    layout: ShardLayout, placement: Placement, state: StateFormat, reserved: Collection[int] = ()
) -> HostBytes:
    """Host bytes of every subgroup: exactly what the pinned arena holds. Residents take none.

    reserved: streamed subgroups that own what the CPU's update takes.
    """
    subgroups = tuple(_host_bytes(s, place, state) for s, place in zip(layout.subgroups, placement))
    kinds = [sum(column) for column in zip(*(s.arrays for s in subgroups))] or [0] * 5
    at_most = [_host_bytes(layout.subgroups[i], Place.CPU, state).total - subgroups[i].total for i in reserved]
    return HostBytes(subgroups, *kinds, sum(s.total for s in subgroups) - sum(kinds), sum(at_most))


def _host_bytes(subgroup: Subgroup, place: Place, state: StateFormat) -> SubgroupHostBytes:
    fields = host_fields(place, subgroup, state.split_master, state.wire_bytes_per_param(subgroup))
    sizes = {field.name: field.itemsize * subgroup.numel for field in fields}
    names = (MASTER, EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT_OUT)
    return SubgroupHostBytes(subgroup.index, *(sizes.get(name, 0) for name in names))


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Device bytes of one rank's optimizer state, without weights and gradient buffers.

    resident: state of subgroups that stay; slots: staging slots; upcast: the buffer in which 16-bit gradients become
    fp32 before they leave the device.
    """

    resident: int
    slots: int
    upcast: int

    @property
    def total(self) -> int:
        return self.resident + self.slots + self.upcast


def device_state_bytes(layout: ShardLayout, placement: Placement, state: StateFormat, num_slots: int) -> DeviceBytes:
    """Device bytes of residents, of the staging slots in use and of the upcast buffer."""
    placed = list(zip(layout.subgroups, placement))
    streamed = [s for s, place in placed if place is Place.GPU]
    needs_upcast = any(place is Place.CPU and state.needs_upcast(s) for s, place in placed)
    upcast = 4 * min(UPCAST_STAGING_NUMEL, layout.max_subgroup_numel) if needs_upcast else 0
    return DeviceBytes(
        sum(resident_bytes(s, state) for s, place in placed if place is Place.RESIDENT),
        min(num_slots, len(streamed)) * slot_bytes(streamed, state),
        _device_rounded(upcast),
    )


def slot_bytes(streamed: Iterable[Subgroup], state: StateFormat) -> int:
    """Bytes of one staging slot: each of its arrays is as large as the largest of any streamed subgroup."""
    largest: dict[str, int] = {}
    for subgroup in streamed:
        for field in state_fields(state.storage_of(subgroup, Place.GPU)):
            largest[field.name] = max(largest.get(field.name, 0), field.itemsize * subgroup.numel)
    return sum(_device_rounded(size) for size in largest.values())


def resident_bytes(subgroup: Subgroup, state: StateFormat) -> int:
    """Device bytes of a subgroup's state while it stays there."""
    fields = state_fields(state.storage_of(subgroup, Place.RESIDENT))
    return sum(_device_rounded(field.itemsize * subgroup.numel) for field in fields)


def _device_rounded(num_bytes: int) -> int:
    return -(-num_bytes // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES


def format_bytes(num_bytes: float) -> str:
    """Bytes for people: 12.3 GiB, 4.5 MiB, 678 B."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
