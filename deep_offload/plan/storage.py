"""Which arrays each subgroup owns, by place: the one table that planner, runtime and checkpoint all read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from deep_offload.plan.layout import MasterStorage, Subgroup
from deep_offload.plan.ops import Place

MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
GRAD = "grad"
WEIGHT_OUT = "weight_out"


PAGE_BYTES = 4096
"""Every host array starts on a page of its own, so that pinning in chunks never cuts one."""


def page_rounded(num_bytes: int) -> int:
    """Bytes that an array takes in the host arena."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a subgroup: its name and the bytes of one element."""

    name: str
    itemsize: int


def storage_of(place: Place, subgroup: Subgroup, split_master: bool) -> MasterStorage:
    """Where the master of a subgroup is kept. `split_master` holds for bf16 parameters only; the CPU never uses it."""
    if place is Place.CPU:
        return MasterStorage.FULL
    if subgroup.param_bytes == 4:
        return MasterStorage.WEIGHT
    return MasterStorage.SPLIT if split_master else MasterStorage.FULL


@cache
def state_fields(storage: MasterStorage) -> tuple[Field, ...]:
    """Optimizer state proper: what a prefetch and a flush move."""
    master = () if storage is MasterStorage.WEIGHT else (Field(MASTER, storage.bytes_per_param),)
    return (*master, Field(EXP_AVG, 4), Field(EXP_AVG_SQ, 4))


def host_fields(place: Place, subgroup: Subgroup, split_master: bool, wire_bytes: int) -> tuple[Field, ...]:
    """Arrays of a subgroup in host memory. wire_bytes: bytes of one gradient element as it reaches the host.

    A CPU-updated subgroup with 16-bit gradients gets its 16-bit weights written over them; with fp32 gradients they
    have an array of their own; fp32 parameters are uploaded from the master itself.
    """
    if place is Place.RESIDENT:
        return ()
    fields = state_fields(storage_of(place, subgroup, split_master))
    if place is Place.GPU:
        return fields
    if subgroup.param_bytes == 2 and wire_bytes == 4:
        return (*fields, Field(GRAD, 4), Field(WEIGHT_OUT, 2))
    return (*fields, Field(GRAD, wire_bytes))
