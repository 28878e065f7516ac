"""Owners of optimizer state: the host arena's views, what stays on the device, and the staging slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deep_offload.model.memory import UPCAST_STAGING_NUMEL
from deep_offload.plan.layout import MasterStorage, ShardLayout, Subgroup
from deep_offload.plan.ops import Place, Placement
from deep_offload.plan.storage import EXP_AVG, GRAD, MASTER, WEIGHT_OUT, Field, host_fields, state_fields, storage_of
from deep_offload.runtime.arena import ArraySpec, HostArena
from deep_offload.runtime.convert import split_into

Arrays = dict[str, torch.Tensor]
"""Arrays of one subgroup by field name, each [numel]."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Where the state of every subgroup lives; all that the owners below need to know."""

    layout: ShardLayout
    placement: Placement
    split_master: bool
    wire_dtype: torch.dtype
    param_dtypes: tuple[torch.dtype, ...]
    """Type of the parameters of each shard."""
    reserved: frozenset[int] = frozenset()
    """Subgroups that the CPU may update later, whatever their place: they own the host arrays which that takes."""

    def storage(self, subgroup: Subgroup) -> MasterStorage:
        split = self.split_master and self.param_dtypes[subgroup.shard] == torch.bfloat16
        return storage_of(self.placement[subgroup.index], subgroup, split)

    def host_arrays(self, subgroup: Subgroup) -> list[tuple[Field, torch.dtype]]:
        """Arrays in host memory as its place uses them."""
        return self._arrays_at(self.placement[subgroup.index], subgroup)

    def owned_arrays(self, subgroup: Subgroup) -> list[tuple[Field, torch.dtype]]:
        """Arrays in host memory as they are allocated: those of its place, or of a CPU's subgroup if it may become one;
        they serve a streamed one too."""
        is_reserved = subgroup.index in self.reserved
        return self._arrays_at(Place.CPU if is_reserved else self.placement[subgroup.index], subgroup)

    def _arrays_at(self, place: Place, subgroup: Subgroup) -> list[tuple[Field, torch.dtype]]:
        wire = self.wire_dtype if subgroup.grad_bytes == 2 else torch.float32
        split = self.storage(subgroup) is MasterStorage.SPLIT
        return [(f, self._dtype(f, subgroup, wire)) for f in host_fields(place, subgroup, split, wire.itemsize)]

    @property
    def needs_upcast(self) -> bool:
        """Whether any gradient becomes fp32 on the device before it goes to the host."""
        placed = zip(self.layout.subgroups, self.placement)
        is_wide = self.wire_dtype == torch.float32
        return is_wide and any(place is Place.CPU and s.grad_bytes == 2 for s, place in placed)

    def _dtype(self, field: Field, subgroup: Subgroup, wire: torch.dtype) -> torch.dtype:
        if field.name == GRAD:
            return wire
        if field.name == WEIGHT_OUT:
            return self.param_dtypes[subgroup.shard]
        return torch.int16 if field.itemsize == 2 else torch.float32


class HostState:
    """Owns the pinned arrays of all offloaded subgroups; `arrays[i]` are views, valid until `close`."""

    def __init__(
        self,
        plan: StatePlan,
        *,
        pin: bool,
        num_threads: int,
        warn: Callable[[str], None],
        log: Callable[[str], None] = print,
    ) -> None:
        wanted = [
            (s.index, f.name, ArraySpec(s.numel, dtype))
            for s in plan.layout.subgroups
            for f, dtype in plan.owned_arrays(s)
        ]
        self._arena = HostArena([spec for _, _, spec in wanted], pin=pin, num_threads=num_threads, warn=warn, log=log)
        self._owned: list[Arrays] = [{} for _ in plan.layout.subgroups]
        for (index, name, _), array in zip(wanted, self._arena.arrays, strict=True):
            self._owned[index][name] = array
        self.arrays: list[Arrays] = []
        self.use(plan)

    def use(self, plan: StatePlan) -> None:
        """From now on `arrays` are those of the plan's places; where it keeps a narrower master, it lies at the start
        of the wide one's bytes."""
        self.arrays = [
            {f.name: self._owned[s.index][f.name].view(dtype)[: s.numel] for f, dtype in plan.host_arrays(s)}
            for s in plan.layout.subgroups
        ]

    def holds(self, plan: StatePlan) -> bool:
        """Whether every subgroup owns the arrays that its place in the plan takes."""
        return all(
            f.name in self._owned[s.index] and self._owned[s.index][f.name].nbytes >= s.numel * f.itemsize
            for s in plan.layout.subgroups
            for f, _ in plan.host_arrays(s)
        )

    def can_serve_cpu(self, i: int) -> bool:
        """Whether subgroup i owns the arrays that the CPU's update takes."""
        return GRAD in self._owned[i]

    def owned(self, i: int, name: str) -> torch.Tensor:
        """An array of subgroup i as it was allocated."""
        return self._owned[i][name]

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes

    @property
    def is_pinned(self) -> bool:
        return self._arena.is_pinned

    def close(self) -> None:
        self.arrays.clear()
        self._owned.clear()
        self._arena.close()


