"""A backend without hardware: discrete events over the very plan that training runs. Standard library only.

Every lane is first-in first-out. A running operation works at the speed its lane has alone, unless lanes contend:
both directions of the link slow each other down, and the CPU update and both copies share host memory. While they want
more than it has, each keeps the rate that was measured with all others busy, and what is left is split in proportion to
what each lacks. Ranks of one host get max-min fair parts of its memory. Same input, same output: ties go by op number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deep_offload.model.cost import StateFormat, op_cost
from deep_offload.model.hardware import HardwareProfile
from deep_offload.plan.execute import PlanRun
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Lane, Op, OpKind, Plan
from deep_offload.plan.timeline import Span, Timeline

MainSeconds = Callable[[OpKind, int], float]
"""Seconds that the training loop spends in an external operation, after its waits."""

_CONTENDING = (Lane.CPU, Lane.H2D, Lane.D2H)


@dataclass(slots=True)
class _Task:
    """One operation. Speeds are relative to the lane alone; demand is host memory bytes/s at speed 1."""

    op: Op
    rank: int
    waits_for: int
    remaining: float
    demand: float
    least_speed: float
    num_bytes: int
    start: float = -1.0
    end: float = -1.0
    followers: list[int] = field(default_factory=list)


class SimHost:
    """One host: the memory that its ranks share, and the event loop."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.tasks: list[_Task] = []
        self.lanes: dict[tuple[int, Lane], deque[int]] = {}

    def add(self, task: _Task, after: Sequence[int]) -> int:
        index = len(self.tasks)
        self.tasks.append(task)
        for other in set(after):
            self.tasks[other].followers.append(index)
            task.waits_for += 1
        self.lanes.setdefault((task.rank, task.op.lane), deque()).append(index)
        return index

    def run(self) -> None:
        """Play all tasks; afterwards each has its start and end."""
        now = 0.0
        running: dict[tuple[int, Lane], _Task] = {}
        candidates = set(self.lanes)
        while True:
            candidates = self._start(candidates, running, now)
            if not running:
                break
            speeds = self._speeds(running)
            step = min(task.remaining / speeds[key] for key, task in running.items())
            now += step
            for key, task in list(running.items()):
                left = task.remaining - step * speeds[key]
                if left <= 1e-9 * step * speeds[key] or task.remaining / speeds[key] <= step:
                    del running[key]
                    candidates |= self._finish(key, task, now)
                else:
                    task.remaining = left
        stuck = [task.op.label for task in self.tasks if task.end < 0]
        if stuck:
            raise ValueError(f"the plan cannot go on: {', '.join(stuck[:5])} wait for each other")

    def _start(self, candidates: set[tuple[int, Lane]], running: dict[tuple[int, Lane], _Task], now: float) -> set:
        """Start what is at the head of its lane and ready; operations without work end at once and ready others."""
        todo = sorted(candidates, key=lambda key: (key[0], key[1].value))
        while todo:
            key = todo.pop(0)
            queue = self.lanes.get(key)
            if key in running or not queue or self.tasks[queue[0]].waits_for:
                continue
            task = self.tasks[queue[0]]
            task.start = now
            if task.remaining > 0:
                running[key] = task
            else:
                todo += sorted(self._finish(key, task, now), key=lambda k: (k[0], k[1].value))
        return set()

    def _finish(self, key: tuple[int, Lane], task: _Task, now: float) -> set[tuple[int, Lane]]:
        task.end = now
        self.lanes[key].popleft()
        woken = {key}
        for follower in task.followers:
            other = self.tasks[follower]
            other.waits_for -= 1
            if not other.waits_for:
                woken.add((other.rank, other.op.lane))
        return woken

    def _speeds(self, running: dict[tuple[int, Lane], _Task]) -> dict[tuple[int, Lane], float]:
        speeds = dict.fromkeys(running, 1.0)
        contending: dict[int, list[tuple[_Task, float]]] = {}
        for (rank, lane), task in running.items():
            if lane in _CONTENDING:
                most = self._most_speed(lane, (rank, Lane.D2H if lane is Lane.H2D else Lane.H2D) in running)
                contending.setdefault(rank, []).append((task, most))
        wanted = {rank: sum(t.demand * most for t, most in tasks) for rank, tasks in contending.items()}
        given = _fair_parts(wanted, self.profile.dram_bytes_per_s, self.profile.host_dram_bytes_per_s)
        for rank, tasks in contending.items():
            for (task, _), speed in zip(tasks, _share(tasks, given[rank])):
                speeds[rank, task.op.lane] = speed
        return speeds

    def _most_speed(self, lane: Lane, is_other_direction_busy: bool) -> float:
        if lane is Lane.CPU or not is_other_direction_busy:
            return 1.0
        p = self.profile
        alone, both = (
            (p.h2d_bytes_per_s, p.h2d_both_bytes_per_s)
            if lane is Lane.H2D
            else (p.d2h_bytes_per_s, p.d2h_both_bytes_per_s)
        )
        return min(1.0, both / alone)


def _share(tasks: list[tuple[_Task, float]], capacity: float) -> list[float]:
    """Speeds of one rank's contending tasks, given as (task, most speed), within `capacity` bytes/s."""
    wanted = sum(task.demand * most for task, most in tasks)
    if wanted <= capacity:
        return [most for _, most in tasks]
    least = [min(most, task.least_speed) for task, most in tasks]
    guaranteed = sum(task.demand * speed for (task, _), speed in zip(tasks, least))
    if guaranteed >= capacity:
        return [speed * capacity / guaranteed for speed in least]
    raised = (capacity - guaranteed) / (wanted - guaranteed)
    return [speed + raised * (most - speed) for (_, most), speed in zip(tasks, least)]


