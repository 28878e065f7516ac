"""What a report needs of each kind of event of a run. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deep_offload.plan.draw import is_number

Check = Callable[[Any], bool]
"""Whether a value read from JSON is as it must be."""

_LATEST = 1e11
"""Seconds since 1970, about the year 5000: calendars end soon after."""
_DEEPEST = 20
"""Levels of settings within each other; deeper ones, which no run has, could not be printed."""


def is_event(value: object) -> bool:
    """Whether a report can show it: a JSON object with its kind, and of a known kind with all that is needed."""
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return False
    check = _EVENTS.get(value["event"])
    return check is None or check(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_outcome(value: object) -> bool:
    """What training computed, NaN and infinities too: charts leave them out."""
    return isinstance(value, float) or is_number(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and is_number(value)


def _is_time(value: object) -> bool:
    return is_number(value) and 0 <= value < _LATEST


def _is_lines(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """Shown as text, whatever it is."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)


def _is_named(value: object) -> bool:
    """Plain values by name."""
    return isinstance(value, dict) and _is_plain(value)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check) -> Check:
    """Values of one sort, by whatever names."""
    return lambda values: isinstance(values, dict) and all(check(value) for value in values.values())


def _has(needed: Mapping[str, Check], **optional: Check) -> Check:
    """All that is needed, by name; what is optional may be missing, but not be anything else."""

    def check(values: object) -> bool:
        return (
            isinstance(values, dict)
            and all(name in values and is_right(values[name]) for name, is_right in needed.items())
            and all(name not in values or is_right(values[name]) for name, is_right in optional.items())
        )

    return check


_PREDICTED = _has(
    {"update_seconds": is_number, "binding_lane": _is_text, "profile": _is_text, "profile_source": _is_text},
    iteration_seconds=_or_none(is_number),
)
_PLACED: dict[str, Check] = {
    "time": _is_time,
    "placement": _is_lines,
    "predicted": _or_none(_PREDICTED),
    "state_bytes": _has({"host": is_number, "device": is_number}),
}
_PLANNED = _has({"host": is_number, "device": is_number, "device_total": is_number})
_START: dict[str, Check] = {
    **_PLACED,
    "command": _is_text,
    "environment": _is_named,
    "config": _each(_is_named),
    "num_iterations": _is_count,
    "world_size": _is_count,
}
_UPDATE = _has(
    {
        "seconds": is_number,
        "share_of_bound": is_number,
        "lane": _is_text,
        "attributed": is_number,
        "busy": _each(is_number),
    },
    in_place_seconds=is_number,
)
_STEP: dict[str, Check] = {
    "iteration": _is_count,
    "seconds": is_number,
    "losses": _each(_is_outcome),
    "learning_rate": _is_outcome,
    "grad_norm": _or_none(_is_outcome),
    "skipped": _is_count,
    "nan": _is_count,
    "wait_seconds": is_number,
    "times": _each(is_number),
    "memory": _has({"host_peak": is_number}, device=is_number, device_peak=is_number),
}

# Optional is what runs of before had not.
_EVENTS: dict[str, Check] = {
    "start": _has(_START, planned_bytes=_PLANNED),
    "placement": _has(_PLACED, planned_bytes=_PLANNED),
    "note": _has({"text": _is_text}),
    "step": _has(_STEP, update=_or_none(_UPDATE)),
    "evaluation": _has({"iteration": _is_count, "split": _is_text, "losses": _each(_is_outcome)}),
    "checkpoint": _has({"iteration": _is_count, "seconds": is_number}),
    "end": _has({"stop_reason": _or_none(_is_text)}),
}
