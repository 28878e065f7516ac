"""Flat pieces of the training loop's buffers, and which of their elements belong to which parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from deep_offload.kernels import reference
from deep_offload.plan.layout import ShardLayout, ShardSpec, Subgroup


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, end) of a shard that belong to parameter number `param` of the front end."""

    start: int
    end: int
    param: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat piece of the training loop's buffers that this rank updates: views [numel], owned by the front end.

    segments are sorted and disjoint; what they leave out is padding, whose state and weights stay zero.
    """

    param: torch.Tensor
    grad: torch.Tensor
    segments: tuple[Segment, ...]

    @property
    def spec(self) -> ShardSpec:
        return ShardSpec(self.param.numel(), self.param.dtype.itemsize, self.grad.dtype.itemsize)


def holding(layout: ShardLayout, shards: Sequence[Shard], params: Collection[int]) -> frozenset[int]:
    """Subgroups that hold an element of one of the parameters."""
    return frozenset(
        s.index
        for s in layout.subgroups
        if any(g.param in params and g.start < s.start + s.numel and s.start < g.end for g in shards[s.shard].segments)
    )


class SegmentTables:
    """Per subgroup: which elements take which class of scalars. Built once for each assignment of classes."""

    def __init__(self, shards: Sequence[Shard], layout: ShardLayout, device: torch.device) -> None:
        self._shards = shards
        self._layout = layout
        self._device = device
        self._key: tuple[int, ...] | None = None
        self._host: list[torch.Tensor] = []
        self._on_device: list[object] = []

    def tables(self, class_of: tuple[int, ...]) -> tuple[list[torch.Tensor], list[object]]:
        if class_of != self._key:
            self._host = [self._table(s, class_of) for s in self._layout.subgroups]
            self._on_device = [_device_table(t, self._device) for t in self._host]
            self._key = class_of
        return self._host, self._on_device

    def _table(self, subgroup: Subgroup, class_of: tuple[int, ...]) -> torch.Tensor:
        """Rows (start, end, class) that cover the subgroup; neighbors of one class are merged."""
        rows: list[list[int]] = []
        position = 0

        def add(start: int, end: int, index: int) -> None:
            if rows and rows[-1][2] == index:
                rows[-1][1] = end
            elif end > start:
                rows.append([start, end, index])

        for segment in self._shards[subgroup.shard].segments:
            start = max(segment.start - subgroup.start, 0)
            end = min(segment.end - subgroup.start, subgroup.numel)
            if start < end:
                add(position, start, reference.HOLD)
                add(start, end, class_of[segment.param])
                position = end
        add(position, subgroup.numel, reference.HOLD)
        return torch.tensor(rows, dtype=torch.int64)


def _device_table(table: torch.Tensor, device: torch.device) -> object:
    if device.type != "cuda":
        return table
    from deep_offload.kernels import gpu  # optional heavy import: triton

    return gpu.SegmentTable.build(table, device)
