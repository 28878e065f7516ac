"""A timeline as text lanes, and as a Chrome/Perfetto trace that reads back into the same timeline."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from deep_offload.plan.ops import NO_SUBGROUP, Lane, OpKind, parse_op
from deep_offload.plan.timeline import BACKWARD, FORWARD, NORM, Phase, Span, Timeline

_FILL = {
    OpKind.GRADS_READY: "<",
    OpKind.PARAMS_NEEDED: ">",
    OpKind.NORM_READY: "|",
    OpKind.GRADS_REUSABLE: "|",
    OpKind.GRAD_FLUSH: "-",
    OpKind.PARAM_H2D: "-",
    OpKind.PREFETCH: "=",
    OpKind.FLUSH: "=",
    OpKind.UPDATE_CPU: "#",
    OpKind.UPDATE_GPU: "#",
}
_PHASE_FILL = {FORWARD: ">", BACKWARD: "<", NORM: "|"}
LEGEND = (
    "# update, = state (h2d prefetch, d2h flush), - gradients (d2h) and weights (h2d), < backward, > next forward, "
    "numbers are subgroups, % is the busy share of the update"
)
_MOST = 1e18
"""More seconds, bytes or iterations than a run has, and far below what arithmetic with floats can take."""


def draw_lanes(timeline: Timeline, width: int = 100) -> str:
    """Return one line of `width` characters per lane, a scale in milliseconds and a legend.

    A span takes at least one character; its subgroup's number is written where it fits.
    """
    end = max((span.end for span in (*timeline.spans, *timeline.phases)), default=0.0)
    if end <= 0:
        return "(an empty timeline)"
    lines = []
    for lane in Lane:
        row = [" "] * width
        for phase in timeline.phases if lane is Lane.MAIN else ():
            _fill(row, phase.start / end, phase.end / end, _PHASE_FILL[phase.kind])
        for span in timeline.lane(lane):
            _draw_span(row, span, end)
        share = "" if lane is Lane.MAIN else f" {100 * timeline.busy_share(lane):3.0f} %"
        lines.append(f"{lane.value:>4} |{''.join(row)}|{share}")
    lines.append(" " * 5 + _scale(end, width))
    lines.append(LEGEND)
    return "\n".join(lines)


def _draw_span(row: list[str], span: Span, end: float) -> None:
    first, last = _fill(row, span.start / end, span.end / end, _FILL[span.op.kind])
    label = "" if span.op.subgroup == NO_SUBGROUP else str(span.op.subgroup)
    if len(label) < last - first:
        row[first : first + len(label)] = label


def _fill(row: list[str], start: float, end: float, letter: str) -> tuple[int, int]:
    """Write one letter between two parts of the row, at least once; returns where."""
    width = len(row)
    first = min(width - 1, int(start * width))
    last = max(first + 1, min(width, round(end * width)))
    row[first:last] = letter * (last - first)
    return first, last


def _scale(end: float, width: int) -> str:
    """Ticks at 0, 1/4, 1/2, 3/4 and the end."""
    row = [" "] * (width + 14)
    for i in range(5):
        position = i * width // 4
        text = f"'{1e3 * end * i / 4:.4g}" + (" ms" if i == 4 else "")
        row[position : position + len(text)] = text
    return "".join(row).rstrip()


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return trace events for chrome://tracing and ui.perfetto.dev: one process per timeline, one thread per lane.

    An event's args hold the operation's text, subgroup, slot and bytes; main has the loop's own phases too. Counter
    tracks show GB/s of the link.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        for tid, lane in enumerate(Lane):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane.value}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        events += [_phase(phase, pid) for phase in timeline.phases]
        events += [_event(span, pid) for span in timeline.spans]
        events += [_wait(span, pid) for span in timeline.spans if span.waited > 0]
        for lane in (Lane.H2D, Lane.D2H):
            events += _link_counter(timeline, lane, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, pid: int) -> dict[str, Any]:
    op = span.op
    args: dict[str, Any] = {"op": str(op), "seconds": [span.start, span.end], "bytes": span.num_bytes}
    if op.subgroup != NO_SUBGROUP:
        args["subgroup"] = op.subgroup
    if op.slot is not None:
        args["slot"] = op.slot
    if span.waited > 0:
        args["waited"] = span.waited
    return {
        "ph": "X",
        "name": op.label,
        "cat": op.kind.value,
        "pid": pid,
        "tid": list(Lane).index(op.lane),
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "args": args,
    }


def _phase(phase: Phase, pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": phase.label,
        "cat": "phase",
        "pid": pid,
        "tid": list(Lane).index(Lane.MAIN),
        "ts": phase.start * 1e6,
        "dur": phase.seconds * 1e6,
        "args": {"phase": phase.kind, "micro_batch": phase.micro_batch, "seconds": [phase.start, phase.end]},
    }


def _wait(span: Span, pid: int) -> dict[str, Any]:
    """What the training loop stood still for, as a slice before the operation."""
    return {
        "ph": "X",
        "name": f"wait for {span.op.label}",
        "cat": "wait",
        "pid": pid,
        "tid": list(Lane).index(span.op.lane),
        "ts": (span.start - span.waited) * 1e6,
        "dur": span.waited * 1e6,
        "args": {},
    }


def _link_counter(timeline: Timeline, lane: Lane, pid: int) -> list[dict[str, Any]]:
    """GB/s of each copy from its start to its end; lanes are first-in first-out, so copies do not overlap."""
    events = []
    for span in timeline.lane(lane):
        rate = span.num_bytes / span.seconds / 1e9 if span.seconds > 0 else 0.0
        for at, value in ((span.start, rate), (span.end, 0.0)):
            name = f"{lane.value} GB/s"
            events.append({"ph": "C", "name": name, "pid": pid, "ts": at * 1e6, "args": {"GB/s": round(value, 3)}})
    return events


def read_trace(trace: Mapping[str, Any]) -> dict[str, Timeline]:
    """The inverse of `chrome_trace`, without samples of memory.

    Raises ValueError, one sentence, when the events are not ours.
    """
    try:
        events: Sequence[Mapping[str, Any]] = trace["traceEvents"]
        names = {e["pid"]: _text(e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"}
        spans: dict[int, list[Span]] = {pid: [] for pid in names}
        phases: dict[int, list[Phase]] = {pid: [] for pid in names}
        for event in events:
            if event["ph"] != "X" or event["cat"] == "wait":
                continue
            if event["cat"] == "phase":
                phases[event["pid"]].append(_read_phase(event["args"]))
            else:
                spans[event["pid"]].append(_read_span(event["args"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this trace was not written by deep_offload ({error!r} is missing or wrong)") from error
    return {names[pid]: Timeline(tuple(found), tuple(phases[pid])) for pid, found in spans.items()}


def _read_phase(args: Mapping[str, Any]) -> Phase:
    start, end = args["seconds"]
    return Phase(_text(args["phase"]), _number(args["micro_batch"]), _number(start), _number(end))


def _read_span(args: Mapping[str, Any]) -> Span:
    start, end = args["seconds"]
    op, num_bytes, waited = parse_op(_text(args["op"])), args["bytes"], args.get("waited", 0.0)
    return Span(op, _number(start), _number(end), _number(num_bytes), _number(waited))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{reprlib.repr(value)} where text belongs")
    return value


def is_number(value: object) -> bool:
    """Whether charts and medians can take it: no NaN, no infinity, and nothing near the limits of floats."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST


def _number(value: Any) -> Any:
    if not is_number(value):
        raise TypeError(f"{reprlib.repr(value)} where a number belongs")
    return value


def trace_to_json(timelines: Mapping[str, Timeline]) -> str:
    """The text of a trace file."""
    return json.dumps(chrome_trace(timelines), separators=(",", ":")) + "\n"
