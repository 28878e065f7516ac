"""The lanes of a plan as threads: one first-in first-out worker each, on CUDA streams or without a GPU.

The main thread submits and goes on. A lane's thread waits for what an op needs, runs it, and marks it done. An
exception on a lane stops all lanes and surfaces on the main thread with its own traceback.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from deep_offload.plan.ops import Lane, Op, OpKind
from deep_offload.plan.timeline import Span, Timeline

WORK_LANES = (Lane.CPU, Lane.GPU, Lane.H2D, Lane.D2H)
Handler = Callable[[Op], int]
"""Does the work of an op and returns the bytes that it moved over the link."""


@dataclass(slots=True)
class Completion:
    """When and how an op is done. `issued` is set once the op has run (no stream) or is in its stream, `event`
    recorded."""

    op: Op
    issued: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None
    begin_event: torch.cuda.Event | None = None
    start: float = 0.0
    end: float = 0.0
    num_bytes: int = 0
    waited_from: float | None = None
    wait_event: torch.cuda.Event | None = None
    works: tuple[Any, ...] = ()
    """Collectives that must have ended too, where no stream orders them."""


class Device(Protocol):
    """How a lane waits and marks on a kind of device."""

    def enter(self, lane: Lane) -> None:
        """Called once on a lane's thread, before anything else there."""

    def wait(self, lane: Lane, done: Completion) -> None:
        """Make `lane` (called on its thread) wait until `done` is complete."""

    def run(self, lane: Lane, completion: Completion, handler: Handler) -> None:
        """Run the handler on the lane and fill the completion."""

    def mark_wait(self, completion: Completion) -> None:
        """Record that the training loop begins to wait for what the completion needs."""

    def mark_main(self, completion: Completion) -> None:
        """Record that the training loop's own work so far is what the completion stands for."""

    def is_done(self, completion: Completion) -> bool:
        """Whether an op is complete, without waiting for it."""

    def following(self, work: Any) -> AbstractContextManager[None]:
        """Inside, marks stand for the end of `work`, an asynchronous collective, which nobody waits for here."""

    def synchronize(self) -> None:
        """Wait for all streams of the lanes."""

    def span(self, completion: Completion) -> Span:
        """Measured times of a complete op."""


class HostDevice:
    """Lanes without a GPU: an op is done when its handler returns."""

    def __init__(self) -> None:
        self._followed: tuple[Any, ...] = ()

    def enter(self, lane: Lane) -> None:
        pass

    def wait(self, lane: Lane, done: Completion) -> None:
        done.issued.wait()
        for work in done.works:
            work.wait()

    def run(self, lane: Lane, completion: Completion, handler: Handler) -> None:
        completion.start = time.perf_counter()
        completion.num_bytes = handler(completion.op)
        completion.end = time.perf_counter()

    def mark_wait(self, completion: Completion) -> None:
        completion.waited_from = time.perf_counter()

    def mark_main(self, completion: Completion) -> None:
        completion.start = completion.end = time.perf_counter()
        if completion.op.kind is OpKind.NORM_READY:
            self._followed = ()  # gradients are final, so all have ended
        completion.works = self._followed

    @contextmanager
    def following(self, work: Any) -> Iterator[None]:
        # Added up, because an op may have been held back since an earlier collective.
        self._followed = (*self._followed, work)
        yield

    def is_done(self, completion: Completion) -> bool:
        return completion.issued.is_set()

    def synchronize(self) -> None:
        pass  # a lane is idle once its queue is

    def span(self, completion: Completion) -> Span:
        waited = 0.0 if completion.waited_from is None else completion.start - completion.waited_from
        return Span(completion.op, completion.start, completion.end, completion.num_bytes, waited)


