"""The only place that decides in which order things happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Op, OpKind, Place, Placement, Plan

OpSeconds = Callable[[OpKind, int], float]
"""Predicted seconds of an operation on a subgroup."""


def default_seconds(layout: ShardLayout) -> OpSeconds:
    """Relative costs of a typical machine, used to order the copies when no profile is at hand."""
    per_param = {
        OpKind.PREFETCH: 12.0,
        OpKind.FLUSH: 12.0,
        OpKind.PARAM_H2D: 2.0,
        OpKind.UPDATE_CPU: 16.0,
        OpKind.UPDATE_GPU: 0.4,
        OpKind.GRAD_FLUSH: 4.0,
    }
    return lambda kind, i: per_param[kind] * layout.subgroups[i].numel * 1e-11


def build_plan(
    layout: ShardLayout,
    placement: Placement,
    num_slots: int,
    seconds: OpSeconds | None = None,
    late_grads: Collection[int] = (),
) -> Plan:
    """Order one iteration: gradients down during backward, then all lanes at once, then what the next forward waits
    for.

    layout: the rank's subgroups in forward order; placement: one Place each; num_slots: staging slots on the GPU.
    seconds: predicted cost of an op, which decides how prefetches and parameter uploads share the H2D lane. late_grads:
    subgroups whose gradient is final only after backward; the others need not wait for them.
    Raises ValueError when placement and layout disagree or a streamed subgroup has no slot.
    """
    if len(placement) != len(layout.subgroups):
        raise ValueError(f"{len(placement)} places were given for {len(layout.subgroups)} subgroups, give one each")
    streamed = [i for i, place in enumerate(placement) if place is Place.GPU]
    if streamed and num_slots < 1:
        raise ValueError(f"{len(streamed)} subgroups are streamed to the GPU, but there are {num_slots} staging slots")
    return _Builder(layout, placement, num_slots, seconds or default_seconds(layout)).build(late_grads)


class _Builder:
    """Emits ops in order; remembers the index of each so that edges can name it."""

    def __init__(self, layout: ShardLayout, placement: Placement, num_slots: int, seconds: OpSeconds) -> None:
        self.placement = placement
        self.num_slots = num_slots
        self.seconds = seconds
        self.ops: list[Op] = []
        self.index: dict[tuple[OpKind, int], int] = {}
        self.streamed = [i for i, p in enumerate(placement) if p is Place.GPU]
        self.on_cpu = [i for i, p in enumerate(placement) if p is Place.CPU]
        self.residents = [i for i, p in enumerate(placement) if p is Place.RESIDENT]
        self.slot_of = {i: j % num_slots for j, i in enumerate(self.streamed)}

    def build(self, late_grads: Collection[int]) -> Plan:
        first = self.streamed[: self.num_slots]
        for i in first:  # their state is final since the last flush: bring it up before the norm is known
            self._prefetch(i)
        backward_order = reversed(range(len(self.placement)))
        for i in sorted(backward_order, key=lambda i: i in late_grads):
            ready = self._emit(OpKind.GRADS_READY, i)
            if self.placement[i] is Place.CPU:
                self._emit(OpKind.GRAD_FLUSH, i, (ready,))
        self._emit(OpKind.NORM_READY)
        self._interleave()
        self._fence()
        return Plan(self.placement, self.num_slots, tuple(self._with_previous(op) for op in self.ops))

    def _emit(self, kind: OpKind, subgroup: int = -1, after: tuple[int, ...] = (), slot: int | None = None) -> int:
        self.ops.append(Op(kind, subgroup, after, (), slot))
        self.index[kind, subgroup] = len(self.ops) - 1
        return len(self.ops) - 1

    def _prefetch(self, i: int) -> None:
        position = self.streamed.index(i)
        after = ()
        if position >= self.num_slots:  # write after read: the slot's last user must have been flushed
            after = (self.index[OpKind.FLUSH, self.streamed[position - self.num_slots]],)
        self._emit(OpKind.PREFETCH, i, after, self.slot_of[i])

    def _interleave(self) -> None:
        """Merge prefetches and parameter uploads on the H2D lane by the times at which they can start."""
        norm = self.index[OpKind.NORM_READY, -1]
        clock = _Clock(self.seconds)
        residents = deque(self.residents)
        later = deque(self.streamed[self.num_slots :])
        per_update = -(-len(residents) // max(1, len(self.streamed)))

        def update_gpu(i: int) -> None:
            update = self._emit(OpKind.UPDATE_GPU, i, (norm, self.index[OpKind.PREFETCH, i]), self.slot_of[i])
            self._emit(OpKind.FLUSH, i, (update,), self.slot_of[i])
            clock.stream(i)
            for _ in range(min(per_update, len(residents))):  # spread, so that no flush waits behind all of them
                self._emit(OpKind.UPDATE_GPU, residents.popleft(), (norm,))

        def upload_before(ready: float) -> None:
            while cpu and clock.cpu_end(cpu[0]) <= ready:
                i = cpu.popleft()
                clock.run_cpu(i)
                update = self._emit(OpKind.UPDATE_CPU, i, (norm, self.index[OpKind.GRAD_FLUSH, i]))
                self._emit(OpKind.PARAM_H2D, i, (update,))

        cpu = deque(self.on_cpu)
        for i in self.streamed[: self.num_slots]:
            update_gpu(i)
        for position, i in enumerate(later):
            upload_before(clock.flushed[self.streamed[position]])
            self._prefetch(i)
            clock.prefetch(i, self.streamed[position])
            update_gpu(i)
        upload_before(float("inf"))
        while residents:
            self._emit(OpKind.UPDATE_GPU, residents.popleft(), (norm,))

    def _fence(self) -> None:
        """What the next iteration waits for: parameters in the order of its forward pass, then gradients."""
        for i, place in enumerate(self.placement):
            writer = self.index[OpKind.PARAM_H2D if place is Place.CPU else OpKind.UPDATE_GPU, i]
            self._emit(OpKind.PARAMS_NEEDED, i, (writer,))
        readers = [
            self.index[OpKind.GRAD_FLUSH if place is Place.CPU else OpKind.UPDATE_GPU, i]
            for i, place in enumerate(self.placement)
        ]
        self._emit(OpKind.GRADS_REUSABLE, after=tuple(sorted(readers)))

    def _with_previous(self, op: Op) -> Op:
        """Edges into the iteration before: a first prefetch reads what that iteration's flushes wrote and reuses its
        slots."""
        if op.kind is not OpKind.PREFETCH:
            return op
        users = [i for i in self.streamed if self.slot_of[i] == op.slot]
        previous = {self.index[OpKind.FLUSH, op.subgroup], self.index[OpKind.FLUSH, users[-1]]}
        return Op(op.kind, op.subgroup, op.after, tuple(sorted(previous)), op.slot)


class _Clock:
    """Predicted times of the update phase, just enough to order the H2D lane."""

    def __init__(self, seconds: OpSeconds) -> None:
        self.seconds = seconds
        self.cpu = self.h2d = self.d2h = 0.0
        self.loaded: dict[int, float] = {}
        self.flushed: dict[int, float] = {}

    def cpu_end(self, i: int) -> float:
        return self.cpu + self.seconds(OpKind.UPDATE_CPU, i)

    def run_cpu(self, i: int) -> None:
        self.cpu = self.cpu_end(i)
        self.h2d = max(self.h2d, self.cpu) + self.seconds(OpKind.PARAM_H2D, i)

    def prefetch(self, i: int, slot_user: int) -> None:
        self.h2d = max(self.h2d, self.flushed[slot_user]) + self.seconds(OpKind.PREFETCH, i)
        self.loaded[i] = self.h2d

    def stream(self, i: int) -> None:
        updated = self.loaded.get(i, 0.0) + self.seconds(OpKind.UPDATE_GPU, i)
        self.d2h = max(self.d2h, updated) + self.seconds(OpKind.FLUSH, i)
        self.flushed[i] = self.d2h
