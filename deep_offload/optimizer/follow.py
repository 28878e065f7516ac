"""Placement and rates follow what updates measure: the profile is corrected, and the GPU's share chosen again by it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from deep_offload.model.calibrate import corrected_profile, lanes_are_off, measured_compute, rate_changes
from deep_offload.model.choose import Compute
from deep_offload.model.cost import op_seconds
from deep_offload.model.moves import best_move
from deep_offload.model.trace import Expectation
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.residency import expectation, placement_line
from deep_offload.plan.placement import gpu_share_of
from deep_offload.plan.timeline import Timeline
from deep_offload.runtime.measure import keep_profile

NUM_UPDATES = 10
"""Updates whose medians count: a single one may have met another job on the machine."""

LEAST_UPDATES = 5
"""So many of them must have been measured, where others were skipped or ran before the placement changed."""

INTERVAL = 100
"""Updates from one look at the prediction to the next: machines that others share drift within hours."""

TOLERANCE, LANE_TOLERANCE = 1.05, 1.1
"""Updates, and lanes, that are predicted better leave the rates alone: measured one by one, they serve other placements
better than those that one update explains."""

TOLD_ERROR = 1.1
"""Predictions that are off by less are not worth a line."""

SHORTEST_SECONDS = 0.1
"""Shorter updates are made of overheads, which no profile holds."""


class PlacementFollower:
    """Compares measured updates with the prediction, and corrects what it was made of.

    Between iterations: `look`, then `if is_due: synchronize, then follow`. Each rank decides for itself, at the same
    updates: no bit depends on it. Without a GPU nothing is believed: lanes and compute share the cores there, and no
    rates could hold.
    """

    def __init__(self, engine: OffloadEngine, log: Callable[[str], None], *, may_move: bool) -> None:
        """may_move: the GPU's share is not given, and may change."""
        self._engine = engine
        self._log = log
        self._may_move = may_move
        self._num_updates = 0
        self._due = NUM_UPDATES
        self._steps: list[Timeline] = []

    def count_update(self) -> None:
        """An update is with the lanes."""
        self._num_updates += 1

    def forget(self) -> None:
        """The placement has changed: what was measured before says nothing about it."""
        self._steps.clear()

    def look(self) -> None:
        """Take in the last update that is complete, if it is one of those that count; waits for nothing."""
        if self._is_on and self._due - NUM_UPDATES < self._num_updates < self._due:
            self._take()

    @property
    def is_due(self) -> bool:
        """Whether `follow` decides now; the same on all ranks."""
        return self._is_on and self._num_updates >= self._due

    def follow(self) -> list[str]:
        """Decide and do it; returns the lines that describe placement and prediction since, none if all stays."""
        self._take()
        steps, self._steps = self._steps, []
        self._due += INTERVAL * (1 + (self._num_updates - self._due) // INTERVAL)
        expected = self._engine.expected
        if expected is None or len(steps) < LEAST_UPDATES:
            return []
        measured, predicted = statistics.median(t.in_place_seconds for t in steps), expected.update_seconds
        shorter, longer = sorted((measured, predicted))
        if longer < SHORTEST_SECONDS:
            return []
        if longer < TOLERANCE * shorter and not lanes_are_off(expected, steps, LANE_TOLERANCE):
            return []
        return self._correct(steps, measured, is_told=longer >= TOLD_ERROR * shorter)

    def _correct(self, steps: Sequence[Timeline], measured: float, *, is_told: bool) -> list[str]:
        engine, before = self._engine, self._engine.expected
        assert before is not None
        profile = corrected_profile(before, steps)
        if replace(profile, source=before.profile.source) == before.profile:
            return []  # other compute lies around the update than was assumed; no rate is wrong
        is_kept = keep_profile(profile, self._log)
        corrected = replace(before, profile=profile)
        share = gpu_share_of(engine.settings.placement)
        is_moved = self._may_move and self._move(corrected, measured_compute(before, steps))
        engine.expected = new = expectation(corrected, engine)
        if not is_told and not is_moved:
            return []
        why = ", ".join(rate_changes(before.profile, profile, before.state.wire)) or "no lane's rate is another one"
        if is_moved:
            line = (
                f"placement changed after {self._num_updates} updates: GPU share {share:.2f} -> "
                f"{gpu_share_of(engine.settings.placement):.2f}, because {why}; predicted update: "
                f"{new.update_seconds * 1e3:.1f} ms, bound by {new.binding_lane}"
            )
        else:
            line = (
                f"updates take {measured * 1e3:.0f} ms where {before.update_seconds * 1e3:.0f} ms were predicted: "
                f"{why}; with the rates of {len(steps)} updates {new.update_seconds * 1e3:.0f} ms are predicted"
            )
        line += "; the next start on this machine goes by these rates" if is_kept else ""
        self._log(line)
        return [placement_line(engine.layout, engine.settings.placement), line]

    def _move(self, corrected: Expectation, compute: Compute) -> bool:
        """Move to a better placement, if there is one; returns whether it did."""
        engine = self._engine
        how = engine.movable, engine.num_slots, engine.late_subgroups, engine.can_move
        placement = best_move(corrected, compute, *how)
        if placement is None:
            return False
        try:
            engine.move(placement, op_seconds(corrected.layout, corrected.state, corrected.profile))
        except torch.OutOfMemoryError:
            self._log("the GPU share was to change, but the GPU has no memory for it: the placement stays as it is")
            return False
        return True

    @property
    def _is_on(self) -> bool:
        expected = self._engine.expected
        return expected is not None and expected.profile.num_gpus > 0

    def _take(self) -> None:
        timeline = self._engine.finished_timeline()
        is_new = timeline is not None and not (self._steps and self._steps[-1] is timeline)
        if is_new and timeline.update_spans:
            self._steps.append(timeline)
