"""What one operation of a plan costs: bytes over the link, host memory traffic, seconds. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from deep_offload.model.hardware import HardwareProfile
from deep_offload.plan.layout import MasterStorage, ShardLayout, Subgroup
from deep_offload.plan.ops import OpKind, Place
from deep_offload.plan.planner import OpSeconds
from deep_offload.plan.storage import state_fields, storage_of

Wire = Literal["fp32", "param"]


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How optimizer state is kept and gradients travel; both change speed and bytes, never bits.

    split_master: the GPU's bf16 subgroups keep only the low 16 bits of their master (`plan.storage.storage_of`).
    wire: type in which gradients reach the host: fp32, or that of the gradient buffer.
    """

    split_master: bool = False
    wire: Wire = "fp32"

    def storage_of(self, subgroup: Subgroup, place: Place) -> MasterStorage:
        """How the master of this subgroup is kept at this place."""
        return storage_of(place, subgroup, self.split_master)

    def wire_bytes_per_param(self, subgroup: Subgroup) -> int:
        """Bytes of one gradient element on its way to the host and in its host buffer."""
        return subgroup.grad_bytes if self.wire == "param" else 4

    def needs_upcast(self, subgroup: Subgroup) -> bool:
        """Gradients are widened to fp32 on the device before they leave it."""
        return self.wire_bytes_per_param(subgroup) != subgroup.grad_bytes


@cache
def state_bytes_per_param(storage: MasterStorage) -> int:
    """Bytes of master and moments: what a prefetch or a flush moves for one parameter."""
    return sum(field.itemsize for field in state_fields(storage))


@dataclass(frozen=True, slots=True)
class OpCost:
    """link_bytes: over the link, 0 for updates; dram_bytes: host memory reads and writes; seconds: time on its lane."""

    link_bytes: int
    dram_bytes: int
    seconds: float


_FREE = OpCost(0, 0, 0.0)


def link_bytes(kind: OpKind, subgroup: Subgroup, state: StateFormat) -> int:
    """Bytes that an operation moves over the link; 0 for updates and external operations."""
    match kind:
        case OpKind.PREFETCH | OpKind.FLUSH:
            per_param = state_bytes_per_param(state.storage_of(subgroup, Place.GPU))
        case OpKind.GRAD_FLUSH:
            per_param = state.wire_bytes_per_param(subgroup)
        case OpKind.PARAM_H2D:
            per_param = subgroup.param_bytes
        case _:
            per_param = 0
    return per_param * subgroup.numel


def dram_bytes(kind: OpKind, subgroup: Subgroup, state: StateFormat) -> int:
    """Host memory traffic of an operation, reads plus writes. A copy over the link touches each byte once.

    The CPU update reads master, moments and gradient and writes master, moments and the 16-bit weight.
    """
    if kind is not OpKind.UPDATE_CPU:
        return link_bytes(kind, subgroup, state)
    weight = subgroup.param_bytes if subgroup.param_bytes < 4 else 0  # an fp32 weight is the master itself
    full = state_bytes_per_param(MasterStorage.FULL)
    return (2 * full + state.wire_bytes_per_param(subgroup) + weight) * subgroup.numel


def op_cost(
    kind: OpKind, subgroup: Subgroup, state: StateFormat, profile: HardwareProfile, *, busy: bool = False
) -> OpCost:
    """Bytes and seconds of one operation.

    busy: with the rates that hold while the other lanes work, instead of the lane's own alone.
    """
    moved = link_bytes(kind, subgroup, state)
    traffic = dram_bytes(kind, subgroup, state)
    match kind:
        case OpKind.PREFETCH | OpKind.PARAM_H2D:
            seconds = moved / (profile.h2d_busy_bytes_per_s if busy else profile.h2d_bytes_per_s)
        case OpKind.FLUSH | OpKind.GRAD_FLUSH:
            seconds = moved / (profile.d2h_busy_bytes_per_s if busy else profile.d2h_bytes_per_s)
            if kind is OpKind.GRAD_FLUSH and state.needs_upcast(subgroup):
                # Piece by piece through one buffer: the cast and the copy of a piece take turns.
                seconds += subgroup.numel / profile.gpu_upcast_params_per_s
        case OpKind.UPDATE_CPU:
            seconds = subgroup.numel / profile.cpu_adam_params_per_s(_cpu_wire(subgroup, state), busy=busy)
        case OpKind.UPDATE_GPU:
            seconds = subgroup.numel / profile.gpu_adam_params_per_s
        case _:
            return _FREE
    return OpCost(moved, traffic, seconds + profile.op_overhead_seconds)


def _cpu_wire(subgroup: Subgroup, state: StateFormat) -> Wire:
    return "fp32" if state.wire_bytes_per_param(subgroup) == 4 else "param"


def op_seconds(layout: ShardLayout, state: StateFormat, profile: HardwareProfile) -> OpSeconds:
    """The costs that `build_plan` orders copies by: seconds of an operation while the other lanes work."""
    known: dict[tuple[OpKind, int, int, int], float] = {}

    def seconds(kind: OpKind, i: int) -> float:
        subgroup = layout.subgroups[i]
        key = (kind, subgroup.numel, subgroup.param_bytes, subgroup.grad_bytes)
        if key not in known:
            known[key] = op_cost(kind, subgroup, state, profile, busy=True).seconds
        return known[key]

    return seconds
