"""A backend without hardware: discrete events over the very plan that training runs. Standard library only.

Every lane is first-in first-out. A running operation works at the speed its lane has alone, unless lanes contend:
both directions of the link slow each other down, and the CPU update and both copies share host memory. While they want
more than it has, each keeps the rate that was measured with all others busy, and what is left is split in proportion to
what each lacks. Ranks of one host get max-min fair parts of its memory. Same input, same output: ties go by op number.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from deep_offload.model.cost import StateFormat, op_cost
from deep_offload.model.hardware import HardwareProfile
from deep_offload.plan.execute import PlanRun
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Lane, Op, OpKind, Plan
from deep_offload.plan.timeline import Span, Timeline

MainSeconds = Callable[[OpKind, int], float]
"""Seconds that the training loop spends in an external operation, after its waits."""

_LANES = tuple(Lane)
_CPU, _H2D, _D2H = (_LANES.index(lane) for lane in (Lane.CPU, Lane.H2D, Lane.D2H))
_LANE_NUMBER = {lane: number for number, lane in enumerate(_LANES)}
_CONTENDING = (Lane.CPU, Lane.H2D, Lane.D2H)

_SETTLED_ITERATIONS = 16
"""After so many what piles up on a lane has filled the slots of every plan that was tried."""

_Key = int
"""rank * number of lanes + lane number."""

_Contender = tuple[_Key, float, float]
"""What a task shares the link or host memory as: its key, its demand of host memory (bytes/s at speed 1), and its least
speed."""


@dataclass(slots=True)
class _Task:
    """One operation. Speeds are relative to the lane alone. contender: None where nothing slows it down."""

    op: Op
    key: _Key
    remaining: float
    contender: _Contender | None
    num_bytes: int
    waits_for: int = 0
    start: float = -1.0
    end: float = -1.0
    followers: list[_Task] = field(default_factory=list)


class SimHost:
    """One host: the memory that its ranks share, and the event loop."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.tasks: list[_Task] = []
        self.lanes: dict[_Key, deque[_Task]] = defaultdict(deque)
        self._both = {
            _CPU: 1.0,
            _H2D: min(1.0, profile.h2d_both_bytes_per_s / profile.h2d_bytes_per_s),
            _D2H: min(1.0, profile.d2h_both_bytes_per_s / profile.d2h_bytes_per_s),
        }
        self._known_speeds: dict[tuple[_Contender, ...], dict[_Key, float]] = {}

    def add(self, task: _Task, after: Sequence[int]) -> int:
        """Queue a task on its lane, behind tasks given by their numbers; returns its number."""
        for other in after:
            self.tasks[other].followers.append(task)
        task.waits_for = len(after)
        self.lanes[task.key].append(task)
        self.tasks.append(task)
        return len(self.tasks) - 1

    def run(self) -> None:
        """Play all tasks; afterwards each has its start and end."""
        now = 0.0
        running: dict[_Key, _Task] = {}
        self._start(sorted(self.lanes), running, now)
        while running:
            speeds = self._speeds(running)
            work = [(task, speeds.get(key, 1.0)) for key, task in running.items()]
            step = min([task.remaining / speed for task, speed in work])
            now += step
            soon = step * (1 + 1e-12)
            woken: list[_Key] = []
            for task, speed in work:
                if task.remaining / speed <= soon:
                    del running[task.key]
                    self._finish(task, now, woken)
                else:
                    task.remaining -= step * speed
            self._start(woken, running, now)
        stuck = [task.op.label for task in self.tasks if task.end < 0]
        if stuck:
            raise ValueError(f"the plan cannot go on: {', '.join(stuck[:5])} wait for each other")

    def _start(self, woken: list[_Key], running: dict[_Key, _Task], now: float) -> None:
        """Start what is at the head of its lane and ready; operations without work end at once and wake others."""
        for key in woken:  # grows while it is walked
            queue = self.lanes[key]
            if key in running or not queue or queue[0].waits_for:
                continue
            task = queue[0]
            task.start = now
            if task.remaining > 0:
                running[key] = task
            else:
                self._finish(task, now, woken)

    def _finish(self, task: _Task, now: float, woken: list[_Key]) -> None:
        task.end = now
        self.lanes[task.key].popleft()
        woken.append(task.key)
        for follower in task.followers:
            follower.waits_for -= 1
            if not follower.waits_for:
                woken.append(follower.key)

    def _speeds(self, running: dict[_Key, _Task]) -> dict[_Key, float]:
        """Speed of each running task that shares something; the same few sets of them run again and again."""
        contending = tuple([task.contender for task in running.values() if task.contender])
        if contending not in self._known_speeds:
            self._known_speeds[contending] = self._contended(contending)
        return self._known_speeds[contending]

    def _contended(self, contending: tuple[_Contender, ...]) -> dict[_Key, float]:
        keys = {key for key, _, _ in contending}
        by_rank: dict[int, list[tuple[_Contender, float]]] = {}
        for contender in contending:
            rank, lane = divmod(contender[0], len(_LANES))
            other = contender[0] + (_D2H - _H2D if lane == _H2D else _H2D - _D2H)
            most = self._both[lane] if lane != _CPU and other in keys else 1.0
            by_rank.setdefault(rank, []).append((contender, most))
        wanted = {rank: sum(demand * most for (_, demand, _), most in both) for rank, both in by_rank.items()}
        given = _fair_parts(wanted, self.profile.dram_bytes_per_s, self.profile.host_dram_bytes_per_s)
        speeds: dict[_Key, float] = {}
        for rank, contenders in by_rank.items():
            shared = _share(contenders, wanted[rank], given[rank])
            speeds |= {key: speed for ((key, _, _), _), speed in zip(contenders, shared)}
        return speeds