class CudaDevice:
    """Lanes on one GPU: GPU, H2D and D2H have a stream each, CPU runs in its thread, MAIN is the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = {lane: torch.cuda.Stream(device) for lane in (Lane.GPU, Lane.H2D, Lane.D2H)}
        self._collectives = torch.cuda.Stream(device)
        self._origin_event = torch.cuda.Event(enable_timing=True)
        self._origin_event.record(torch.cuda.current_stream(device))
        self._origin_event.synchronize()  # pairs one moment of the device's clock with the host's
        self._origin = time.perf_counter()

    def enter(self, lane: Lane) -> None:
        torch.cuda.set_device(self._collectives.device)
        if lane in self.streams:
            torch.cuda.set_stream(self.streams[lane])  # for all that this thread will do

    def wait(self, lane: Lane, done: Completion) -> None:
        done.issued.wait()
        if done.event is None:
            return
        if lane is Lane.CPU:
            done.event.synchronize()
        elif lane is Lane.MAIN:
            torch.cuda.current_stream(self.device).wait_event(done.event)
        else:
            self.streams[lane].wait_event(done.event)

    def run(self, lane: Lane, completion: Completion, handler: Handler) -> None:
        if lane is Lane.CPU:
            completion.start = time.perf_counter()
            completion.num_bytes = handler(completion.op)
            completion.end = time.perf_counter()
            return
        stream = self.streams[lane]
        completion.begin_event = torch.cuda.Event(enable_timing=True)
        completion.begin_event.record(stream)
        completion.num_bytes = handler(completion.op)
        completion.event = torch.cuda.Event(enable_timing=True, blocking=True)
        completion.event.record(stream)

    def mark_wait(self, completion: Completion) -> None:
        completion.wait_event = torch.cuda.Event(enable_timing=True)
        completion.wait_event.record(torch.cuda.current_stream(self.device))

    def is_done(self, completion: Completion) -> bool:
        return completion.issued.is_set() and (completion.event is None or completion.event.query())

    def mark_main(self, completion: Completion) -> None:
        completion.event = torch.cuda.Event(enable_timing=True, blocking=True)
        completion.event.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def following(self, work: Any) -> Iterator[None]:
        with torch.cuda.stream(self._collectives):
            work.wait()  # this stream waits, not the one that computes
            yield

    def synchronize(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def span(self, completion: Completion) -> Span:
        start, end = completion.start, completion.end
        if completion.event is not None:
            end = self._host_time(completion.event)
            start = end if completion.begin_event is None else self._host_time(completion.begin_event)
        waited = 0.0 if completion.wait_event is None else start - self._host_time(completion.wait_event)
        return Span(completion.op, start, end, completion.num_bytes, waited)

    def _host_time(self, event: torch.cuda.Event) -> float:
        event.synchronize()  # those of the loop's own stream may be behind the lanes
        return self._origin + self._origin_event.elapsed_time(event) * 1e-3


class LaneError(RuntimeError):
    """An op failed on its lane; the cause is chained."""


class LaneBackend:
    """Runs a plan's ops on lane threads. Implements `deep_offload.plan.execute.Backend`."""

    def __init__(self, handlers: Mapping[OpKind, Handler], device: Device) -> None:
        self._handlers = dict(handlers)
        self._device = device
        self._failed: tuple[Op, BaseException] | None = None
        self.is_closed = False
        self._queues: dict[Lane, queue.SimpleQueue] = {lane: queue.SimpleQueue() for lane in WORK_LANES}
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"offload-{lane.value}", daemon=True)
            for lane in WORK_LANES
        ]
        for thread in self._threads:
            thread.start()

    def use(self, handlers: Mapping[OpKind, Handler]) -> None:
        """Let other handlers do what is submitted from now on. All lanes must be idle."""
        self._handlers = dict(handlers)

    def submit(self, op: Op, after: Sequence[Completion]) -> Completion:
        self._check_open()
        completion = Completion(op)
        if op.lane is Lane.MAIN:
            if after:
                self._device.mark_wait(completion)
            for done in after:
                self._device.wait(Lane.MAIN, done)
            self._device.mark_main(completion)
            completion.issued.set()
            self.raise_if_failed()
        else:
            self._queues[op.lane].put((completion, after))
        return completion

    def following(self, work: Any) -> AbstractContextManager[None]:
        """Inside, external ops are complete when `work`, an asynchronous collective, has ended."""
        return self._device.following(work)

    def raise_if_failed(self) -> None:
        """Raise the first error of any lane on the caller's thread."""
        if self._failed is not None:
            op, error = self._failed
            raise LaneError(f"{op.label} failed on the {op.lane.value} lane: {error}") from error

    def synchronize(self) -> None:
        """Wait until every submitted op is complete; raise what failed."""
        self._check_open()
        for lane in WORK_LANES:
            idle = threading.Event()
            self._queues[lane].put(idle)
            idle.wait()
        self._device.synchronize()
        self.raise_if_failed()

    def timeline(self, completions: Sequence[Completion]) -> Timeline:
        """Measured times of complete ops, from the first start."""
        spans = [self._device.span(c) for c in completions]
        origin = min((s.start for s in spans), default=0.0)
        return Timeline(tuple(Span(s.op, s.start - origin, s.end - origin, s.num_bytes, s.waited) for s in spans))

    def is_done(self, completions: Sequence[Completion]) -> bool:
        """Whether ops are complete, without waiting for them."""
        return all(self._device.is_done(completion) for completion in completions)

    def close(self) -> None:
        """End the lane threads; ops still queued are finished first."""
        self.is_closed = True
        for lane in WORK_LANES:
            self._queues[lane].put(None)
        for thread in self._threads:
            thread.join()

    def is_on_a_lane(self) -> bool:
        """Whether the caller is one of the lanes' threads."""
        return threading.current_thread() in self._threads

    def _check_open(self) -> None:
        if self.is_closed:  # nobody would ever do the work
            raise RuntimeError("the optimizer is closed, its lanes have ended: build a new one")

    def _serve(self, lane: Lane) -> None:
        is_inside = False
        while (item := self._queues[lane].get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            completion, after = item
            try:
                if not is_inside:
                    self._device.enter(lane)
                    is_inside = True
                if self._failed is None:
                    for done in after:
                        self._device.wait(lane, done)
                if self._failed is None:  # a failure elsewhere makes every later op a no-op, so nobody waits for ever
                    self._device.run(lane, completion, self._handlers[completion.op.kind])
            except BaseException as error:  # noqa: BLE001 - carried to the main thread, nothing is swallowed
                if self._failed is None:
                    self._failed = (completion.op, error)
            finally:
                completion.issued.set()
