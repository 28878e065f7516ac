"""Rates of a profile, corrected by what updates of training measured. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from deep_offload.model.choose import Compute
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.trace import Expectation, backward_seconds
from deep_offload.plan.ops import Lane, OpKind
from deep_offload.plan.timeline import Timeline

LEAST_FACTOR, MOST_FACTOR = 0.5, 2.0
"""A rate that is further off was measured on a machine in another state: training corrects it no further at once."""

TOLD_CHANGE = 0.03
"""Rates that change by less are not worth a word."""

_CLOSE = 5e-3
"""Lanes that are off by less are right."""

_MOST_ROUNDS, _STEP, _PARTS_OF_A_STEP = 6, 0.03, (1.0, 0.5, 0.25)
"""Linearizations, since lanes slow each other down; the change of a rate's logarithm that shows what it does; and how
much of what one says may be done."""

_RATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cpu", ("cpu_adam_fp32_params_per_s", "cpu_adam_param_params_per_s")),
    ("cpu", ("cpu_adam_fp32_busy_params_per_s", "cpu_adam_param_busy_params_per_s")),
    ("h2d", ("h2d_bytes_per_s",)),
    ("h2d", ("h2d_both_bytes_per_s",)),
    ("h2d", ("h2d_busy_bytes_per_s",)),
    ("d2h", ("d2h_bytes_per_s",)),
    ("d2h", ("d2h_both_bytes_per_s",)),
    ("d2h", ("d2h_busy_bytes_per_s",)),
    ("memory", ("dram_bytes_per_s", "host_dram_bytes_per_s")),
    ("gpu", ("gpu_adam_params_per_s",)),
)
"""What is corrected, each with one factor, and whose rate it is. The rates of a lane alone and beside others are apart:
an update shows those that it runs at, and says less about the others."""

_SAME_LANE, _SAME_HOST, _NOISE = 0.8, 0.3, 0.1
"""What is believed before: how much rates of one lane, and any two of a host, are wrong together (correlations of
their logarithms), and how little the busiest lane's time is to be trusted (its standard deviation over a rate's)."""

_ORDER = (
    ("cpu_adam_fp32_busy_params_per_s", "cpu_adam_fp32_params_per_s"),
    ("cpu_adam_param_busy_params_per_s", "cpu_adam_param_params_per_s"),
    ("h2d_both_bytes_per_s", "h2d_bytes_per_s"),
    ("h2d_busy_bytes_per_s", "h2d_both_bytes_per_s"),
    ("d2h_both_bytes_per_s", "d2h_bytes_per_s"),
    ("d2h_busy_bytes_per_s", "d2h_both_bytes_per_s"),
)
"""Rates of which the first is never above the second, each pair before those that it limits."""

_LaneSeconds = Mapping[Lane, Mapping[tuple[OpKind, int], float]]
_Logs = Sequence[float]
"""Logarithms of the factors of `_RATES`."""

_Errors = Callable[[_Logs], Mapping[Lane, float]]
"""By how much (logarithm) lanes with work take longer on paper than in truth, with these factors."""


def corrected_profile(expected: Expectation, steps: Sequence[Timeline]) -> HardwareProfile:
    """The profile that most likely took the median times which `steps` (one or more) measured of `expected`'s plan.

    Every rate of `_RATES` may be wrong, those of a lane and of the host rather together than apart; what the four
    lanes' times say about them is the usual estimate (one Kalman update for each lane, linearized again and again). So
    a rate that this plan does not use only moves with those that it resembles, in part. All factors are within
    LEAST_FACTOR..MOST_FACTOR; a profile that is right stays as it is.
    """
    measured, compute = _lane_seconds(steps), measured_compute(expected, steps)
    iterations = _iterations(expected, compute)

    def errors(logs: _Logs) -> dict[Lane, float]:
        believed = replace(expected, profile=_scaled(expected.profile, logs))
        return _errors(_lane_seconds([believed.play(compute)(**iterations).timeline]), measured)

    logs = _searched(errors, _weights(measured))
    source = f"{expected.profile.source.split(', measured by ')[0]}, measured by {len(steps)} updates of training"
    profile = _scaled(expected.profile, logs) if any(logs) else expected.profile
    return replace(profile, source=source)


def lanes_are_off(expected: Expectation, steps: Sequence[Timeline], tolerance: float) -> bool:
    """Whether a lane took so many times as long as predicted, or as short; one that mostly rests may do so more."""
    measured, compute = _lane_seconds(steps), measured_compute(expected, steps)
    played = expected.play(compute)(**_iterations(expected, compute))
    errors = _errors(_lane_seconds([played.timeline]), measured)
    weights = _weights(measured)
    return any(abs(error) * weights[lane] > math.log(tolerance) for lane, error in errors.items())


def _iterations(expected: Expectation, compute: Compute) -> dict[str, int]:
    """Iterations to play, and following ones: one where last flushes meet prefetches. The same for all factors of a
    correction, whose slopes would else hold the step from one to the other."""
    second = {"num_iterations": 2, "num_following": 0}
    return {"num_iterations": 3, "num_following": 1} if expected.play(compute)(**second).piles_up else second


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
    lanes = [lane for lane in Lane if lane is not Lane.MAIN]
    everything: dict[Lane, dict[tuple[OpKind, int], list[float]]] = {lane: {} for lane in lanes}
    in_update: dict[Lane, dict[tuple[OpKind, int], list[float]]] = {lane: {} for lane in lanes}
    for step in steps:
        norm = step.norm_end
        for span in step.spans:
            lane, key = span.op.lane, (span.op.kind, span.op.subgroup)
            if lane is Lane.MAIN:
                continue
            everything[lane].setdefault(key, []).append(span.seconds)
            if span.start >= norm:
                in_update[lane].setdefault(key, []).append(span.seconds)
    chosen = {lane: in_update[lane] or everything[lane] for lane in lanes}
    return {lane: {key: statistics.median(s) for key, s in ops.items()} for lane, ops in chosen.items()}


def _errors(predicted: _LaneSeconds, measured: _LaneSeconds) -> dict[Lane, float]:
    """By how much (logarithm) lanes take longer on paper than in truth, by the operations that both sides know."""
    errors = {}
    for lane in measured:
        common = [key for key in measured[lane] if key in predicted[lane]]  # in order: so are the sums
        on_paper, in_truth = (sum(side[lane][key] for key in common) for side in (predicted, measured))
        if on_paper > 0 and in_truth > 0:
            errors[lane] = math.log(on_paper / in_truth)
    return errors


def _weights(measured: _LaneSeconds) -> dict[Lane, float]:
    """Work of each lane over that of the busiest: what a lane that rests takes longer hardly matters, and varies."""
    work = {lane: sum(seconds.values()) for lane, seconds in measured.items()}
    return {lane: seconds / max(work.values()) for lane, seconds in work.items() if seconds > 0}


def _searched(errors: _Errors, weights: Mapping[Lane, float]) -> _Logs:
    """The most likely factors. Each round's are taken as far as they bring the lanes' times nearer: where one lane's
    rate suddenly starts to matter, a straight line says too much."""

    def miss(here: Mapping[Lane, float]) -> float:
        return sum((weights[lane] * error) ** 2 for lane, error in here.items())

    logs: _Logs = [0.0] * len(_RATES)
    here = errors(logs)
    for _ in range(_MOST_ROUNDS):
        if all(abs(error) < _CLOSE for error in here.values()):
            break
        aim = _most_likely(logs, here, _slopes(logs, here, errors), weights)
        for part in _PARTS_OF_A_STEP:
            new = [log + part * (best - log) for log, best in zip(logs, aim)]
            there = errors(new)
            if miss(there) < miss(here):
                break
        else:
            break
        logs, here = new, there
    return logs


def _slopes(logs: _Logs, here: Mapping[Lane, float], errors: _Errors) -> dict[Lane, list[float]]:
    """What a change of each rate does to each lane's time, logarithms by logarithms."""
    slopes: dict[Lane, list[float]] = {lane: [] for lane in here}
    for i in range(len(logs)):
        there = errors([log - _STEP * (i == j) for j, log in enumerate(logs)])
        for lane, error in here.items():
            slopes[lane].append((error - there[lane]) / _STEP)
    return slopes


