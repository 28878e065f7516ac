"""Rates of a profile, corrected by what updates of training measured. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deep_offload.model.choose import Compute
from deep_offload.model.cost import dram_bytes
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.trace import Expectation, backward_seconds
from deep_offload.plan.ops import Lane, OpKind
from deep_offload.plan.timeline import Timeline

LEAST_FACTOR, MOST_FACTOR = 0.5, 2.0
"""A rate that is further off was measured on a machine in another state: training corrects it no further at once."""

TOLD_CHANGE = 0.03
"""Rates that change by less are not worth a word."""

_MOST_ROUNDS, _CLOSE = 24, 1e-3
"""Corrections in a row, and the error that ends them: lanes slow each other down, so that one is not enough."""

_RATES: Mapping[Lane, tuple[str, ...]] = {
    Lane.CPU: (
        "cpu_adam_fp32_params_per_s",
        "cpu_adam_param_params_per_s",
        "cpu_adam_fp32_busy_params_per_s",
        "cpu_adam_param_busy_params_per_s",
    ),
    Lane.GPU: ("gpu_adam_params_per_s",),
    Lane.H2D: ("h2d_bytes_per_s", "h2d_both_bytes_per_s", "h2d_busy_bytes_per_s"),
    Lane.D2H: ("d2h_bytes_per_s", "d2h_both_bytes_per_s", "d2h_busy_bytes_per_s"),
}
"""All rates of a lane, idle and busy: one factor holds for them."""

_Key = tuple[OpKind, int]
_LaneSeconds = Mapping[Lane, Mapping[_Key, float]]


def corrected_profile(expected: Expectation, steps: Sequence[Timeline]) -> HardwareProfile:
    """The profile whose simulation of `expected`'s plan takes the median times that `steps` (one or more) measured.

    One factor for each lane's rates, within LEAST_FACTOR..MOST_FACTOR; lanes without work keep theirs. Where lanes
    want more of host memory than it has on paper, its rate follows what they measured together.
    """
    measured = _lane_seconds(steps)
    compute = measured_compute(expected, steps)
    factors, profile = _Factors(dict.fromkeys(_RATES, 1.0), 1.0), expected.profile
    for _ in range(_MOST_ROUNDS):
        predicted = _lane_seconds([replace(expected, profile=profile).timeline(compute)])
        ratios = {lane: _ratio(predicted[lane], measured[lane]) for lane in _RATES}
        if all(abs(ratio - 1) < _CLOSE for ratio in ratios.values()):
            break
        factors = factors.corrected(ratios, _contending(expected, profile, measured))
        profile = _scaled(expected, factors)
    source = f"{expected.profile.source.split(', measured by ')[0]}, measured by {len(steps)} updates of training"
    return replace(profile, source=source)


def measured_compute(expected: Expectation, steps: Sequence[Timeline]) -> Compute:
    """What surrounds the updates: the last backward pass as measured, all else as the placement was chosen with."""
    backward = statistics.median(backward_seconds(step) for step in steps)
    return replace(expected.compute or Compute(0.0, 0.0), backward=backward)


def rate_changes(before: HardwareProfile, after: HardwareProfile, wire: str) -> list[str]:
    """What became of the rates that hold while all lanes work, by lane, for people; little changes are left out."""
    pairs = [
        (
            "CPU updates run at {1:.2f} instead of {0:.2f} G parameters/s",
            *(p.cpu_adam_params_per_s(wire, busy=True) for p in (before, after)),
        ),
        (
            "copies to the GPU run at {1:.1f} instead of {0:.1f} GB/s",
            *(p.h2d_busy_bytes_per_s for p in (before, after)),
        ),
        ("copies from it at {1:.1f} instead of {0:.1f} GB/s", *(p.d2h_busy_bytes_per_s for p in (before, after))),
        (
            "GPU updates run at {1:.0f} instead of {0:.0f} G parameters/s",
            *(p.gpu_adam_params_per_s for p in (before, after)),
        ),
    ]
    return [text.format(old / 1e9, new / 1e9) for text, old, new in pairs if abs(new / old - 1) >= TOLD_CHANGE]


def _lane_seconds(steps: Sequence[Timeline]) -> _LaneSeconds:
    """Median seconds of each operation, by lane: of the update phase, or of all where a lane rests in that phase.

    What ran before the norm met other work, backward passes and not updates.
    """
    everything: dict[Lane, dict[_Key, list[float]]] = {lane: {} for lane in _RATES}
    in_update: dict[Lane, dict[_Key, list[float]]] = {lane: {} for lane in _RATES}
    for step in steps:
        norm = step.norm_end
        for span in step.spans:
            lane, key = span.op.lane, (span.op.kind, span.op.subgroup)
            if lane is Lane.MAIN:
                continue
            everything[lane].setdefault(key, []).append(span.seconds)
            if span.start >= norm:
                in_update[lane].setdefault(key, []).append(span.seconds)
    chosen = {lane: in_update[lane] or everything[lane] for lane in _RATES}
    return {lane: {key: statistics.median(s) for key, s in ops.items()} for lane, ops in chosen.items()}


def _ratio(predicted: Mapping[_Key, float], measured: Mapping[_Key, float]) -> float:
    """How much too slow a lane is on paper, by the operations that both sides know; 1 where there are none."""
    common = predicted.keys() & measured.keys()
    on_paper, in_truth = (sum(side[key] for key in common) for side in (predicted, measured))
    return on_paper / in_truth if on_paper > 0 and in_truth > 0 else 1.0


@dataclass(frozen=True, slots=True)
class _Factors:
    """What each lane's rates and those of host memory are multiplied by."""

    lanes: Mapping[Lane, float]
    memory: float

    def corrected(self, ratios: Mapping[Lane, float], contending: Mapping[Lane, float]) -> _Factors:
        """By lanes' ratios; contending: bytes/s of lanes that share the whole of host memory, empty where it is not
        the limit."""
        memory = self.memory
        if contending:
            memory *= sum(ratios[lane] * rate for lane, rate in contending.items()) / sum(contending.values())
        lanes = {lane: _bounded(factor * ratios[lane]) for lane, factor in self.lanes.items()}
        return _Factors(lanes, _bounded(memory))


