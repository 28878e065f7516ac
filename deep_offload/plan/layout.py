"""How one rank's flat shards are cut into subgroups. Pure: numbers in, frozen numbers out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class MasterStorage(enum.Enum):
    """Where the fp32 master weight of a subgroup is kept; a storage choice that never changes a bit."""

    FULL = "full"
    """4 bytes: the fp32 master itself."""
    SPLIT = "split"
    """2 bytes: the low 16 bits; the bf16 weight is the rounded upper half (ties away from zero)."""
    WEIGHT = "weight"
    """0 bytes: the parameter is fp32 and is its own master."""

    @property
    def bytes_per_param(self) -> int:
        return {MasterStorage.FULL: 4, MasterStorage.SPLIT: 2, MasterStorage.WEIGHT: 0}[self]


MOMENTS_BYTES_PER_PARAM = 8  # exp_avg and exp_avg_sq, fp32


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One rank's contiguous slice of one gradient bucket.

    numel: elements; param_bytes, grad_bytes: bytes of one element of the parameter and of the gradient buffer.
    """

    numel: int
    param_bytes: int
    grad_bytes: int


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Elements [start, start + numel) of shard `shard`; the unit that is placed, moved and updated."""

    index: int
    shard: int
    start: int
    numel: int
    param_bytes: int
    grad_bytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """All subgroups of one rank in update order, which is the order of the forward pass."""

    shards: tuple[ShardSpec, ...]
    subgroups: tuple[Subgroup, ...]

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.shards)

    @property
    def max_subgroup_numel(self) -> int:
        return max((s.numel for s in self.subgroups), default=0)


SUBGROUP_ALIGNMENT = 128
"""Subgroups start at multiples of this many elements of their shard: whole cache lines in every type."""


def build_layout(shards: Sequence[ShardSpec], subgroup_numel: int) -> ShardLayout:
    """Cut every shard (given in forward order) into equal subgroups of about `subgroup_numel` elements.

    A subgroup never crosses a shard. Shards without elements own no subgroup. DDP lays a bucket out in backward
    order, so the subgroups of one shard are numbered from its end: update order is forward order.
    """
    if subgroup_numel < 1:
        raise ValueError(f"a subgroup of {subgroup_numel} elements was asked for, it must hold at least 1")
    subgroups: list[Subgroup] = []
    for shard_index, shard in enumerate(shards):
        for start, numel in reversed(_cut(shard.numel, subgroup_numel)):
            subgroups.append(Subgroup(len(subgroups), shard_index, start, numel, shard.param_bytes, shard.grad_bytes))
    return ShardLayout(tuple(shards), tuple(subgroups))


def _cut(numel: int, target: int) -> list[tuple[int, int]]:
    """Pieces (start, numel) of a shard; all but the last are aligned and equal."""
    if numel == 0:
        return []
    count = max(1, round(numel / target))
    size = -(-numel // count)
    if size > SUBGROUP_ALIGNMENT:
        size = -(-size // SUBGROUP_ALIGNMENT) * SUBGROUP_ALIGNMENT
    return [(start, min(size, numel - start)) for start in range(0, numel, size)]


def auto_subgroup_numel(total_numel: int) -> int:
    """Elements of a subgroup when none is asked for: 2**26, but at least about 16 subgroups a rank."""
    return max(1, min(1 << 26, -(-total_numel // 16)))
