"""The closed form: its optimum is one, it agrees with derivations done by hand, and it orders machines rightly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_offload.model.cost import StateFormat
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.performance import best_prediction, lane_costs, method_stride, predict, round_stride
from deep_offload.plan.layout import ShardSpec, build_layout
from tests.plan.strategies import profiles, state_formats

H200 = BUILT_IN_PROFILES["h200"]
LAYOUT = build_layout([ShardSpec(1 << 20, 2, 2)], 1 << 16)


@settings(max_examples=80)
@given(profiles(), state_formats, st.integers(1, 4), st.booleans())
def test_no_share_is_better_than_the_best(profile, state, ranks, busy):
    """Over a fine grid no share has a higher rate than the chosen one, at which the binding lane is full."""
    costs = lane_costs(LAYOUT, state, profile, num_ranks=ranks, busy=busy)
    best = best_prediction(costs)
    assert all(predict(costs, i / 50).params_per_s <= best.params_per_s * (1 + 1e-9) for i in range(51))
    assert best.lane_shares[best.binding_lane] == pytest.approx(1.0)
    assert max(best.lane_shares.values()) <= 1 + 1e-9


RATES = [f for f in H200.__dataclass_fields__ if f.endswith("_per_s")]


@settings(max_examples=80)
@given(profiles(), state_formats, st.sampled_from(RATES), st.floats(1.0, 4.0))
def test_a_higher_rate_never_lowers_the_bound(profile, state, name, factor):
    """Raising any one rate leaves the best predicted rate equal or higher."""
    faster = replace(profile, **{name: getattr(profile, name) * factor})
    before = best_prediction(lane_costs(LAYOUT, state, profile)).params_per_s
    assert best_prediction(lane_costs(LAYOUT, state, faster)).params_per_s >= before * (1 - 1e-9)


# Rates and shares of a design study for B = 52 GB/s: memory GB/s, best share, G parameters/s.
STUDY = [(100, 1.0, 5.0), (150, 0.73, 6.6), (200, 0.547, 8.2), (300, 0.33, 11.2)]


@pytest.mark.parametrize(("dram", "share", "rate"), STUDY)
def test_share_where_only_link_and_memory_bind(dram, share, rate):
    """With arithmetic for free x = (30 B - 2 M) / (8 M + 10 B), and all goes to the GPU below M = 2 B."""
    fast = {name: 1e15 for name in RATES if "adam" in name}
    link = {name: 52e9 for name in RATES if name.startswith(("h2d", "d2h"))}
    profile = replace(H200, dram_bytes_per_s=dram * 1e9, host_dram_bytes_per_s=dram * 1e9, **fast, **link)
    best = best_prediction(lane_costs(LAYOUT, StateFormat(True, "param"), profile))
    assert best.gpu_share == pytest.approx(share, abs=0.01)
    assert best.params_per_s / 1e9 == pytest.approx(rate, rel=0.02)


def test_lanes_at_the_ends():
    """Share 0 is bound by the CPU, share 1 by the link, at exactly their rates."""
    costs = lane_costs(LAYOUT, StateFormat(wire="param"), H200)
    nothing, everything = predict(costs, 0.0), predict(costs, 1.0)
    assert nothing.binding_lane == "cpu" and nothing.params_per_s == pytest.approx(2.5e9)
    assert everything.binding_lane in ("h2d", "d2h") and everything.params_per_s == pytest.approx(46.7e9 / 12)
    assert nothing.stride is None and everything.stride == 1


def test_ranks_that_share_memory_move_the_share_to_the_gpu():
    """Two ranks of a host leave each less memory bandwidth, and the best share rises, as it was measured."""
    one, two = (
        best_prediction(lane_costs(LAYOUT, StateFormat(wire="param"), BUILT_IN_PROFILES["h200x2"], num_ranks=ranks))
        for ranks in (1, 2)
    )
    assert two.gpu_share > one.gpu_share and two.params_per_s < one.params_per_s


def test_published_stride():
    """With the published H100 rates (50 GB/s, 2 and 25 G/s) the formula gives 1.6, or 2.1 serialized: stride 2."""
    profile = BUILT_IN_PROFILES["h100x4"]
    full, serialized = method_stride(profile), method_stride(profile, is_serialized=True)
    assert full == pytest.approx(1 + (3 / 12.5 + 1 / 25) / (1 / 2 - 1 / 25)) and round_stride(full) == 2
    assert serialized == pytest.approx(1 + (6 / 12.5 + 1 / 25) / (1 / 2 - 1 / 25)) and round(serialized) == 2
    slow_link = replace(profile, h2d_both_bytes_per_s=1e9, d2h_both_bytes_per_s=1e9)
    assert method_stride(slow_link) is None and round_stride(None) is None


def test_split_master_helps_streaming():
    """10 instead of 12 bytes each way raise the rate of streaming by 6/5."""
    full, split = (lane_costs(LAYOUT, StateFormat(split, "param"), H200) for split in (False, True))
    assert predict(split, 1.0).params_per_s / predict(full, 1.0).params_per_s == pytest.approx(1.2)