def _bounded(factor: float) -> float:
    return min(MOST_FACTOR, max(LEAST_FACTOR, factor))


def _scaled(expected: Expectation, factors: _Factors) -> HardwareProfile:
    profile = expected.profile
    rates = {name: getattr(profile, name) * factors.lanes[lane] for lane, names in _RATES.items() for name in names}
    for name in ("dram_bytes_per_s", "host_dram_bytes_per_s"):
        rates[name] = getattr(profile, name) * factors.memory
    scaled = replace(profile, **rates)
    together = sum(_memory_rates(expected, scaled, busy=True).values())  # what lanes reach, memory gives
    dram = max(scaled.dram_bytes_per_s, together)
    host = max(scaled.host_dram_bytes_per_s, expected.num_ranks * together)
    return replace(scaled, dram_bytes_per_s=dram, host_dram_bytes_per_s=host)


def _memory_rates(expected: Expectation, profile: HardwareProfile, *, busy: bool) -> dict[Lane, float]:
    """Bytes/s of host memory that each lane takes while all others work, or would take if it were endless."""
    layout, state = expected.layout, expected.state
    traffic = sum(dram_bytes(OpKind.UPDATE_CPU, s, state) for s in layout.subgroups) / max(1, layout.numel)
    return {
        Lane.CPU: profile.cpu_adam_params_per_s(state.wire, busy=busy) * traffic,
        Lane.H2D: profile.h2d_busy_bytes_per_s if busy else profile.h2d_both_bytes_per_s,
        Lane.D2H: profile.d2h_busy_bytes_per_s if busy else profile.d2h_both_bytes_per_s,
    }


def _contending(expected: Expectation, profile: HardwareProfile, measured: _LaneSeconds) -> dict[Lane, float]:
    """Lanes with work that together want more of host memory than it has: what each keeps of it, bytes/s."""
    wanted = _memory_rates(expected, profile, busy=False)
    lanes = [lane for lane in wanted if measured[lane]]
    if sum(wanted[lane] for lane in lanes) <= profile.rank_dram_bytes_per_s(expected.num_ranks):
        return {}
    kept = _memory_rates(expected, profile, busy=True)
    return {lane: kept[lane] for lane in lanes}
