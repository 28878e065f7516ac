"""Notices that measured updates contradict the rates that placed the state, so that the next start measures again."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from deep_offload.model.machines import cache_file
from deep_offload.model.trace import Expectation, UpdateFacts

NUM_UPDATES = 10
"""Updates that must agree: a single one may have met another job on the machine."""

TOLERANCE = 1.3
"""Machines that others share drift by less from hour to hour; profiles measured under load are off by more."""

SHORTEST_SECONDS = 0.1
"""Shorter updates are made of overheads, which no profile holds."""


class ProfileDrift:
    """Compares measured updates with the prediction. The placement stays as it is: it never changes a bit."""

    def __init__(self, expected: Expectation | None, log: Callable[[str], None]) -> None:
        self._expected = expected
        self._log = log
        self._seconds: list[float] = []

    def add(self, facts: UpdateFacts) -> None:
        """Take one measured update; after `NUM_UPDATES` of them say at most once that the profile does not hold."""
        expected = self._expected
        if expected is None or len(self._seconds) == NUM_UPDATES:
            return
        if expected.profile.num_gpus == 0:  # lanes and compute share the cores there: no rates could hold
            return
        self._seconds.append(facts.in_place_seconds)
        if len(self._seconds) < NUM_UPDATES:
            return
        measured, predicted = statistics.median(self._seconds), expected.update_seconds
        if max(measured, predicted) < SHORTEST_SECONDS:
            return
        if max(measured, predicted) > TOLERANCE * min(measured, predicted):
            self._log(
                f"updates take {measured * 1e3:.0f} ms where {predicted * 1e3:.0f} ms were predicted: the rates of "
                f"{expected.profile.name} ({expected.profile.date}) do not hold; {self._forget(expected)}"
            )

    @staticmethod
    def _forget(expected: Expectation) -> str:
        cached = cache_file(expected.profile.fingerprint)
        try:
            cached.unlink()
        except OSError:  # not there, another rank's work, or a cache that cannot be written
            return "measure again with `python -m deep_offload calibrate`"
        return "the next start on this machine measures again"
