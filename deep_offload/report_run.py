"""Reads what a run wrote into `--run-dir`. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_offload.plan.draw import read_trace
from deep_offload.plan.timeline import Timeline
from deep_offload.report_events import is_event

RUN_FILE = "run.jsonl"
TRACE_FILE = "trace.json"

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """The events of a run, and the lanes of its last steps by name (`measured`, `predicted`); empty without a trace.

    num_broken: lines that are no JSON, such as the last one of a run that was killed, or no event that can be shown.
    """

    events: tuple[Event, ...]
    lanes: dict[str, Timeline]
    num_broken: int

    def of_kind(self, kind: str) -> list[Event]:
        """Events of one kind, in the order in which they were written."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def steps(self) -> list[Event]:
        """Logged steps by iteration; of an iteration that a resumed run did again, the last."""
        by_iteration = {event["iteration"]: event for event in self.of_kind("step")}
        return [by_iteration[number] for number in sorted(by_iteration)]

    def evaluations(self, split: str) -> list[Event]:
        """Evaluations of one split by iteration; of an iteration with several, as the run's last one, the last."""
        by_iteration = {e["iteration"]: e for e in self.of_kind("evaluation") if e["split"] == split}
        return [by_iteration[number] for number in sorted(by_iteration)]

    @property
    def start(self) -> Event:
        """The last start: of a resumed run the one that counts."""
        return self.of_kind("start")[-1]

    @property
    def placed(self) -> Event:
        """The last start, or the last change of the placement since: what is predicted holds from there on."""
        return next(event for event in reversed(self.events) if event["event"] in ("start", "placement"))

    @property
    def placed_at(self) -> dict[int, Event]:
        """The start or change of the placement that held, by the iteration of each of `steps`."""
        held, by_iteration = self.events[0], {}
        for event in self.events:
            if event["event"] in ("start", "placement"):
                held = event
            elif event["event"] == "step":
                by_iteration[event["iteration"]] = held
        return by_iteration

    @property
    def placed_steps(self) -> list[Event]:
        """The logged steps since the last start or change of the placement."""
        held, placed_at = self.placed, self.placed_at
        return [step for step in self.steps if placed_at[step["iteration"]] is held]

    @property
    def status(self) -> str:
        """How the run ended, in a few words."""
        last = next((e for e in reversed(self.events) if e["event"] in ("start", "end")), None)
        if last is None or last["event"] == "start":
            return "did not end: it is still running, or it died"
        return f"stopped early: {last['stop_reason']}" if last["stop_reason"] else "finished"


def read_run(folder: Path) -> RunData:
    """Raises ValueError, one sentence, where the directory holds no run, or a trace that cannot be read."""
    path = folder / RUN_FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give the directory that training got as --run-dir"
        ) from error
    found = [_parsed(line) for line in lines]
    events = [event for event in found if is_event(event)]
    if not any(event["event"] == "start" for event in events):
        raise ValueError(f"{path} has no start of a run in {len(lines)} lines: it was not written by --run-dir")
    return RunData(tuple(events), _lanes(folder / TRACE_FILE), len(lines) - len(events))


def _parsed(line: bytes) -> object:
    """The JSON value of a line; None where it is cut off, no text, or nested too deeply."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _lanes(path: Path) -> dict[str, Timeline]:
    if not path.exists():
        return {}
    try:
        return read_trace(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it to make a report without lanes") from error


def averaged(values: Sequence[float], most: int = 300) -> list[float]:
    """At most `most` values: means of equal stretches, for parts that must add up."""
    size = max(1, -(-len(values) // most))
    return [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = 1200) -> tuple[list[float], list[float]]:
    """At most about `most` points: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(xs) <= most:
        return list(xs), list(ys)
    size = -(-2 * len(xs) // most)
    kept: list[int] = []
    for start in range(0, len(xs), size):
        part = range(start, min(start + size, len(xs)))
        kept += sorted({min(part, key=lambda i: ys[i]), max(part, key=lambda i: ys[i])})
    return [xs[i] for i in kept], [ys[i] for i in kept]
