"""The engine: Adam over flat shards, state placed by a plan, updated on CPU and GPU at once. Knows no front end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_offload.kernels import reference
from deep_offload.kernels.scalars import AdamClass, scalar_row
from deep_offload.model.cost import StateFormat
from deep_offload.model.memory import DeviceBytes, device_state_bytes, host_state_bytes
from deep_offload.model.trace import Expectation
from deep_offload.optimizer.shards import SegmentTables, Shard, holding
from deep_offload.optimizer.small_copies import to_device
from deep_offload.optimizer.step_marks import Mark, StepMarks, phases_of
from deep_offload.plan.check import check_plan
from deep_offload.plan.execute import PlanRun
from deep_offload.plan.layout import MasterStorage, ShardLayout, Subgroup
from deep_offload.plan.ops import OpKind, Place, Placement, Plan
from deep_offload.plan.placement import with_residents
from deep_offload.plan.planner import OpSeconds, build_plan
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER
from deep_offload.plan.timeline import Timeline
from deep_offload.runtime.convert import widen_into
from deep_offload.runtime.lanes import CudaDevice, HostDevice, LaneBackend
from deep_offload.runtime.moves import move_state
from deep_offload.runtime.state import DeviceState, HostState, StatePlan
from deep_offload.runtime.worker import DeviceBuffers, StepInputs, SubgroupWorker

STATE_NAMES = (MASTER, EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What was decided about placement. wire_dtype: type of 16-bit gradient buffers' gradients on the host."""

    placement: Placement
    num_slots: int
    split_master: bool
    wire_dtype: torch.dtype
    num_threads: int
    reserved: frozenset[int] = frozenset()
    """Subgroups whose host arrays let the CPU update them after a `move`."""


