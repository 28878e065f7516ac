"""Shards are cut completely and in forward order, and shares are spread evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_offload.plan.layout import SUBGROUP_ALIGNMENT, ShardSpec, auto_subgroup_numel, build_layout
from deep_offload.plan.ops import Place
from deep_offload.plan.placement import gpu_share_of, nearest_stride, num_residents, place_by_share, place_by_stride
from tests.plan.strategies import shard_specs


@given(shard_specs, st.integers(1, 5000))
def test_subgroups_cover_every_shard_once(shards, subgroup_numel):
    """Every element of every shard lies in exactly one subgroup, and no subgroup is empty or crosses a shard."""
    layout = build_layout(shards, subgroup_numel)
    for index, shard in enumerate(shards):
        pieces = sorted((s.start, s.start + s.numel) for s in layout.subgroups if s.shard == index)
        assert all(start < end for start, end in pieces)
        borders = [0, *(end for _, end in pieces)]
        assert [start for start, _ in pieces] == borders[:-1] and borders[-1] == shard.numel
    assert layout.numel == sum(s.numel for s in layout.subgroups) == sum(s.numel for s in shards)
    assert [s.index for s in layout.subgroups] == list(range(len(layout.subgroups)))
    assert all((s.param_bytes, s.grad_bytes) == shard_types(layout.shards[s.shard]) for s in layout.subgroups)


def shard_types(shard: ShardSpec) -> tuple[int, int]:
    return shard.param_bytes, shard.grad_bytes


@given(shard_specs, st.integers(1, 5000))
def test_update_order_is_forward_order(shards, subgroup_numel):
    """Shards come in the given order, and inside a shard, whose bucket lies in backward order, from its end."""
    keys = [(s.shard, -s.start) for s in build_layout(shards, subgroup_numel).subgroups]
    assert keys == sorted(keys)


@given(st.integers(1, 10**6), st.integers(2000, 10**5))
def test_subgroups_are_aligned_and_near_the_target(numel, target):
    """All but the last piece of a shard are equal, start at aligned elements and stay within 1.5 x the target."""
    layout = build_layout([ShardSpec(numel, 2, 2)], target)
    sizes = [s.numel for s in reversed(layout.subgroups)]
    assert len(set(sizes[:-1])) <= 1
    assert all(s.start % SUBGROUP_ALIGNMENT == 0 for s in layout.subgroups if sizes[0] > SUBGROUP_ALIGNMENT)
    assert max(sizes) <= 1.5 * target + SUBGROUP_ALIGNMENT


def test_layout_refuses_empty_subgroups():
    """A target of 0 elements is refused with one sentence."""
    with pytest.raises(ValueError, match="must hold at least 1"):
        build_layout([ShardSpec(10, 2, 2)], 0)


@given(st.integers(0, 1 << 40))
def test_auto_subgroups_are_many_but_not_small(total):
    """A rank gets about 16 subgroups or subgroups of 2**26 elements, whichever is smaller."""
    numel = auto_subgroup_numel(total)
    assert 1 <= numel <= 1 << 26
    assert numel == 1 << 26 or numel * 16 >= total


@given(st.integers(0, 300), st.floats(0, 1), st.floats(0, 1))
def test_shares_are_met_and_spread_evenly(num, share, resident):
    """The streamed count is the rounded share, and any window of offloaded subgroups holds its part of it, +- 1."""
    placement = place_by_share(num, share, resident)
    residents = num_residents(num, resident)
    offloaded = placement[residents:]
    assert placement[:residents] == (Place.RESIDENT,) * residents and Place.RESIDENT not in offloaded
    streamed = sum(p is Place.GPU for p in offloaded)
    assert streamed == round(len(offloaded) * share)
    for start in range(0, len(offloaded), 7):
        window = offloaded[start : start + 13]
        expected = len(window) * streamed / len(offloaded)
        assert abs(sum(p is Place.GPU for p in window) - expected) < 1 + 1e-9


@given(st.integers(0, 100), st.one_of(st.none(), st.integers(1, 12)))
def test_strides_stream_every_kth(num, stride):
    """Stride k streams subgroups k-1, 2k-1, ...; None streams nothing, 1 everything."""
    placement = place_by_stride(num, stride)
    assert [i for i, p in enumerate(placement) if p is Place.GPU] == (
        [] if stride is None else list(range(num))[stride - 1 :: stride]
    )


def test_an_uneven_spread_would_be_seen():
    """The window test above fails for a placement of the same share in one block."""
    block = (Place.CPU,) * 50 + (Place.GPU,) * 50
    assert gpu_share_of(block) == 0.5
    assert abs(sum(p is Place.GPU for p in block[:13]) - 13 * 0.5) > 1


def test_named_shares():
    """Shares and strides agree where both exist, and residents count neither way."""
    assert gpu_share_of(place_by_share(12, 0.5, 0.5)) == 0.5
    assert nearest_stride(0.5) == 2 and nearest_stride(0) is None and nearest_stride(1) == 1
    assert place_by_share(8, 0.5) == place_by_stride(8, 2)
    assert gpu_share_of((Place.RESIDENT,) * 3) == 0.0
