"""Plans are complete, free of hazards, never stuck, and read back from text; a missing edge is caught."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings

from deep_offload.plan.check import check_plan
from deep_offload.plan.execute import PlanRun
from deep_offload.plan.layout import ShardSpec, build_layout
from deep_offload.plan.ops import Lane, Op, OpKind, Place, Plan, parse_op
from deep_offload.plan.placement import place_by_share
from deep_offload.plan.planner import build_plan
from tests.plan.strategies import PlacedCase, placed_cases

GOLDEN = Path(__file__).parent / "golden"


def plan_of(case: PlacedCase) -> Plan:
    return build_plan(case.layout, case.placement, case.num_slots)


def even_plan(num: int, share: float, resident: float, slots: int) -> Plan:
    layout = build_layout([ShardSpec(num * 1024, 2, 2)], 1024)
    return build_plan(layout, place_by_share(num, share, resident), slots)


@given(placed_cases())
def test_every_plan_passes(case):
    """The checker accepts what the planner builds, for any layout, placement and number of slots."""
    check_plan(plan_of(case))


@given(placed_cases())
def test_operations_read_back_from_text(case):
    """str and parse_op are inverses for every operation of every plan."""
    for op in plan_of(case).ops:
        assert parse_op(str(op)) == op


@pytest.mark.parametrize("text", ["prefetch[1]", "prefetch[1] @cpu", "dance[1] @h2d", "prefetch[x] @h2d", ""])
def test_wrong_text_is_refused(text):
    """Text that is no operation gets a sentence that quotes it or lists the kinds."""
    with pytest.raises(ValueError, match="is no operation|is no kind|names lane"):
        parse_op(text)


@pytest.mark.parametrize(
    ("name", "num", "share", "resident", "slots"),
    [("half_streamed", 6, 0.5, 0.0, 2), ("all_cpu", 3, 0.0, 0.0, 1), ("streamed_and_resident", 6, 1.0, 0.34, 2)],
)
def test_golden_plans(name, num, share, resident, slots):
    """The order of three small plans is what their files say; a change of order is a deliberate change of a file."""
    plan = even_plan(num, share, resident, slots)
    lines = (GOLDEN / f"{name}.plan").read_text().splitlines()
    assert str(plan).splitlines() == lines
    assert tuple(parse_op(line.split(maxsplit=1)[1]) for line in lines) == plan.ops


# -- hazards, against an oracle of its own -------------------------------------------------------------------------

# (reads, writes) of each kind. {} stands for the subgroup, S for the slot; "all" is every subgroup.
TOUCHES = {
    OpKind.GRADS_READY: (["weight{}"], ["grad{}"]),
    OpKind.GRAD_FLUSH: (["grad{}"], ["hostgrad{}"]),
    OpKind.PREFETCH: (["home{}"], ["slotS"]),
    OpKind.NORM_READY: (["grad-all"], ["norm"]),
    OpKind.UPDATE_CPU: (["norm", "hostgrad{}"], ["home{}", "hostgrad{}"]),
    OpKind.UPDATE_GPU: (["norm", "grad{}"], ["weight{}", "stateS"]),
    OpKind.FLUSH: (["slotS"], ["home{}"]),
    OpKind.PARAM_H2D: (["hostgrad{}"], ["weight{}"]),
    OpKind.GRADS_REUSABLE: ([], ["grad-all"]),
    OpKind.PARAMS_NEEDED: (["weight{}"], []),
}


def touched(op: Op, names: list[str], num: int) -> set[str]:
    found: set[str] = set()
    for name in names:
        if name.endswith("-all"):
            found |= {f"{name[:-4]}{i}" for i in range(num)}
        elif name in ("slotS", "stateS"):
            found.add(f"resident{op.subgroup}" if op.slot is None else f"slot{op.slot}")
        else:
            found.add(name.format(op.subgroup))
    return found


def has_hazard(plan: Plan) -> bool:
    """Brute force: all pairs of two iterations that touch the same thing, one writing, must be connected."""
    size, num = len(plan.ops), len(plan.placement)
    ops = plan.ops * 2
    behind: list[int] = []  # bit j of behind[i]: op j is ordered before op i
    last: dict[Lane, int] = {}
    for i, op in enumerate(ops):
        base = i - i % size
        before = [base + a for a in op.after]
        if base:
            before += [base - size + a for a in op.after_previous]
        if op.lane in last:
            before.append(last[op.lane])
        last[op.lane] = i
        mask = 0
        for b in before:
            mask |= behind[b] | 1 << b
        behind.append(mask)
    reads = [touched(op, TOUCHES[op.kind][0], num) for op in ops]
    writes = [touched(op, TOUCHES[op.kind][1], num) for op in ops]
    return any(
        not behind[j] >> i & 1 and (writes[i] & (writes[j] | reads[j]) or reads[i] & writes[j])
        for i, j in combinations(range(len(ops)), 2)
    )


EdgeClass = tuple[str, OpKind, OpKind]


def edge_classes(plan: Plan) -> set[EdgeClass]:
    found: set[EdgeClass] = set()
    for op in plan.ops:
        found |= {("after", plan.ops[a].kind, op.kind) for a in op.after}
        found |= {("after_previous", plan.ops[a].kind, op.kind) for a in op.after_previous}
    return found


def without_edges(plan: Plan, removed: EdgeClass) -> Plan:
    field, source, target = removed

    def kept(op: Op) -> Op:
        if op.kind is not target:
            return op
        return replace(op, **{field: tuple(a for a in getattr(op, field) if plan.ops[a].kind is not source)})

    return replace(plan, ops=tuple(kept(op) for op in plan.ops))


def is_caught(plan: Plan) -> bool:
    try:
        check_plan(plan)
    except ValueError:
        return True
    return False


@settings(max_examples=25)
@given(placed_cases())
def test_checker_agrees_with_brute_force(case):
    """Without all edges of one kind the checker raises exactly when two accesses are really left unordered."""
    plan = plan_of(case)
    assert not has_hazard(plan)
    for removed in edge_classes(plan):
        broken = without_edges(plan, removed)
        assert is_caught(broken) == has_hazard(broken), removed


ALWAYS_NEEDED = {
    ("after", OpKind.GRADS_READY, OpKind.GRAD_FLUSH),
    ("after", OpKind.GRAD_FLUSH, OpKind.UPDATE_CPU),
    ("after", OpKind.NORM_READY, OpKind.UPDATE_CPU),
    ("after", OpKind.UPDATE_CPU, OpKind.PARAM_H2D),
    ("after", OpKind.NORM_READY, OpKind.UPDATE_GPU),
    ("after", OpKind.PREFETCH, OpKind.UPDATE_GPU),
    ("after", OpKind.UPDATE_GPU, OpKind.FLUSH),
    ("after", OpKind.UPDATE_GPU, OpKind.PARAMS_NEEDED),
    ("after", OpKind.FLUSH, OpKind.PREFETCH),
    ("after_previous", OpKind.FLUSH, OpKind.PREFETCH),
    ("after", OpKind.PARAM_H2D, OpKind.PARAMS_NEEDED),
}
# Before gradients may be overwritten every parameter is in place, so everything that read a gradient is done.
ALWAYS_REDUNDANT = {
    ("after", OpKind.UPDATE_GPU, OpKind.GRADS_REUSABLE),
    ("after", OpKind.GRAD_FLUSH, OpKind.GRADS_REUSABLE),
}


def test_removed_edges_of_every_kind():
    """On a mixed plan whose slots are reused, each kind of edge is either caught or known to be implied by a lane."""
    plan = even_plan(12, 0.5, 0.2, 2)
    caught = {removed for removed in edge_classes(plan) if is_caught(without_edges(plan, removed))}
    assert caught == ALWAYS_NEEDED
    assert edge_classes(plan) - caught == ALWAYS_REDUNDANT


@pytest.mark.parametrize("kind", list(OpKind))
def test_a_missing_operation_is_named(kind):
    """Each kind of operation that is dropped, duplicated flushes and uploads included, is named by the checker."""
    plan = even_plan(6, 0.5, 0.2, 2)
    index = next(i for i, op in enumerate(plan.ops) if op.kind is kind)
    ops = tuple(
        replace(
            op,
            after=tuple(a - (a > index) for a in op.after if a != index),
            after_previous=tuple(a - (a > index) for a in op.after_previous if a != index),
        )
        for i, op in enumerate(plan.ops)
        if i != index
    )
    with pytest.raises(ValueError, match=kind.value):
        check_plan(replace(plan, ops=ops))


def test_impossible_plans_are_refused():
    """A placement of the wrong length and streaming without slots are refused."""
    layout = build_layout([ShardSpec(4096, 2, 2)], 1024)
    with pytest.raises(ValueError, match="give one each"):
        build_plan(layout, (Place.CPU,), 1)
    with pytest.raises(ValueError, match="staging slots"):
        build_plan(layout, (Place.GPU,) * 4, 0)
    wrong_slot = even_plan(4, 1.0, 0.0, 2)
    ops = tuple(replace(op, slot=7) if op.label == "flush[1]" else op for op in wrong_slot.ops)
    with pytest.raises(ValueError, match="uses slots"):
        check_plan(replace(wrong_slot, ops=ops))


# -- the run of a plan -------------------------------------------------------------------------------------------------


class Recorder:
    """A backend that writes down what it gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[Op, tuple[int, ...]]] = []

    def submit(self, op: Op, after) -> int:
        self.seen.append((op, tuple(after)))
        return len(self.seen) - 1


@settings(max_examples=30)
@given(placed_cases())
def test_external_operations_hold_back_what_is_behind_them(case):
    """Operations are submitted in plan order, an external one only when fired, whatever the order of the calls."""
    plan, backend = plan_of(case), Recorder()
    run = PlanRun(plan, backend)
    external = [op for op in plan.ops if op.lane is Lane.MAIN]
    for op in external:
        waiting = plan.ops[len(backend.seen)]
        assert waiting == op and not run.is_done
        run.fire(op.kind, op.subgroup)
    assert run.is_done and [op for op, _ in backend.seen] == list(plan.ops)
    following = PlanRun(plan, backend, run)
    for op in reversed(external):
        following.fire(op.kind, op.subgroup)
    assert following.is_done
    for index, op in enumerate(plan.ops):
        after = backend.seen[len(plan.ops) + index][1]
        expected = [len(plan.ops) + a for a in op.after] + list(op.after_previous)
        assert list(after) == expected
