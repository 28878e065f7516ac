"""The semantics of a plan: what a backend is, and how a plan runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deep_offload.plan.ops import NO_SUBGROUP, Lane, Op, OpKind, Plan


class Backend(Protocol):
    """Runs ops. Each lane is first-in first-out; an op starts when its lane is free and all of `after` are done."""

    def submit(self, op: Op, after: Sequence[Any]) -> Any:
        """Take an op and return its completion, without blocking the caller unless the op is on the MAIN lane."""


class PlanRun:
    """One iteration of a plan on a backend.

    Ops are submitted in plan order. An external op (lane MAIN) holds back everything behind it until the training loop
    fires it; a backend executes it in the caller's thread.
    """

    def __init__(self, plan: Plan, backend: Backend, previous: PlanRun | None = None) -> None:
        self.plan = plan
        self._backend = backend
        self._previous = previous.completions if previous is not None else None
        self._fired: set[tuple[OpKind, int]] = set()
        self._next = 0
        self.completions: list[Any] = []
        self._advance()

    def fire(self, kind: OpKind, subgroup: int = NO_SUBGROUP) -> None:
        """The training loop has reached an external op: run it once its turn comes, and submit what waited for it."""
        self._fired.add((kind, subgroup))
        self._advance()

    def fire_all(self) -> None:
        """As if the training loop had reached every external op in its turn: submit all."""
        self._fired.update((op.kind, op.subgroup) for op in self.plan.ops if op.lane is Lane.MAIN)
        self._advance()

    @property
    def is_done(self) -> bool:
        return self._next == len(self.plan.ops)

    def _advance(self) -> None:
        ops = self.plan.ops
        while self._next < len(ops):
            op = ops[self._next]
            if op.lane is Lane.MAIN and (op.kind, op.subgroup) not in self._fired:
                return
            after = [self.completions[i] for i in op.after]
            if self._previous is not None:
                after += [self._previous[i] for i in op.after_previous]
            self.completions.append(self._backend.submit(op, after))
            self._next += 1
        self._previous = None