def _most_likely(
    logs: _Logs, here: Mapping[Lane, float], slopes: Mapping[Lane, Sequence[float]], weights: Mapping[Lane, float]
) -> list[float]:
    """The factors that explain the lanes' errors, which are `here` at `logs` and have these slopes."""
    estimate = [0.0] * len(logs)
    covariance = [[_correlation(a, b) if i != j else 1.0 for j, b in enumerate(_RATES)] for i, a in enumerate(_RATES)]
    for lane, slope in slopes.items():
        gain = [_dot(row, slope) for row in covariance]
        variance = _dot(slope, gain) + (_NOISE / weights[lane]) ** 2
        missing = _dot(slope, logs) - here[lane] - _dot(slope, estimate)
        estimate = [log + g * missing / variance for log, g in zip(estimate, gain)]
        covariance = [[c - a * b / variance for c, b in zip(row, gain)] for row, a in zip(covariance, gain)]
    return [min(math.log(MOST_FACTOR), max(math.log(LEAST_FACTOR), log)) for log in estimate]


def _correlation(a: tuple[str, object], b: tuple[str, object]) -> float:
    if a[0] == b[0]:
        return _SAME_LANE
    return 0.0 if "gpu" in (a[0], b[0]) else _SAME_HOST


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b))


def _scaled(profile: HardwareProfile, logs: _Logs) -> HardwareProfile:
    """The profile with these factors; no rate beside other lanes is above the one without them."""
    rates = {name: getattr(profile, name) * math.exp(log) for (_, names), log in zip(_RATES, logs) for name in names}
    for slower, faster in _ORDER:
        rates[slower] = min(rates[slower], rates[faster])
    return replace(profile, **rates)