class DeviceState:
    """Owns the state that stays on the device, the staging slots and the buffer for upcasts.

    All allocated here, once; more may stay later (`keep`).
    """

    def __init__(self, plan: StatePlan, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.resident: list[Arrays] = [{} for _ in plan.layout.subgroups]
        for subgroup in plan.layout.subgroups:
            if plan.placement[subgroup.index] is Place.RESIDENT:
                self.resident[subgroup.index] = _allocate(state_fields(plan.storage(subgroup)), subgroup.numel, device)
        streamed = [s for s in plan.layout.subgroups if plan.placement[s.index] is Place.GPU]
        self.slots = [_slot(plan, streamed, device) for _ in range(min(num_slots, len(streamed)))]
        self.upcast: torch.Tensor | None = None
        if plan.needs_upcast:
            numel = min(UPCAST_STAGING_NUMEL, plan.layout.max_subgroup_numel)
            self.upcast = torch.empty(numel, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of resident state and slots."""
        return sum(a.nbytes for arrays in (*self.resident, *self.slots) for a in arrays.values())

    def holds(self, plan: StatePlan) -> bool:
        """Whether slots and upcast buffer, as they are, serve the plan's placement."""
        streamed = [s for s in plan.layout.subgroups if plan.placement[s.index] is Place.GPU]
        if plan.needs_upcast and self.upcast is None:
            return False
        if not streamed or not self.slots:
            return not streamed
        slot, (numel, master_bytes) = self.slots[0], _slot_size(plan, streamed)
        return numel <= slot[EXP_AVG].numel() and master_bytes <= slot[MASTER].nbytes

    def keep(self, plan: StatePlan, host: HostState) -> None:
        """Take in the state of subgroups that are resident from now on, and release slots that nobody needs any more.

        plan: with the new placement. No lane may be at work. Raises torch.OutOfMemoryError, with nothing changed.
        """
        new = [s for s in plan.layout.subgroups if plan.placement[s.index] is Place.RESIDENT]
        arrays = {s.index: self._copy(plan, s, host.arrays[s.index]) for s in new if not self.resident[s.index]}
        for i, copied in arrays.items():
            self.resident[i] = copied
        del self.slots[sum(place is Place.GPU for place in plan.placement) :]
        if not plan.needs_upcast:
            self.upcast = None

    def _copy(self, plan: StatePlan, subgroup: Subgroup, home: Arrays) -> Arrays:
        """A subgroup's state as it is kept here, from the host's arrays, whose master may be a full one."""
        arrays = _allocate(state_fields(plan.storage(subgroup)), subgroup.numel, self._device)
        for name, array in arrays.items():
            source = home[name]
            if source.dtype == array.dtype:
                array.copy_(source)
            else:  # the weights in their buffer are this master's rounded upper half already
                split_into(array, source, self._device)
        return arrays


def _slot(plan: StatePlan, streamed: Sequence[Subgroup], device: torch.device) -> Arrays:
    """Arrays large enough for every streamed subgroup; the master's bytes serve both a full and a split one."""
    numel, master_bytes = _slot_size(plan, streamed)
    slot = _allocate(state_fields(MasterStorage.WEIGHT), numel, device)
    slot[MASTER] = torch.empty(master_bytes, dtype=torch.uint8, device=device)
    return slot


def _slot_size(plan: StatePlan, streamed: Sequence[Subgroup]) -> tuple[int, int]:
    """Elements of each moment and bytes of the master that a slot for these subgroups has at least."""
    return max(s.numel for s in streamed), max(s.numel * plan.storage(s).bytes_per_param for s in streamed)


def _allocate(fields: Sequence[Field], numel: int, device: torch.device) -> Arrays:
    return {
        f.name: torch.zeros(numel, dtype=torch.int16 if f.itemsize == 2 else torch.float32, device=device)
        for f in fields
    }
