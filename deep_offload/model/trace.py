"""Measured steps with predicted lanes beside them, as a Chrome/Perfetto trace with counters. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deep_offload.model.cost import StateFormat, dram_bytes, op_seconds
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.performance import share_of_bound
from deep_offload.model.simulator import simulate
from deep_offload.plan.draw import chrome_trace
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Lane, OpKind, Plan
from deep_offload.plan.planner import build_plan
from deep_offload.plan.timeline import Span, Timeline

MEASURED, PREDICTED = "measured", "predicted"

_TOO_FAST = 1.25
"""Share of a bound above which the profile cannot be this machine's, as it is now."""


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """One measured update. seconds: from the norm to its last operation; share_of_bound: 1 where the binding lane never
    stood still; busy: share of each lane; attributed: part of the time in which at least one lane works."""

    seconds: float
    share_of_bound: float
    lane: str
    busy: dict[str, float]
    attributed: float

    def __str__(self) -> str:
        text = f"{self.seconds * 1e3:.1f} ms, {100 * self.share_of_bound:.0f} % of bound, bound by {self.lane}"
        return text if self.share_of_bound < _TOO_FAST else text + " (faster than the profile: measure again)"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a rank's engine was chosen by: enough to predict any of its steps and to judge a measured one.

    update_seconds: predicted from norm to parameters in place; num_ranks: ranks of this host at work.
    """

    plan: Plan
    layout: ShardLayout
    state: StateFormat
    profile: HardwareProfile
    num_ranks: int
    update_seconds: float
    binding_lane: str

    def share_of_bound(self, timeline: Timeline) -> tuple[float, str]:
        """How near a measured update came to the bound of its own work (1: there), and the lane that sets it."""
        return share_of_bound(timeline, self.layout, self.state, self.profile, num_ranks=self.num_ranks)

    def judge(self, timeline: Timeline) -> UpdateFacts | None:
        """A measured update in numbers; None if it held no work."""
        if not timeline.update_spans:
            return None
        share, lane = self.share_of_bound(timeline)
        busy = {work.value: timeline.busy_share(work) for work in Lane if work is not Lane.MAIN}
        return UpdateFacts(timeline.update_seconds, share, lane, busy, attributed_share(timeline))

    def timeline(self, backward_seconds: float) -> Timeline:
        """The second of two iterations with this backward pass and no forward pass."""
        seconds = op_seconds(self.layout, self.state, self.profile)
        plan = build_plan(self.layout, self.plan.placement, self.plan.num_slots, seconds)
        played = simulate(
            plan,
            self.layout,
            self.state,
            self.profile,
            backward_seconds=backward_seconds,
            num_iterations=2,
            num_ranks=self.num_ranks,
        )
        return played.timeline


def norm_end(timeline: Timeline) -> float:
    """When the gradient norm was known, the moment that predicted and measured lanes are laid side by side at."""
    return max((span.end for span in timeline.spans if span.op.kind is OpKind.NORM_READY), default=0.0)


def backward_seconds(timeline: Timeline) -> float:
    """From the first final gradient to the norm."""
    first = min((s.end for s in timeline.spans if s.op.kind is OpKind.GRADS_READY), default=0.0)
    return max(0.0, norm_end(timeline) - first)


def shifted(timeline: Timeline, seconds: float) -> Timeline:
    """The same spans, later."""
    return Timeline(
        tuple(Span(s.op, s.start + seconds, s.end + seconds, s.num_bytes, s.waited) for s in timeline.spans)
    )


def run_trace(steps: Sequence[Timeline], expected: Expectation | None) -> dict[str, Any]:
    """Trace events of steps with one clock. Each step's prediction starts its update when the measured one did.

    Counters of the measured lanes: GB/s of each direction and of host memory, bytes in staging slots.
    """
    measured = _joined(steps)
    timelines = {MEASURED: measured}
    if expected is not None and steps:
        predictions = []
        for step in steps:
            prediction = expected.timeline(backward_seconds(step))
            predictions.append(shifted(prediction, norm_end(step) - norm_end(prediction)))
        timelines[PREDICTED] = _joined(predictions)
    trace = chrome_trace(timelines)
    trace["traceEvents"] += _staged_counter(measured)
    if expected is not None:
        trace["traceEvents"] += _memory_counter(measured, expected)
    return trace


def _joined(steps: Sequence[Timeline]) -> Timeline:
    return Timeline(tuple(span for step in steps for span in step.spans))


def _counter(name: str, changes: list[tuple[float, float]], unit: str) -> list[dict[str, Any]]:
    """Events of a running sum; changes: (seconds, amount)."""
    events: list[dict[str, Any]] = []
    total = 0.0
    for at, change in sorted(changes):
        total += change
        events.append({"ph": "C", "name": name, "pid": 0, "ts": at * 1e6, "args": {unit: round(total, 3)}})
    return events


def _staged_counter(timeline: Timeline) -> list[dict[str, Any]]:
    """MiB of state in staging slots: from the start of a prefetch to the end of the flush."""
    changes: list[tuple[float, float]] = []
    staged: dict[int, float] = {}
    for span in timeline.spans:
        mebibytes = span.num_bytes / 2**20
        if span.op.kind is OpKind.PREFETCH:
            staged[span.op.subgroup] = mebibytes
            changes.append((span.start, mebibytes))
        elif span.op.kind is OpKind.FLUSH and span.op.subgroup in staged:
            changes.append((span.end, -staged.pop(span.op.subgroup)))
    return _counter("GPU staging", changes, "MiB")


def _memory_counter(timeline: Timeline, expected: Expectation) -> list[dict[str, Any]]:
    """GB/s of host memory, counted from what operations read and write."""
    changes: list[tuple[float, float]] = []
    for span in timeline.spans:
        if span.op.lane is Lane.MAIN or span.seconds <= 0:
            continue
        traffic = dram_bytes(span.op.kind, expected.layout.subgroups[span.op.subgroup], expected.state)
        if traffic:
            rate = traffic / span.seconds / 1e9
            changes += [(span.start, rate), (span.end, -rate)]
    return _counter("host memory GB/s", changes, "GB/s")


def attributed_share(timeline: Timeline) -> float:
    """Part of the update phase during which at least one lane works: what the trace explains."""
    start = norm_end(timeline)
    total = timeline.update_seconds
    covered, reached = 0.0, start
    for span in sorted(timeline.update_spans, key=lambda s: s.start):
        if span.end > reached:
            covered += span.end - max(span.start, reached)
            reached = span.end
    return min(1.0, covered / total) if total > 0 else 1.0
