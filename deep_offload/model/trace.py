"""Measured steps with predicted lanes beside them, as a Chrome/Perfetto trace with counters. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deep_offload.model.choose import Compute
from deep_offload.model.cost import StateFormat, dram_bytes
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import device_state_bytes
from deep_offload.model.performance import DRAM, share_of_bound
from deep_offload.model.simulator import Play, Simulation, iteration_cost, settled_iteration, simulate
from deep_offload.plan.draw import chrome_trace
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Lane, OpKind, Plan
from deep_offload.plan.timeline import BACKWARD, FORWARD, Phase, Span, Timeline, covered_seconds

MEASURED, PREDICTED = "measured", "predicted"

_TOO_FAST = 1.25
"""Share of a bound above which the profile cannot be this machine's, as it is now."""


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """One measured update. seconds: from the norm to its last operation; share_of_bound: of all these seconds, 1 where
    the binding lane never stood still; busy: share of each lane and of host memory; attributed: part of the time in
    which a lane works; in_place_seconds: from the norm until all parameters are in place, which predictions are of."""

    seconds: float
    share_of_bound: float
    lane: str
    busy: dict[str, float]
    attributed: float
    in_place_seconds: float

    def __str__(self) -> str:
        times = f"{self.in_place_seconds * 1e3:.1f} ms ({self.seconds * 1e3:.1f} with the last flush)"
        text = f"{times}, {100 * self.share_of_bound:.0f} % of bound, bound by {self.lane}"
        return text if self.share_of_bound < _TOO_FAST else text + " (faster than the profile: measure again)"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a rank's engine was chosen by: enough to predict any of its steps and to judge a measured one.

    update_seconds: predicted from norm to parameters in place; num_ranks: ranks of this host at work; compute: as the
    placement was chosen with.
    """

    plan: Plan
    layout: ShardLayout
    state: StateFormat
    profile: HardwareProfile
    num_ranks: int
    update_seconds: float
    binding_lane: str
    compute: Compute | None = None

    def share_of_bound(self, timeline: Timeline) -> tuple[float, str]:
        """How near a measured update came to the bound of its own work (1: there), and the lane that sets it."""
        return share_of_bound(timeline, self.layout, self.state, self.profile, num_ranks=self.num_ranks)

    def judge(self, timeline: Timeline) -> UpdateFacts | None:
        """A measured update in numbers; None if it held no work."""
        if not timeline.update_spans:
            return None
        share, lane = self.share_of_bound(timeline)
        busy = {work.value: timeline.busy_share(work) for work in Lane if work is not Lane.MAIN}
        busy[DRAM] = self._memory_share(timeline)
        attributed = attributed_share(timeline)
        return UpdateFacts(timeline.update_seconds, share, lane, busy, attributed, timeline.in_place_seconds)

    def _memory_share(self, timeline: Timeline) -> float:
        """Bytes of host memory that an update moves, over what its bandwidth allows in that time."""
        moved = sum(
            part * dram_bytes(span.op.kind, self.layout.subgroups[span.op.subgroup], self.state)
            for span, part in timeline.update_parts
        )
        return moved / self.profile.rank_dram_bytes_per_s(self.num_ranks) / timeline.update_seconds

    def timeline(self, compute: Compute) -> Timeline:
        """An iteration of a long training around this compute, whose forward pass follows the update."""
        return self.settled(compute).timeline

    def settled(self, compute: Compute) -> Simulation:
        """As `timeline`, with the seconds from norm to norm."""
        return settled_iteration(self.play(compute))

    def cost(self, compute: Compute) -> float:
        """About those seconds, sooner."""
        return iteration_cost(self.play(compute))

    def play(self, compute: Compute) -> Play:
        """What plays some iterations around this compute."""
        return partial(
            simulate,
            self.plan,
            self.layout,
            self.state,
            self.profile,
            forward_seconds=compute.forward,
            backward_seconds=compute.backward,
            other_seconds=compute.other,
            num_ranks=self.num_ranks,
        )


def backward_seconds(timeline: Timeline) -> float:
    """From the first final gradient to the norm."""
    first = min((s.end for s in timeline.spans if s.op.kind is OpKind.GRADS_READY), default=0.0)
    return max(0.0, timeline.norm_end - first)


def forward_seconds(step: Timeline, following: Timeline) -> float:
    """The first forward pass behind a step's update, which is of the following step, without what it waited for."""
    passes = (phase for phase in following.phases if phase.kind == FORWARD)
    first = next(passes, None)
    if first is None:
        return 0.0
    waits = ((span.start - span.waited, span.start) for span in step.spans if span.waited > 0)
    return first.seconds - covered_seconds(waits, first.start, first.end)


def other_seconds(step: Timeline) -> float:
    """From the end of a step's first forward pass to the beginning of its last backward pass; 0 if not recorded."""
    ends = [phase.end for phase in step.phases if phase.kind == FORWARD]
    begins = [phase.start for phase in step.phases if phase.kind == BACKWARD]
    return max(0.0, max(begins) - min(ends)) if ends and begins else 0.0