def _fair_parts(wanted: dict[int, float], most_each: float, total: float) -> dict[int, float]:
    """Max-min fair parts of `total` for ranks that want so much, none more than `most_each`."""
    parts: dict[int, float] = {}
    left = total
    for number, rank in enumerate(sorted(wanted, key=lambda r: (wanted[r], r))):
        parts[rank] = min(wanted[rank], most_each, left / (len(wanted) - number))
        left -= parts[rank]
    return parts


class SimBackend:
    """Takes the operations of one rank; `SimHost.run` plays them. External operations take `main_seconds`."""

    def __init__(
        self, host: SimHost, layout: ShardLayout, state: StateFormat, main_seconds: MainSeconds, rank: int = 0
    ) -> None:
        self._host = host
        self._layout = layout
        self._state = state
        self._main_seconds = main_seconds
        self._rank = rank

    def submit(self, op: Op, after: Sequence[int]) -> int:
        return self._host.add(self._task(op), after)

    def _task(self, op: Op) -> _Task:
        if op.lane is Lane.MAIN:
            return _Task(op, self._rank, 0, self._main_seconds(op.kind, op.subgroup), 0.0, 1.0, 0)
        subgroup = self._layout.subgroups[op.subgroup]
        cost = op_cost(op.kind, subgroup, self._state, self._host.profile)
        busy = op_cost(op.kind, subgroup, self._state, self._host.profile, busy=True)
        demand = cost.dram_bytes / cost.seconds if cost.seconds > 0 else 0.0
        least = min(1.0, cost.seconds / busy.seconds) if busy.seconds > 0 else 1.0
        return _Task(op, self._rank, 0, cost.seconds, demand, least, cost.link_bytes)


def main_seconds(
    layout: ShardLayout,
    profile: HardwareProfile,
    *,
    forward_seconds: float,
    backward_seconds: float,
    other_seconds: float = 0.0,
) -> MainSeconds:
    """Backward and forward spread over the subgroups by their size; the norm reads every gradient once.

    other_seconds: compute before the last backward pass: all other micro-batches, pipeline bubbles.
    """
    numel = max(1, layout.numel)
    norm_seconds = numel / profile.gpu_upcast_params_per_s
    last = len(layout.subgroups) - 1  # its gradient is ready first

    def seconds(kind: OpKind, i: int) -> float:
        match kind:
            case OpKind.GRADS_READY:
                before = other_seconds if i == last else 0.0
                return before + backward_seconds * layout.subgroups[i].numel / numel
            case OpKind.PARAMS_NEEDED:
                return forward_seconds * layout.subgroups[i].numel / numel
            case OpKind.NORM_READY:
                return norm_seconds if backward_seconds else 0.0
            case _:
                return 0.0

    return seconds


@dataclass(frozen=True, slots=True)
class Simulation:
    """The last of several simulated iterations of every rank.

    timelines: one per rank, seconds since its first operation began; iteration_seconds: from norm to norm, of rank 0,
    which with a single iteration is the time from the start to the end of the last operation.
    """

    timelines: tuple[Timeline, ...]
    iteration_seconds: float


def simulate(
    plan: Plan,
    layout: ShardLayout,
    state: StateFormat,
    profile: HardwareProfile,
    *,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    other_seconds: float = 0.0,
    num_iterations: int = 1,
    num_ranks: int = 1,
) -> Simulation:
    """Play a plan for some iterations on `num_ranks` equal ranks of one host.

    forward_seconds: of the first micro-batch, which waits for parameters; backward_seconds: of the last one, which
    makes gradients final; other_seconds: compute between the two.
    """
    host = SimHost(profile)
    main = main_seconds(
        layout,
        profile,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        other_seconds=other_seconds,
    )
    runs: list[list[PlanRun]] = [
        _submit(plan, SimBackend(host, layout, state, main, rank), num_iterations) for rank in range(num_ranks)
    ]
    host.run()
    timelines = tuple(_timeline(host, per_rank[-1]) for per_rank in runs)
    norms = [_norm_end(host, run) for run in runs[0]]
    seconds = norms[-1] - norms[-2] if num_iterations > 1 else max((s.end for s in timelines[0].spans), default=0.0)
    return Simulation(timelines, seconds)


def _submit(plan: Plan, backend: SimBackend, num_iterations: int) -> list[PlanRun]:
    runs: list[PlanRun] = []
    for _ in range(num_iterations):
        run = PlanRun(plan, backend, runs[-1] if runs else None)
        for op in plan.ops:
            if op.lane is Lane.MAIN:
                run.fire(op.kind, op.subgroup)
        assert run.is_done
        runs.append(run)
    return runs


def _norm_end(host: SimHost, run: PlanRun) -> float:
    return next(host.tasks[i].end for i in run.completions if host.tasks[i].op.kind is OpKind.NORM_READY)


def _timeline(host: SimHost, run: PlanRun) -> Timeline:
    tasks = [host.tasks[i] for i in run.completions]
    origin = min((task.start for task in tasks), default=0.0)
    return Timeline(tuple(Span(t.op, t.start - origin, t.end - origin, t.num_bytes) for t in tasks))
