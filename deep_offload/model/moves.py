"""Whether another GPU share would be faster by corrected rates. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from deep_offload.model.choose import Compute
from deep_offload.model.cost import op_seconds
from deep_offload.model.trace import Expectation
from deep_offload.plan.ops import Place, Placement
from deep_offload.plan.placement import place_among
from deep_offload.plan.planner import build_plan

LEAST_GAIN = 0.03
"""Part of the iteration that a move must save: less is within what predictions are wrong by."""

_TRY_ALL = 16
"""Up to so many movable subgroups every number on the CPU is tried; beyond, steps of 1/24 of all."""


def best_move(
    expected: Expectation,
    compute: Compute,
    movable: Sequence[int],
    num_slots: int,
    late: Collection[int],
    can_move: Callable[[Placement], bool],
) -> Placement | None:
    """The placement with the shortest predicted iteration, of those that keep residents and slots; None if no
    other is shorter by LEAST_GAIN.

    expected: with rates as measured; compute: what surrounds updates; movable: subgroups that the CPU may
    update; late: as `build_plan` takes it; can_move: whether memory allows a placement.
    """
    seconds = op_seconds(expected.layout, expected.state, expected.profile)

    def cost(placement: Placement) -> float:
        plan = build_plan(expected.layout, placement, num_slots, seconds, late)
        return replace(expected, plan=plan).cost(compute)

    present = expected.plan.placement
    on_cpu = present.count(Place.CPU)
    step = 1 if len(movable) <= _TRY_ALL else max(1, round((len(present) - present.count(Place.RESIDENT)) / 24))
    counts = [c for c in range(on_cpu % step, len(movable) + 1, step) if c != on_cpu]
    candidates = [p for p in (place_among(present, movable, count) for count in counts) if can_move(p)]
    costs = {placement: cost(placement) for placement in candidates}
    best = min(costs, key=lambda placement: costs[placement], default=present)
    return best if best is not present and costs[best] <= (1 - LEAST_GAIN) * cost(present) else None