def _share(contenders: list[tuple[_Contender, float]], wanted: float, capacity: float) -> list[float]:
    """Speeds of one rank's contenders, each given with its most, within `capacity` bytes/s."""
    if wanted <= capacity:
        return [most for _, most in contenders]
    least = [min(most, least_speed) for (_, _, least_speed), most in contenders]
    guaranteed = sum(demand * speed for ((_, demand, _), _), speed in zip(contenders, least))
    if guaranteed >= capacity:
        return [speed * capacity / guaranteed for speed in least]
    raised = (capacity - guaranteed) / (wanted - guaranteed)
    return [speed + raised * (most - speed) for (_, most), speed in zip(contenders, least)]


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
        self._first_key = rank * len(_LANES)
        self._costs: dict[tuple[OpKind, int, int, int], tuple[float, _Contender | None, int]] = {}

    def submit(self, op: Op, after: Sequence[int]) -> int:
        lane = op.lane
        key = self._first_key + _LANE_NUMBER[lane]
        if lane is Lane.MAIN:
            task = _Task(op, key, self._main_seconds(op.kind, op.subgroup), None, 0)
        else:
            task = _Task(op, key, *self._cost(op, key))
        return self._host.add(task, after)

    def _cost(self, op: Op, key: _Key) -> tuple[float, _Contender | None, int]:
        """Seconds alone, what it contends as, bytes over the link; equal subgroups share it."""
        subgroup = self._layout.subgroups[op.subgroup]
        size = op.kind, subgroup.numel, subgroup.param_bytes, subgroup.grad_bytes
        if size not in self._costs:
            cost = op_cost(op.kind, subgroup, self._state, self._host.profile)
            busy = op_cost(op.kind, subgroup, self._state, self._host.profile, busy=True)
            demand = cost.dram_bytes / cost.seconds if cost.seconds > 0 else 0.0
            least = min(1.0, cost.seconds / busy.seconds) if busy.seconds > 0 else 1.0
            contender = (key, demand, least) if op.lane in _CONTENDING else None
            self._costs[size] = (cost.seconds, contender, cost.link_bytes)
        return self._costs[size]


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
    """One of several simulated iterations of one rank.

    timeline: seconds since its first operation began; iteration_seconds: from the norm before to its own, behind more
    than three the mean of two, or with a single iteration from the start to the end of the last operation.
    """

    timeline: Timeline
    iteration_seconds: float

    @property
    def lane_seconds(self) -> float:
        """What the busiest lane works for the iteration."""
        busy = dict.fromkeys(Lane, 0.0)
        for span in self.timeline.spans:
            busy[span.op.lane] += span.end - span.start
        return max(busy.values())

    @property
    def piles_up(self) -> bool:
        """Whether that is more than it lasts: then work waits from one to the next, and they grow to about that."""
        return self.lane_seconds > self.iteration_seconds * (1 + 1e-9)


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
    num_following: int = 0,
    num_ranks: int = 1,
) -> Simulation:
    """Play a plan for some iterations on `num_ranks` equal ranks of one host; returns the last of them.

    num_following: further ones are played behind it.

    forward_seconds: of the first micro-batch, which waits for parameters; backward_seconds: of the last one, which
    makes gradients final; other_seconds: compute between the two.
    """
    # Equal ranks always get equal parts of the host's memory, so one of them stands for all.
    host = SimHost(replace(profile, host_dram_bytes_per_s=profile.rank_dram_bytes_per_s(num_ranks)))
    main = main_seconds(
        layout,
        profile,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        other_seconds=other_seconds,
    )
    runs = submit_iterations(plan, SimBackend(host, layout, state, main), num_iterations + num_following)
    host.run()
    runs = runs[:num_iterations]
    timeline = timeline_of(host, runs[-1])
    norms = [_norm_end(host, run) for run in runs]
    if num_iterations == 1:
        return Simulation(timeline, max((s.end for s in timeline.spans), default=0.0))
    counted = 2 if num_iterations > 3 else 1  # long and short ones may alternate, and the first are like none
    return Simulation(timeline, (norms[-1] - norms[-1 - counted]) / counted)


