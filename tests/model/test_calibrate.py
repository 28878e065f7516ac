"""Rates corrected by measured updates: a profile that was wrong becomes the machine's that ran them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_offload.config import OffloadConfig
from deep_offload.model import calibrate
from deep_offload.model.calibrate import corrected_profile, lanes_are_off, rate_changes
from deep_offload.model.choose import Compute, choose_placement
from deep_offload.model.cost import StateFormat, op_seconds
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.model.trace import Expectation
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import OpKind
from deep_offload.plan.placement import place_by_share
from deep_offload.plan.planner import build_plan
from deep_offload.plan.timeline import Span, Timeline

LAYOUT = build_layout([ShardSpec(1 << 26, 2, 2)] * 52, 1 << 26)
STATE = StateFormat(True, "param")
TRUTH = BUILT_IN_PROFILES["h200"]
TWO_RANKS = replace(
    TRUTH,
    num_gpus=2,
    h2d_busy_bytes_per_s=31e9,
    d2h_busy_bytes_per_s=31e9,
    cpu_adam_param_busy_params_per_s=1.9e9,
    dram_bytes_per_s=118e9,
    host_dram_bytes_per_s=236e9,
)
"""As two ranks measure their host: each reaches less while the other one works."""


def wrong(truth: HardwareProfile, cpu=1.0, up=1.0, down=1.0, gpu=1.0) -> HardwareProfile:
    """The same machine, its lanes said to be so many times as fast."""
    values = {}
    for factor, prefix in ((cpu, "cpu_adam_"), (up, "h2d_"), (down, "d2h_"), (gpu, "gpu_adam_")):
        for name in HardwareProfile.__slots__:
            if name.startswith(prefix):
                values[name] = factor * getattr(truth, name)
    return replace(truth, **values)


def expectation(profile, placement, slots=4, layout=LAYOUT, ranks=1) -> Expectation:
    plan = build_plan(layout, placement, slots, op_seconds(layout, STATE, profile))
    return Expectation(plan, layout, STATE, profile, ranks, 1.0, "cpu")


def choice(profile, ranks=1):
    config = OffloadConfig(interleaved_offload=True, offload_resident_fraction=0.0, offload_num_slots=4)
    return choose_placement(LAYOUT, config, profile, can_split=True, num_ranks=ranks)


OFF = [
    dict(cpu=1.3),
    dict(cpu=0.75, up=1.2),
    dict(cpu=1.35, up=0.8, down=0.8),
    dict(up=1.3, down=1.3),
    dict(cpu=1.2, up=0.7, down=1.3, gpu=0.7),
    dict(cpu=0.6, up=0.6, down=0.6),
]


@pytest.mark.parametrize("off", OFF, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_profile_is_corrected(ranks, off):
    """From updates of the true machine, placed by a profile 20-40 % off, come its update within 3 %, and a share that
    takes no more than 3 % longer than the true machine's (of two ranks, shares from 0.6 to 1 take the same within 2 %).
    """
    truth = TRUTH if ranks == 1 else TWO_RANKS
    start = choice(wrong(truth, **off), ranks)
    backward = Compute(0.0, 0.2)
    measured = expectation(truth, start.placement, ranks=ranks).timeline(backward)
    believed = expectation(wrong(truth, **off), start.placement, ranks=ranks)
    corrected = corrected_profile(believed, [measured] * 3)
    again = replace(believed, profile=corrected).timeline(backward)
    assert again.in_place_seconds == pytest.approx(measured.in_place_seconds, rel=0.03)
    want, got = choice(truth, ranks), choice(corrected, ranks)
    here, there = (expectation(truth, c.placement, ranks=ranks).timeline(backward) for c in (want, got))
    assert ranks == 2 or abs(got.gpu_share - want.gpu_share) <= 1 / 16
    assert there.in_place_seconds <= 1.03 * here.in_place_seconds


def test_a_right_profile_stays():
    """Updates just as predicted leave every rate but for rounding, and name no change."""
    expected = expectation(TRUTH, place_by_share(52, 0.6))
    corrected = corrected_profile(expected, [expected.timeline(Compute(0.0, 0.2))])
    for name in HardwareProfile.__slots__:
        if name.endswith("_per_s"):
            assert getattr(corrected, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3), name
    assert rate_changes(TRUTH, corrected, "param") == []
    assert corrected.source == f"{TRUTH.source}, measured by 1 updates of training"
    assert corrected_profile(
        replace(expected, profile=corrected), [expected.timeline(Compute(0.0, 0.2))] * 10
    ).source.endswith(f"{TRUTH.source}, measured by 10 updates of training")


def test_lanes_without_work_keep_their_rates():
    """All on the CPU says nothing about GPU updates; all streamed little about CPU updates, which share the host."""
    for share in (0.0, 1.0):
        placement = place_by_share(52, share)
        measured = expectation(TRUTH.scaled(0.8), placement).timeline(Compute(0.0, 0.2))
        corrected = corrected_profile(expectation(TRUTH, placement), [measured])
        if share == 0.0:
            assert corrected.gpu_adam_params_per_s == TRUTH.gpu_adam_params_per_s
            assert corrected.cpu_adam_param_params_per_s == pytest.approx(
                0.8 * TRUTH.cpu_adam_param_params_per_s, rel=0.03
            )
        else:
            assert corrected.h2d_both_bytes_per_s == pytest.approx(0.8 * TRUTH.h2d_both_bytes_per_s, rel=0.03)
            assert 0.88 < corrected.cpu_adam_param_params_per_s / TRUTH.cpu_adam_param_params_per_s < 1.0


BESIDE = ("cpu_adam_param_busy", "h2d_busy", "d2h_busy", "dram")


def test_other_placements_are_predicted_by_it():
    """Rates beside other lanes, and those of host memory, were 25 % too low: an update at share 1/2 says so, and nearly
    leaves the lanes' own rates, so that shares with less contention are still predicted. (One factor for all rates of
    a lane is 5 % off at share 0 and 15 % at share 1.)"""
    names = [name for name in HardwareProfile.__slots__ if name.startswith(BESIDE)]
    believed = replace(TRUTH, **{name: 0.75 * getattr(TRUTH, name) for name in names} | {"dram_bytes_per_s": 130e9})
    backward = Compute(0.0, 0.2)
    here = place_by_share(52, 0.5)
    corrected = corrected_profile(expectation(believed, here), [expectation(TRUTH, here).timeline(backward)])
    for share, most in ((0.0, 0.03), (0.25, 0.02), (0.5, 0.01), (0.75, 0.05), (1.0, 0.1)):
        truth, got = (
            expectation(profile, place_by_share(52, share)).timeline(backward).in_place_seconds
            for profile in (TRUTH, corrected)
        )
        assert got == pytest.approx(truth, rel=most), share


def test_lanes_count_by_their_work():
    """A lane that rests may take far longer than predicted, a busy one not; and it moves the rates less."""
    expected = expectation(TRUTH, place_by_share(52, 0.0))  # the link rests: weights go up, gradients came down

    def measured(kind: OpKind, factor: float) -> list[Timeline]:
        spans = expected.timeline(Compute(0.0, 0.2)).spans
        return [
            Timeline(
                tuple(Span(s.op, s.start, s.start + s.seconds * (factor if s.op.kind is kind else 1)) for s in spans)
            )
        ]

    slow_weights, slow_updates = measured(OpKind.PARAM_H2D, 1.4), measured(OpKind.UPDATE_CPU, 1.12)
    assert not lanes_are_off(expected, slow_weights, 1.1)
    assert lanes_are_off(expected, slow_updates, 1.1) and not lanes_are_off(expected, slow_updates, 1.15)
    cpu, link = (corrected_profile(expected, steps) for steps in (slow_updates, slow_weights))
    assert cpu.cpu_adam_param_params_per_s == pytest.approx(TRUTH.cpu_adam_param_params_per_s / 1.12, rel=0.02)
    assert link.cpu_adam_param_params_per_s == pytest.approx(TRUTH.cpu_adam_param_params_per_s, rel=0.05)


@pytest.mark.parametrize("off", OFF, ids=str)
def test_lanes_in_company_stay_the_slower_ones(off):
    """However a profile is corrected, no rate beside other lanes is above the one without them."""
    for share in (0.0, 0.4, 1.0):
        placement = place_by_share(52, share)
        measured = expectation(TRUTH, placement).timeline(Compute(0.0, 0.2))
        got = corrected_profile(expectation(wrong(TRUTH, **off), placement), [measured])
        for lane in ("h2d", "d2h"):
            alone, both, busy = (getattr(got, f"{lane}_{kind}bytes_per_s") for kind in ("", "both_", "busy_"))
            assert busy <= both <= alone
        for wire in ("fp32", "param"):
            assert got.cpu_adam_params_per_s(wire, busy=True) <= got.cpu_adam_params_per_s(wire, busy=False)


def test_corrections_are_bounded():
    """A machine that stood still for a while changes no rate by more than a factor of two."""
    placement = place_by_share(52, 0.5)
    for factor, bound in ((0.1, 0.5), (10.0, 2.0)):
        measured = expectation(TRUTH.scaled(factor), placement).timeline(Compute(0.0, 0.2))
        corrected = corrected_profile(expectation(TRUTH, placement), [measured])
        assert corrected.cpu_adam_param_busy_params_per_s == bound * TRUTH.cpu_adam_param_busy_params_per_s
        assert corrected.h2d_bytes_per_s == bound * TRUTH.h2d_bytes_per_s


def test_one_slow_update_does_not_count():
    """Medians over the steps: an update that met another job changes nothing."""
    expected = expectation(TRUTH, place_by_share(52, 0.5))
    fine, slow = (
        expected.timeline(Compute(0.0, 0.2)),
        expectation(TRUTH.scaled(0.3), expected.plan.placement).timeline(Compute(0.0, 0.2)),
    )
    assert corrected_profile(expected, [fine, slow, fine]) == replace(
        corrected_profile(expected, [fine] * 3), source=f"{TRUTH.source}, measured by 3 updates of training"
    )


def test_only_the_slow_lane_is_blamed():
    """CPU updates that take 20.8 ms where 18.0 were predicted change the CPU's rates alone, and the text says so."""
    expected = expectation(TRUTH, place_by_share(52, 0.5))
    spans = [
        Span(s.op, s.start, s.start + s.seconds * (20.8 / 18.0 if s.op.kind is OpKind.UPDATE_CPU else 1.0))
        for s in expected.timeline(Compute(0.0, 0.2)).spans
    ]
    corrected = corrected_profile(expected, [Timeline(tuple(spans))])
    ratio = corrected.cpu_adam_param_busy_params_per_s / TRUTH.cpu_adam_param_busy_params_per_s
    assert ratio == pytest.approx(18.0 / 20.8, rel=0.08)  # what it leaves of the memory is there for all lanes
    (text,) = rate_changes(TRUTH, corrected, "param")
    assert text.startswith("CPU updates run at 2.0") and text.endswith("instead of 2.50 G parameters/s")
    before, after = (_cpu_seconds(e) for e in (expected, replace(expected, profile=corrected)))
    assert after == pytest.approx(20.8 / 18.0 * before, rel=0.01)


def _cpu_seconds(expected: Expectation) -> float:
    spans = expected.timeline(Compute(0.0, 0.2)).spans
    return sum(span.seconds for span in spans if span.op.kind is OpKind.UPDATE_CPU)


def test_forgotten_rates_are_noticed(monkeypatch):
    """Without the factors of the CPU and of host memory the corrected profile misses the measured update, which it
    meets with them."""
    placement = place_by_share(52, 0.4)
    measured = expectation(TRUTH, placement).timeline(Compute(0.0, 0.2))
    believed = expectation(wrong(TRUTH, cpu=0.7), placement)

    def error() -> float:
        got = replace(believed, profile=corrected_profile(believed, [measured])).timeline(Compute(0.0, 0.2))
        return abs(got.in_place_seconds / measured.in_place_seconds - 1)

    assert error() < 0.03
    without = tuple(rate for rate in calibrate._RATES if rate[0] not in ("cpu", "memory"))
    monkeypatch.setattr(calibrate, "_RATES", without)
    monkeypatch.setattr(calibrate, "_ORDER", ())
    assert error() > 0.1
