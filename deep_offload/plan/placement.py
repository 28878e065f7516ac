"""Which subgroups stay on the GPU, which are streamed to it, and which the CPU updates."""

from __future__ import annotations

from collections.abc import Sequence

from deep_offload.plan.ops import Place, Placement


def place_by_share(num_subgroups: int, gpu_share: float, resident_fraction: float = 0.0) -> Placement:
    """Spread `gpu_share` (0..1) of the offloaded subgroups evenly over the update (Bresenham).

    Residents come first in forward order: their gradients are the last of the backward pass and never leave the GPU,
    so the flush of all other gradients ends before the backward pass does.
    """
    residents = num_residents(num_subgroups, resident_fraction)
    offloaded = num_subgroups - residents
    all_on_cpu = with_residents((Place.CPU,) * num_subgroups, residents)
    return place_among(all_on_cpu, range(residents, num_subgroups), offloaded - round(offloaded * gpu_share))


def place_among(placement: Placement, movable: Sequence[int], num_cpu: int) -> Placement:
    """The same residents; of all others the CPU updates `num_cpu` of the `movable` ones, spread evenly, and no more."""
    to_gpu = set(spread(movable, len(movable) - num_cpu))
    on_cpu = set(movable) - to_gpu
    return tuple(
        place if place is Place.RESIDENT else Place.CPU if i in on_cpu else Place.GPU
        for i, place in enumerate(placement)
    )


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items, as evenly spread as can be (Bresenham)."""
    num = len(items)
    return [item for j, item in enumerate(items) if (j + 1) * count // num > j * count // num]


def place_by_stride(num_subgroups: int, stride: int | None, resident_fraction: float = 0.0) -> Placement:
    """Every `stride`-th offloaded subgroup on the GPU, the method's k; None: all on the CPU, 1: all streamed."""
    residents = num_residents(num_subgroups, resident_fraction)
    return (Place.RESIDENT,) * residents + tuple(
        Place.GPU if stride is not None and j % stride == stride - 1 else Place.CPU
        for j in range(num_subgroups - residents)
    )


def with_residents(placement: Placement, count: int) -> Placement:
    """The same, with the first `count` subgroups resident."""
    return (Place.RESIDENT,) * count + placement[count:]


def num_residents(num_subgroups: int, resident_fraction: float) -> int:
    """Subgroups that stay on the GPU; rounded down, so that a memory budget is never exceeded."""
    return int(num_subgroups * resident_fraction + 1e-9)


def gpu_share_of(placement: Placement) -> float:
    """Share of the offloaded subgroups that the GPU updates; 0 when nothing is offloaded."""
    offloaded = sum(place is not Place.RESIDENT for place in placement)
    return sum(place is Place.GPU for place in placement) / offloaded if offloaded else 0.0


def nearest_stride(gpu_share: float) -> int | None:
    """The method's stride closest to a share, for reports: 1/2 is stride 2, 0 is None."""
    return None if gpu_share <= 0 else max(1, round(1 / gpu_share))