Play = Callable[..., Simulation]
"""`simulate` of one plan, all but `num_iterations` and `num_following` given."""


def settled_iteration(play: Play) -> Simulation:
    """An iteration as those of a long training.

    The second one mostly is. Where work piles up, flushes end later from iteration to iteration, until prefetches wait
    for the slots: then it is a later one, whose last flushes meet the next one's prefetches.
    """
    second = play(num_iterations=2, num_following=0)
    return play(num_iterations=_SETTLED_ITERATIONS, num_following=1) if second.piles_up else second


def iteration_cost(play: Play) -> float:
    """Seconds of such an iteration, near enough to compare placements by: where work piles up, of a third and a fourth
    one, or what keeps a lane busy for longer."""
    second = play(num_iterations=2, num_following=0)
    if not second.piles_up:
        return second.iteration_seconds
    fourth = play(num_iterations=4, num_following=1)
    return max(fourth.iteration_seconds, fourth.lane_seconds)


def submit_iterations(plan: Plan, backend: SimBackend, num_iterations: int) -> list[PlanRun]:
    """Hand iterations to a backend, every external operation fired at its turn. `SimHost.run` then plays them."""
    runs: list[PlanRun] = []
    for _ in range(num_iterations):
        run = PlanRun(plan, backend, runs[-1] if runs else None)
        run.fire_all()
        assert run.is_done
        runs.append(run)
    return runs


def _norm_end(host: SimHost, run: PlanRun) -> float:
    return next(host.tasks[i].end for i in run.completions if host.tasks[i].op.kind is OpKind.NORM_READY)


def timeline_of(host: SimHost, run: PlanRun) -> Timeline:
    """What a played run did; times count from the start of its first operation."""
    tasks = [host.tasks[i] for i in run.completions]
    origin = min((task.start for task in tasks), default=0.0)
    return Timeline(tuple(Span(t.op, t.start - origin, t.end - origin, t.num_bytes) for t in tasks))