def shifted(timeline: Timeline, seconds: float) -> Timeline:
    """The same, later."""
    return Timeline(
        tuple(Span(s.op, s.start + seconds, s.end + seconds, s.num_bytes, s.waited) for s in timeline.spans),
        tuple(Phase(p.kind, p.micro_batch, p.start + seconds, p.end + seconds) for p in timeline.phases),
        tuple((at + seconds, num_bytes) for at, num_bytes in timeline.allocated),
    )


def run_trace(steps: Sequence[Timeline], expected: Expectation | None) -> dict[str, Any]:
    """Trace events of steps with one clock. Each step's prediction starts its update when the measured one did.

    Counters of the measured lanes: GB/s of each direction and of host memory; bytes of state on the device, resident
    and in staging slots; all bytes that torch's allocator gave out there.
    """
    measured = _joined(steps)
    timelines = {MEASURED: measured}
    if expected is not None and steps:
        timelines[PREDICTED] = _joined(_predictions(steps, expected))
    trace = chrome_trace(timelines)
    trace["traceEvents"] += _state_counter(measured, expected)
    trace["traceEvents"] += [_sample("GPU bytes allocated", at, size / 2**20) for at, size in measured.allocated]
    if expected is not None:
        trace["traceEvents"] += _memory_counter(measured, expected)
    return trace


def _predictions(steps: Sequence[Timeline], expected: Expectation) -> list[Timeline]:
    """Each step as simulated, at its place. A forward pass ends where the next step's backward pass begins."""
    predictions: list[Timeline] = []
    cut = math.inf
    for step, following in reversed(list(zip(steps, [*steps[1:], None]))):
        forward = forward_seconds(step, following) if following is not None else 0.0
        prediction = expected.timeline(Compute(forward, backward_seconds(step), other_seconds(step)))
        moved = shifted(prediction, step.norm_end - prediction.norm_end)
        spans = [
            replace(s, start=min(s.start, cut), end=min(s.end, cut)) if s.op.lane is Lane.MAIN else s
            for s in moved.spans
        ]
        predictions.append(Timeline(tuple(spans)))
        cut = min((s.start for s in spans if s.op.kind is OpKind.GRADS_READY), default=cut)
    return predictions[::-1]


def _joined(steps: Sequence[Timeline]) -> Timeline:
    return Timeline(
        tuple(span for step in steps for span in step.spans),
        tuple(phase for step in steps for phase in step.phases),
        tuple(sample for step in steps for sample in step.allocated),
    )


def _sample(name: str, at: float, value: float, unit: str = "MiB") -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": 0, "ts": at * 1e6, "args": {unit: round(value, 3)}}


def _counter(name: str, changes: list[tuple[float, float]], unit: str, total: float = 0.0) -> list[dict[str, Any]]:
    """Events of a running sum from `total` on; changes: (seconds, amount)."""
    events: list[dict[str, Any]] = []
    for at, change in sorted(changes):
        total += change
        events.append(_sample(name, at, total, unit))
    return events


def _state_counter(timeline: Timeline, expected: Expectation | None) -> list[dict[str, Any]]:
    """MiB of state on the device: what is resident, and each slot from the start of a prefetch to the end of its flush.

    Without an expectation nothing is offloaded, and what is resident is not known here.
    """
    if expected is None or not timeline.spans:
        return []
    placement, slots = expected.plan.placement, expected.plan.num_slots
    resident = device_state_bytes(expected.layout, placement, expected.state, slots).resident
    at = min(span.start for span in timeline.spans)
    changes: list[tuple[float, float]] = []
    staged: dict[int, float] = {}
    for span in timeline.spans:
        mebibytes = span.num_bytes / 2**20
        if span.op.kind is OpKind.PREFETCH:
            staged[span.op.subgroup] = mebibytes
            changes.append((span.start, mebibytes))
        elif span.op.kind is OpKind.FLUSH and span.op.subgroup in staged:
            changes.append((span.end, -staged.pop(span.op.subgroup)))
    return [_sample("GPU bytes", at, resident / 2**20), *_counter("GPU bytes", changes, "MiB", resident / 2**20)]


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
    start, total = timeline.norm_end, timeline.update_seconds
    if total <= 0:
        return 1.0
    return min(1.0, covered_seconds(((s.start, s.end) for s in timeline.update_spans), start, start + total) / total)


def explained_share(steps: Sequence[Timeline]) -> float:
    """Part of the time from the first step's norm to the last one's in which a lane works, or the loop computes or
    waits; 1 for fewer than two steps."""
    start, end = (steps[0].norm_end, steps[-1].norm_end) if steps else (0.0, 0.0)
    if end <= start:
        return 1.0
    work = [(span.start - span.waited, span.end) for step in steps for span in step.spans]
    work += [(phase.start, phase.end) for step in steps for phase in step.phases]
    return covered_seconds(work, start, end) / (end - start)