class OffloadEngine:
    """Owns optimizer state and lanes of one rank.

    An iteration: `grads_ready(i)` for subgroups whose gradient is final, then `update(...)` or `skip_update()`, then
    `wait_until_reusable()` before gradients are zeroed and parameters read; a forward pass that reads them one after
    the other may ask with `wait_for_params(count)` first. Calls come from one thread at a time.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        layout: ShardLayout,
        settings: EngineSettings,
        *,
        warn: Callable[[str], None],
        log: Callable[[str], None] = print,
        seconds: OpSeconds | None = None,
        device: torch.device | None = None,
        late_params: Collection[int] = (),
    ) -> None:
        """late_params: parameters whose gradient is final only after backward, so that nothing else waits for it."""
        self.layout = layout
        self.late_subgroups = holding(layout, shards, late_params)
        self.settings = settings
        self._first_placement = settings.placement
        self._shards = tuple(shards)
        self._device = shards[0].param.device if shards else device or torch.device("cpu")
        self._seconds = seconds
        self.plan = self._checked_plan(settings, seconds)
        self._buffers = DeviceBuffers(
            [self._view(s, "param") for s in layout.subgroups], [self._view(s, "grad") for s in layout.subgroups]
        )
        param_dtypes = tuple(s.param.dtype for s in shards)
        how = settings.placement, settings.split_master, settings.wire_dtype, param_dtypes, settings.reserved
        self._state_plan = StatePlan(layout, *how)
        on_gpu = self._device.type == "cuda"
        # The device first: where it has no room, no host memory was pinned in vain.
        self._device_state = DeviceState(self._state_plan, settings.num_slots, self._device)
        self._host = HostState(self._state_plan, pin=on_gpu, num_threads=settings.num_threads, warn=warn, log=log)
        self._worker = SubgroupWorker(
            self._state_plan, self._host, self._device_state, self._buffers, settings.num_threads
        )
        lanes = CudaDevice(self._device) if on_gpu else HostDevice()
        self._backend = LaneBackend(self._worker.handlers, lanes)
        self.marks = StepMarks(lanes, self._device)
        self._closing_marks: tuple[Mark, ...] = ()
        self._run: PlanRun | None = None
        self._closing: PlanRun | None = None
        self._finished: PlanRun | None = None
        self._finished_before: PlanRun | None = None
        self._measured: tuple[PlanRun, Timeline] | None = None
        self._kept: deque[tuple[PlanRun, tuple[Mark, ...]]] = deque(maxlen=1)
        self.expected: Expectation | None = None
        """What the placement was chosen by, where a profile of this machine was at hand."""
        self._ready: set[int] = set()
        self._segments = SegmentTables(self._shards, layout, self._device)
        self._num_in_place = 0
        self._waited = 0.0
        self.wait_seconds = 0.0
        """Seconds the training loop waited for the last update."""
        try:
            for i in range(len(layout.subgroups)):
                self.refresh_master(i)
        except BaseException:
            self.close()
            raise

    # -- one iteration ------------------------------------------------------------------------------------------

    def grads_ready(self, i: int) -> None:
        """The gradient of subgroup i is final on the device (as of the current stream): its flush may start."""
        self._begin()
        if i not in self._ready:
            self._ready.add(i)
            self._current().fire(OpKind.GRADS_READY, i)

    def following(self, work: Any) -> AbstractContextManager[None]:
        """Inside, gradients said to be ready are final when `work`, an asynchronous collective, has ended."""
        return self._backend.following(work)

    def update(self, classes: Sequence[AdamClass], class_of: Sequence[int], grad_scale: float) -> None:
        """Update every subgroup with final gradients times `grad_scale`; returns once the work is with the lanes.

        classes: what groups of parameters share; class_of[p]: class of parameter p, or HOLD (-1) to leave it alone.
        """
        if not self.layout.subgroups:
            return
        for i in reversed(range(len(self.layout.subgroups))):
            self.grads_ready(i)
        self.wait_until_reusable()  # of the update before, if no forward pass asked for all parameters
        scalars = torch.tensor([scalar_row(c) for c in classes], dtype=torch.float32)
        host_tables, device_tables = self._segments.tables(tuple(class_of))
        self._worker.inputs = StepInputs(
            scalars,
            to_device(scalars, self._device),
            host_tables,
            device_tables,
            grad_scale,
            all(c.decoupled for c in classes),
        )
        run = self._current()
        run.fire(OpKind.NORM_READY)
        self._closing, self._run = run, None
        self._closing_marks = self.marks.take()
        self._num_in_place, self._waited = 0, 0.0
        self._ready.clear()
        self._begin()

    def skip_update(self) -> None:
        """Leave this iteration's update out; state stays as it is. What was prefetched is dropped."""
        self._drop_run()

    def wait_for_params(self, count: int) -> None:
        """Make the current stream of the training loop wait for the parameters of the first `count` subgroups."""
        if self._closing is None:
            return
        start = time.perf_counter()
        for i in range(self._num_in_place, count):
            self._closing.fire(OpKind.PARAMS_NEEDED, i)
        self._num_in_place = max(self._num_in_place, count)
        self._waited += time.perf_counter() - start

    def wait_until_reusable(self) -> None:
        """Make the training loop wait until every parameter is in place and gradients may be overwritten."""
        if self._closing is None:
            self._backend.raise_if_failed()
            return
        self.wait_for_params(len(self.layout.subgroups))
        start = time.perf_counter()
        self._closing.fire(OpKind.GRADS_REUSABLE)
        self.wait_seconds = self._waited + time.perf_counter() - start
        self._finished_before, self._finished, self._closing = self._finished, self._closing, None
        self._kept.append((self._finished, self._closing_marks))

    def synchronize(self) -> None:
        """Wait for all lanes: state and parameters are final afterwards. Raises what a lane raised."""
        self.wait_until_reusable()
        self._backend.synchronize()

    def timeline(self) -> Timeline | None:
        """Measured times of the last complete iteration; synchronizes."""
        self.synchronize()
        return None if self._finished is None else self._backend.timeline(self._finished.completions)

    def keep_timelines(self, num_steps: int) -> None:
        """Keep the times of the last `num_steps` iterations instead of one."""
        self._kept = deque(self._kept, maxlen=num_steps)

    def timelines(self) -> list[Timeline]:
        """Measured times of the iterations that were kept, on one clock; synchronizes."""
        self.synchronize()
        kept = list(self._kept)
        parts = [[*run.completions, *(mark.completion for mark in marks)] for run, marks in kept]
        joined, steps = list(self._backend.timeline([done for part in parts for done in part]).spans), []
        for run, marks in kept:
            spans = tuple(joined[: len(run.completions)])
            at = joined[len(spans) : len(spans) + len(marks)]
            del joined[: len(spans) + len(marks)]
            pairs = ((span.end, mark.allocated) for span, mark in zip(at, marks))
            allocated = tuple((end, size) for end, size in pairs if size is not None)
            steps.append(Timeline(spans, phases_of(marks, at, Timeline(spans).norm_end), allocated))
        return steps

    def finished_timeline(self) -> Timeline | None:
        """Measured times of the last iteration that ended with all its flushes, which may outlive the next; None before
        the first."""
        runs = (self._finished, self._finished_before)
        run = next((run for run in runs if run is not None and self._backend.is_done(run.completions)), None)
        if run is None:
            return None
        if self._measured is None or self._measured[0] is not run:
            self._measured = run, self._backend.timeline(run.completions)
        return self._measured[1]

    def close(self) -> None:
        """Finish all work, end the threads, release host memory. The engine cannot be used afterwards."""
        if self._backend.is_closed:
            return
        try:
            self.synchronize()
        finally:
            self._backend.close()
            self._host.close()

    def is_on_a_lane(self) -> bool:
        """Whether the caller is one of the lanes' own threads."""
        return self._backend.is_on_a_lane()

    def keep_resident(self, count: int) -> None:
        """From now on the state of the first `count` subgroups stays on the device; no bit of it changes.

        Call it between iterations, with parameters settled. Host memory of these subgroups stays allocated, unused.
        Raises torch.OutOfMemoryError, with nothing changed.
        """
        settings = replace(self.settings, placement=with_residents(self.settings.placement, count))
        state_plan = replace(self._state_plan, placement=settings.placement)
        plan = self._checked_plan(settings, self._seconds)
        self._drop_run()
        self._device_state.keep(state_plan, self._host)
        self._use(settings, state_plan, plan)

    def can_move(self, placement: Placement) -> bool:
        """Whether `move` may be asked for it: residents are the same, and what was allocated at the start serves it."""
        same = all(
            (old is Place.RESIDENT) == (new is Place.RESIDENT) for old, new in zip(self.settings.placement, placement)
        )
        plan = replace(self._state_plan, placement=placement)
        return same and self._device_state.holds(plan) and self._host.holds(plan)

    def move(self, placement: Placement, seconds: OpSeconds | None = None) -> None:
        """From now on offloaded subgroups are updated where `placement` says; no bit of their state changes.

        Call it between iterations, with parameters settled, for a placement that it `can_move` to. All memory stays as
        it is. seconds: costs to order copies by from now on; None: as before. Raises torch.OutOfMemoryError, with
        nothing changed.
        """
        assert self.can_move(placement)
        self._drop_run()
        settings = replace(self.settings, placement=placement, num_slots=self.num_slots)
        state_plan = replace(self._state_plan, placement=placement)
        seconds = seconds or self._seconds
        plan = self._checked_plan(settings, seconds)
        move_state(self._host, self._state_plan, state_plan, self._buffers.weights)
        self._seconds = seconds
        self._use(settings, state_plan, plan)

    @property
    def movable(self) -> list[int]:
        """Offloaded subgroups that the CPU may update, now or after a `move`."""
        placed = enumerate(self.settings.placement)
        return [i for i, place in placed if place is not Place.RESIDENT and self._host.can_serve_cpu(i)]

    @property
    def num_slots(self) -> int:
        """Slots that a plan may use from now on."""
        return max(1, min(self.settings.num_slots, len(self._device_state.slots)))

    def _use(self, settings: EngineSettings, state_plan: StatePlan, plan: Plan) -> None:
        """Work by another plan, whose state is in place."""
        self.settings, self._state_plan, self.plan = settings, state_plan, plan
        self._worker = SubgroupWorker(
            state_plan, self._host, self._device_state, self._buffers, settings.num_threads, self._worker.traffic
        )
        self._backend.use(self._worker.handlers)

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes moved and parameters updated since the start, by lane."""
        return self._worker.traffic.as_dict()

    @property
    def device(self) -> torch.device:
        """Where parameters and gradients are."""
        return self._device

    @property
    def host_bytes(self) -> int:
        return self._host.num_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of resident state and staging slots on the device."""
        return self._device_state.num_bytes

    @property
    def planned_bytes(self) -> tuple[int, DeviceBytes]:
        """Bytes of state on the host as the first placement counted them, since none is given back, and on the device
        as the present one does."""
        state, first = self._format, self._first_placement
        host = host_state_bytes(self.layout, first, state, self.settings.reserved)
        return host.total, device_state_bytes(self.layout, self.settings.placement, state, self.num_slots)

    @property
    def _format(self) -> StateFormat:
        wire = "fp32" if self.settings.wire_dtype == torch.float32 else "param"
        return StateFormat(self.settings.split_master, wire)

    def read_state(
        self,
        i: int,
        start: int = 0,
        end: int | None = None,
        names: Sequence[str] = STATE_NAMES,
        merge_on: torch.device | None = None,
    ) -> dict[str, torch.Tensor]:
        """fp32 master, exp_avg and exp_avg_sq of elements [start, end) of subgroup i. Call `synchronize` first.

        Tensors may be views of the engine's own: read them before the next update and do not write. merge_on: where a
        split master is put together, which takes memory there; default: where its lower half lies.
        """
        piece = slice(start, self.layout.subgroups[i].numel if end is None else end)
        arrays = self._home(i)
        state = {name: arrays[name][piece] for name in (EXP_AVG, EXP_AVG_SQ) if name in names}
        if MASTER not in names:
            return state
        match self._storage(i):
            case MasterStorage.FULL:
                state[MASTER] = arrays[MASTER][piece]
            case MasterStorage.SPLIT:
                low = arrays[MASTER][piece]
                low = low if merge_on is None else low.to(merge_on)
                state[MASTER] = reference.merge_master(self._buffers.weights[i][piece].to(low.device), low)
            case MasterStorage.WEIGHT:
                state[MASTER] = self._buffers.weights[i][piece]
        return state

    def read_weight(self, i: int, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of subgroup i in the parameter buffer: a view in its type, on the device."""
        return self._buffers.weights[i][start:end]

    def read_grad(self, i: int) -> torch.Tensor:
        """Gradient of subgroup i in the training loop's buffer: a view in its type, on the device."""
        return self._buffers.grads[i]

    def other_side(self, i: int) -> torch.device:
        """Where subgroup i is not updated: the host, or the device."""
        is_on_cpu = self.settings.placement[i] is Place.CPU
        return self._device if is_on_cpu else torch.device("cpu")

    def repeat_update(self, i: int, state: dict[str, torch.Tensor], grad: torch.Tensor) -> None:
        """Do the last update's arithmetic of subgroup i on copies that lie on the `other_side`, in place.

        state: as `read_state` gives it, fp32; grad: in the buffer's type.
        """
        self._worker.update_copy(i, state, grad, on_device=self.settings.placement[i] is Place.CPU)

    def write_state(self, i: int, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from `start` of one state of subgroup i with fp32 values; a master also sets its
        weights."""
        self._drop_run()
        piece = slice(start, start + values.numel())
        arrays = self._home(i)
        if name != MASTER:
            arrays[name][piece].copy_(values)
            return
        weight = self._buffers.weights[i][piece]
        match self._storage(i):
            case MasterStorage.FULL:
                arrays[MASTER][piece].copy_(values)
                weight.copy_(reference.round_to(values, weight.dtype))
            case MasterStorage.SPLIT:
                high, low = reference.split_master(values)
                weight.copy_(high)
                arrays[MASTER][piece].copy_(low)
            case MasterStorage.WEIGHT:
                weight.copy_(values)

    def refresh_master(self, i: int, start: int = 0, end: int | None = None) -> None:
        """Make the master of elements [start, end) of subgroup i equal to the weights that stand in the buffer now."""
        self._drop_run()
        piece = slice(start, self.layout.subgroups[i].numel if end is None else end)
        arrays = self._home(i)
        match self._storage(i):
            case MasterStorage.FULL:
                widen_into(arrays[MASTER][piece], self._buffers.weights[i][piece])
            case MasterStorage.SPLIT:
                arrays[MASTER][piece].zero_()
            case MasterStorage.WEIGHT:
                pass

    def subgroups_of(self, shard: int, start: int, end: int) -> list[Subgroup]:
        """Subgroups that hold any of elements [start, end) of a shard."""
        return [s for s in self.layout.subgroups if s.shard == shard and s.start < end and start < s.start + s.numel]

    # -- inside -------------------------------------------------------------------------------------------------

    def _checked_plan(self, settings: EngineSettings, seconds: OpSeconds | None) -> Plan:
        plan = build_plan(self.layout, settings.placement, settings.num_slots, seconds, self.late_subgroups)
        check_plan(plan)
        return plan

    def _begin(self) -> None:
        """Start the next iteration's run; its first prefetches go behind the flushes of the run before."""
        if self._run is None:
            self._run = PlanRun(self.plan, self._backend, previous=self._closing or self._finished)

    def _current(self) -> PlanRun:
        assert self._run is not None
        return self._run

    def _drop_run(self) -> None:
        """Forget a begun iteration: a skipped step, a load or a new placement makes what was prefetched worthless."""
        if self._run is None and self._closing is None and self._finished is None:
            return
        self.synchronize()
        self._run = self._finished = self._finished_before = None
        self._kept.clear()
        self._ready.clear()

    def _home(self, i: int) -> dict[str, torch.Tensor]:
        is_resident = self.settings.placement[i] is Place.RESIDENT
        return self._device_state.resident[i] if is_resident else self._host.arrays[i]

    def _storage(self, i: int) -> MasterStorage:
        return self._state_plan.storage(self.layout.subgroups[i])

    def _view(self, subgroup: Subgroup, name: str) -> torch.Tensor:
        return getattr(self._shards[subgroup.shard], name)[subgroup.start : subgroup.start + subgroup.numel]
