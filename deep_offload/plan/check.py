"""Proof that a plan has no hazard, over two iterations in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from deep_offload.plan.ops import Lane, Op, OpKind, Place, Plan

_CHAIN = {
    Place.CPU: (OpKind.GRAD_FLUSH, OpKind.UPDATE_CPU, OpKind.PARAM_H2D),
    Place.GPU: (OpKind.PREFETCH, OpKind.UPDATE_GPU, OpKind.FLUSH),
    Place.RESIDENT: (OpKind.UPDATE_GPU,),
}
_EXTERNAL = (OpKind.GRADS_READY, OpKind.PARAMS_NEEDED)


def check_plan(plan: Plan) -> None:
    """Raise ValueError, naming the op, unless the plan is complete and free of hazards.

    Complete: each subgroup has exactly the ops of its place. Free of hazards: any two ops that touch the same resource,
    one of them writing, are ordered by edges and lanes, within an iteration and from one to the next.
    """
    _check_complete(plan)
    _check_edges(plan)
    _check_hazards(plan)


def _check_complete(plan: Plan) -> None:
    counts = Counter((op.kind, op.subgroup) for op in plan.ops)
    wanted = Counter({(OpKind.NORM_READY, -1): 1, (OpKind.GRADS_REUSABLE, -1): 1})
    for i, place in enumerate(plan.placement):
        wanted.update((kind, i) for kind in _CHAIN[place] + _EXTERNAL)
    for key in sorted(counts.keys() | wanted.keys(), key=lambda k: (k[1], k[0].value)):
        if counts[key] != wanted[key]:
            kind, i = key
            raise ValueError(f"{kind.value}[{i}] appears {counts[key]} times in the plan, expected {wanted[key]}")
    slots: dict[int, set[int | None]] = {}
    for op in plan.ops:
        if op.kind in _CHAIN[Place.GPU] and plan.placement[op.subgroup] is Place.GPU:
            slots.setdefault(op.subgroup, set()).add(op.slot)
    for i, used in slots.items():
        slot = next(iter(used))
        if len(used) != 1 or slot is None or not 0 <= slot < plan.num_slots:
            raise ValueError(f"subgroup {i} uses slots {used}, expected one of {plan.num_slots}")


def _check_edges(plan: Plan) -> None:
    for index, op in enumerate(plan.ops):
        if any(not 0 <= a < index for a in op.after):
            raise ValueError(f"{op.label} (op {index}) waits for a later op: {op.after}")
        if any(not 0 <= a < len(plan.ops) for a in op.after_previous):
            raise ValueError(f"{op.label} (op {index}) waits for an op that does not exist: {op.after_previous}")


Resource = tuple[str, int]


def _accesses(plan: Plan, op: Op) -> Iterator[tuple[Resource, bool]]:
    """Resources that an op touches, with True where it writes."""
    i, on_gpu = op.subgroup, op.slot is not None
    everything = range(len(plan.placement))
    match op.kind:
        case OpKind.GRADS_READY:  # backward wrote it, reading the weights on its way
            yield ("device_grad", i), True
            yield ("weight", i), False
        case OpKind.GRAD_FLUSH:
            yield ("device_grad", i), False
            yield ("host_grad", i), True
        case OpKind.PREFETCH:
            yield ("host_state", i), False
            yield ("slot", op.slot or 0), True
        case OpKind.NORM_READY:
            for j in everything:
                yield ("device_grad", j), False
            yield ("norm", 0), True
        case OpKind.UPDATE_CPU:
            yield ("norm", 0), False
            yield ("host_grad", i), True  # the 16-bit weight may be written over the gradient
            yield ("host_state", i), True
        case OpKind.UPDATE_GPU:
            yield ("norm", 0), False
            yield ("device_grad", i), False
            yield ("weight", i), True
            yield (("slot", op.slot or 0) if on_gpu else ("device_state", i)), True
        case OpKind.FLUSH:
            yield ("slot", op.slot or 0), False
            yield ("host_state", i), True
        case OpKind.PARAM_H2D:
            yield ("host_grad", i), False
            yield ("weight", i), True
        case OpKind.GRADS_REUSABLE:
            for j in everything:
                yield ("device_grad", j), True
        case OpKind.PARAMS_NEEDED:
            yield ("weight", i), False


@dataclass(slots=True)
class _History:
    """Last write of a resource and the reads since, as global op numbers."""

    write: int | None = None
    reads: list[int] = field(default_factory=list)


def _check_hazards(plan: Plan) -> None:
    """Vector clocks over lanes: op a is ordered before op b iff b's clock of a's lane has reached a."""
    lanes = list(Lane)
    size = len(plan.ops)
    clocks: list[dict[Lane, int]] = []
    position: list[int] = []
    last_on_lane: dict[Lane, int] = {}
    history: dict[Resource, _History] = {}
    for number in range(2 * size):
        base, op = number - number % size, plan.ops[number % size]
        before = [base + a for a in op.after]
        before += [base - size + a for a in op.after_previous] if base else []
        before += [last_on_lane[op.lane]] if op.lane in last_on_lane else []
        clock = {lane: max((clocks[b][lane] for b in before), default=-1) for lane in lanes}
        place = 0 if op.lane not in last_on_lane else position[last_on_lane[op.lane]] + 1
        clock[op.lane] = place
        clocks.append(clock)
        position.append(place)
        last_on_lane[op.lane] = number
        for resource, writes in _accesses(plan, op):
            seen = history.setdefault(resource, _History())
            for other in ([] if seen.write is None else [seen.write]) + (seen.reads if writes else []):
                other_op = plan.ops[other % size]
                if other != number and clock[other_op.lane] < position[other]:
                    raise ValueError(_hazard(plan, resource, other, number))
            if writes:
                seen.write, seen.reads = number, []
            else:
                seen.reads.append(number)


def _hazard(plan: Plan, resource: Resource, first: int, second: int) -> str:
    size = len(plan.ops)
    across = " of the iteration before" if first // size != second // size else ""
    return (
        f"{plan.ops[second % size].label} does not wait for {plan.ops[first % size].label}{across}, "
        f"and both touch {resource[0]}[{resource[1]}]"
    )
