"""In a rank: training with lanes and collectives slowed down at random, or with a wait left out."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from megatron.core.distributed import param_and_grad_buffer

from deep_offload.optimizer import megatron_buffers
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.runtime.lanes import HostDevice
from deep_offload.runtime.worker import SubgroupWorker
from megatron.training import train_step
from tests.parallel.parallel_cases import Outcome, run_all

LANES = ("grad_flush", "prefetch", "update_cpu", "update_gpu", "flush", "param_h2d")
COLLECTIVES = ("dist_reduce_scatter_func", "dist_all_gather_func")


def delayed(command_lines: list[str], cache: str, what: str, seconds: float) -> list[Outcome]:
    """what: a lane's work or a collective, by name. Each call sleeps up to `seconds`, another time on each rank."""
    return run_all(command_lines, cache, lambda _outcome: slow_down(what, seconds))


@contextlib.contextmanager
def slow_down(what: str, seconds: float) -> Iterator[None]:
    """Sleep before each such op, by random numbers of this rank."""
    owner = SubgroupWorker if what in LANES else param_and_grad_buffer
    original, luck = getattr(owner, what), random.Random(os.getpid())

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(luck.random() * seconds)
        return original(*arguments, **options)

    with mock.patch.object(owner, what, late):
        yield


def watching_waits(command_lines: list[str], cache: str) -> list[Outcome]:
    """notes: what the optimizer says of its waits, then for each one that ended an update whether it was in a pass."""

    @contextlib.contextmanager
    def watch(outcome: Outcome) -> Iterator[None]:
        run, wait, begin = train_step.run_schedule, OffloadEngine.wait_until_reusable, DeepOffloadOptimizer.begin_step
        is_inside = [False]

        def run_schedule(*arguments: Any, **options: Any) -> Any:
            is_inside[0] = True
            reports = run(*arguments, **options)
            is_inside[0] = False
            return reports

        def wait_until_reusable(self: OffloadEngine) -> None:
            if self._closing is not None:
                outcome.notes.append(is_inside[0])
            wait(self)

        def begin_step(self: DeepOffloadOptimizer) -> None:
            if not outcome.notes:
                outcome.notes.append(self.waits_in_passes)
            begin(self)

        with (
            mock.patch.object(train_step, "run_schedule", run_schedule),
            mock.patch.object(OffloadEngine, "wait_until_reusable", wait_until_reusable),
            mock.patch.object(DeepOffloadOptimizer, "begin_step", begin_step),
        ):
            yield

    return run_all(command_lines, cache, watch)


def without_waiting_for_collectives(command_lines: list[str], cache: str) -> list[Outcome]:
    """The flush of a gradient does not wait for its reduction. Nothing else changes."""

    def wait(self, lane, done):
        done.issued.wait()

    return run_all(command_lines, cache, lambda _outcome: mock.patch.object(HostDevice, "wait", wait))


def without_waiting_for_params(command_lines: list[str], cache: str) -> list[Outcome]:
    """All-gathers start although uploads, which are late, are not in place."""

    @contextlib.contextmanager
    def mutation(_outcome: Outcome) -> Iterator[None]:
        original = OffloadEngine.wait_for_params

        def wait(self, count):
            if count == len(self.layout.subgroups):
                original(self, count)

        with mock.patch.object(OffloadEngine, "wait_for_params", wait), slow_down("param_h2d", 0.2):
            yield

    return run_all(command_lines, cache, mutation)


def watching_gathers(command_lines: list[str], cache: str) -> list[Outcome]:
    """Notes are (subgroups waited for, of how many) of each wait in a forward pass."""

    def watch(outcome: Outcome) -> contextlib.AbstractContextManager:
        original = OffloadEngine.wait_for_params

        def wait(self, count):
            outcome.notes.append((count, len(self.layout.subgroups)))
            original(self, count)

        return mock.patch.object(OffloadEngine, "wait_for_params", wait)

    return run_all(command_lines, cache, watch)


def with_copying_gathers(command_lines: list[str], cache: str) -> list[Outcome]:
    """A gather of one rank copies what it read a while ago into its place, as gloo's does; updates come meanwhile."""

    @contextlib.contextmanager
    def mutation(_outcome: Outcome) -> Iterator[None]:
        original = param_and_grad_buffer.dist_all_gather_func

        def gather(output: Any, source: Any, group: Any, async_op: bool = False) -> Any:
            if group.size() > 1:
                return original(output, source, group=group, async_op=async_op)
            read = source.clone()
            time.sleep(0.02)
            return output.copy_(read)

        with mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", gather), slow_down("param_h2d", 0.02):
            yield

    return run_all(command_lines, cache, mutation)


def waiting_twice(command_lines: list[str], cache: str) -> list[Outcome]:
    """gloo's reductions are waited for each time, and the flush comes late: after the sums over other groups."""
    return run_all(command_lines, cache, lambda _outcome: _twice())


class _EveryTime:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


@contextlib.contextmanager
def _twice() -> Iterator[None]:
    original: Callable[..., None] = HostDevice.wait

    def wait(self, lane, done):
        if done.works:
            time.sleep(0.05)
        original(self, lane, done)

    with (
        mock.patch.object(megatron_buffers, "_WaitOnce", _EveryTime),
        mock.patch.object(HostDevice, "wait", wait),
    ):
        yield
