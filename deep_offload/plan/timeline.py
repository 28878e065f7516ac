"""What a plan's operations did, measured or simulated: the only source of drawings, traces and busy shares."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one iteration, in plan order."""

    spans: tuple[Span, ...]

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.op.lane is lane)

    def start_of(self, kind: OpKind) -> float | None:
        """Earliest start of an op of this kind."""
        return min((span.start for span in self.spans if span.op.kind is kind), default=None)

    @property
    def update_spans(self) -> tuple[Span, ...]:
        """Work of the update phase: what starts after the norm is known, external ops aside."""
        norm = max((span.end for span in self.spans if span.op.kind is OpKind.NORM_READY), default=0.0)
        return tuple(s for s in self.spans if s.op.lane is not Lane.MAIN and s.end > norm)

    @property
    def update_seconds(self) -> float:
        """From the norm to the last update, flush or upload."""
        norm = max((span.end for span in self.spans if span.op.kind is OpKind.NORM_READY), default=0.0)
        return max((span.end for span in self.update_spans), default=norm) - norm

    def busy_share(self, lane: Lane) -> float:
        """Share of the update phase during which the lane works."""
        total = self.update_seconds
        norm = max((span.end for span in self.spans if span.op.kind is OpKind.NORM_READY), default=0.0)
        busy = sum(s.end - max(s.start, norm) for s in self.update_spans if s.op.lane is lane)
        return busy / total if total > 0 else 0.0
