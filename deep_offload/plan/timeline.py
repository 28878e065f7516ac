"""What a plan's operations did, measured or simulated: the only source of drawings, traces and busy shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deep_offload.plan.ops import Lane, Op, OpKind


@dataclass(frozen=True, slots=True)
class Span:
    """One op from `start` to `end`, seconds since the timeline's origin; `num_bytes` moved over the link or 0.

    waited: seconds before `start` that the training loop stood still for it (external ops only).
    """

    op: Op
    start: float
    end: float
    num_bytes: int = 0
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


FORWARD, BACKWARD, NORM = "forward", "backward", "norm"


@dataclass(frozen=True, slots=True)
class Phase:
    """What the training loop itself did from `start` to `end`, seconds since the timeline's origin.

    kind: FORWARD, BACKWARD (until the next forward pass, or the optimizer's step begins) or NORM (until the gradient
    norm is known); micro_batch counts from 0, -1: none.
    """

    kind: str
    micro_batch: int
    start: float
    end: float

    @property
    def label(self) -> str:
        """Short name for drawings, such as `forward 1`; micro-batches count from 1 there."""
        return self.kind if self.micro_batch < 0 else f"{self.kind} {self.micro_batch + 1}"

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one iteration, in plan order.

    phases: the training loop's own work before the update, where it was measured. allocated: (seconds, bytes) that
    torch's allocator gave out on the device at the borders of phases.
    """

    spans: tuple[Span, ...]
    phases: tuple[Phase, ...] = ()
    allocated: tuple[tuple[float, int], ...] = ()

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.op.lane is lane)

    def start_of(self, kind: OpKind) -> float | None:
        """Earliest start of an op of this kind."""
        return min((span.start for span in self.spans if span.op.kind is kind), default=None)

    @property
    def norm_end(self) -> float:
        """When the gradient norm was known: the start of the update."""
        return max((span.end for span in self.spans if span.op.kind is OpKind.NORM_READY), default=0.0)

    @property
    def update_spans(self) -> tuple[Span, ...]:
        """Work of the update phase: what starts after the norm is known, external ops aside."""
        norm = self.norm_end
        return tuple(s for s in self.spans if s.op.lane is not Lane.MAIN and s.end > norm)

    @property
    def update_parts(self) -> tuple[tuple[Span, float], ...]:
        """`update_spans` and the part of each (0..1) that lies in the update phase: the norm cuts some in two."""
        norm = self.norm_end
        return tuple(
            (span, (span.end - max(span.start, norm)) / span.seconds if span.seconds > 0 else 1.0)
            for span in self.update_spans
        )

    @property
    def update_seconds(self) -> float:
        """From the norm to the last update, flush or upload."""
        norm = self.norm_end
        return max((span.end for span in self.update_spans), default=norm) - norm

    @property
    def in_place_seconds(self) -> float:
        """From the norm until the last parameter is updated and on the device; flushes may go on behind it."""
        norm = self.norm_end
        writers = (s for s in self.spans if s.op.kind in (OpKind.UPDATE_GPU, OpKind.PARAM_H2D))
        return max((span.end for span in writers), default=norm) - norm

    def busy_share(self, lane: Lane) -> float:
        """Share of the update phase during which the lane works."""
        total = self.update_seconds
        norm = self.norm_end
        busy = sum(s.end - max(s.start, norm) for s in self.update_spans if s.op.lane is lane)
        return busy / total if total > 0 else 0.0


def covered_seconds(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """How much of [start, end] at least one of the intervals (start, end) covers."""
    covered, reached = 0.0, start
    for first, last in sorted(intervals):
        last = min(last, end)
        if last > reached:
            covered += last - max(first, reached)
            reached = last
    return covered
