"""Where flat ranges of a parameter lie in the checkpoint's tensors: boxes, cut so that each is small. Pure arithmetic.

A data-parallel rank owns a flat range of each parameter, which begins and ends anywhere in a row. In the parameter's
own shape that range is a few boxes, and a checkpoint's tensor may be made of any boxes, so a rank writes and reads what
it owns without gathering anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]

MAX_BOX_NUMEL = 1 << 25
"""Elements of the largest box that is written: 128 MiB in fp32, so that copies in between stay small."""


@dataclass(frozen=True, slots=True)
class Area:
    """Elements [flat_start, flat_start + numel) of a flat local tensor are box `offset`, `shape` of tensor `key`.

    global_shape, offset and shape have the same axes, those of the tensor in the checkpoint. may_differ: the tensor in
    the checkpoint may have another shape, because its end is padding (a vocabulary).
    """

    key: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    flat_start: int
    may_differ: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, start: int, end: int, max_numel: int = MAX_BOX_NUMEL) -> list[Area]:
        """The boxes of elements [start, end) of the flat local tensor that lie in this area, in flat order."""
        low, high = max(start - self.flat_start, 0), min(end - self.flat_start, self.numel)
        if low >= high:
            return []
        parts: list[Area] = []
        for box_start, offset, shape in _boxes(self.shape, low, high, max_numel):
            at = tuple(a + b for a, b in zip(self.offset, offset))
            parts.append(
                Area(self.key, self.global_shape, at, shape, self.flat_start + box_start, self.may_differ),
            )
        return parts


def _boxes(shape: Shape, start: int, end: int, max_numel: int) -> Iterator[tuple[int, Shape, Shape]]:
    """(flat start, offset, shape) of boxes that make up elements [start, end) of a row-major tensor."""
    if not shape:
        yield 0, (), ()
        return
    row = math.prod(shape[1:])
    position = start
    while position < end:
        index, inside = divmod(position, row)
        if inside == 0 and end - position >= row:
            rows = min((end - position) // row, max(max_numel // row, 1))
            if rows > 1 or row <= max_numel or len(shape) == 1:
                yield position, (index,) + (0,) * (len(shape) - 1), (rows, *shape[1:])
                position += rows * row
                continue
        stop = min(end, (index + 1) * row)
        for box_start, offset, inner in _boxes(shape[1:], inside, stop - index * row, max_numel):
            yield index * row + box_start, (index, *offset), (1, *inner)
        position = stop


def overlap(offset: Shape, shape: Shape, other_offset: Shape, other_shape: Shape) -> tuple[slice, ...] | None:
    """What two boxes share, in the coordinates of the whole tensor; None if nothing."""
    slices = []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        slices.append(slice(low, high))
    return tuple(slices)


def inside(where: tuple[slice, ...], offset: Shape) -> tuple[slice, ...]:
    """The same box seen from a tensor that begins at `offset`."""
    return tuple(slice(s.start - o, s.stop - o) for s, o in zip(where, offset, strict=True))
