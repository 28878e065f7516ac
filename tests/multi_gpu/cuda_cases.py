"""In a rank with a GPU: training with spin kernels on lanes and before collectives, or with a wait left out."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import param_and_grad_buffer

from deep_offload.runtime.lanes import CudaDevice
from deep_offload.runtime.worker import SubgroupWorker
from tests.parallel.parallel_cases import Outcome, run_all

LANES = ("grad_flush", "prefetch", "update_cpu", "update_gpu", "flush", "param_h2d")
CYCLES = 20_000_000
"""About 10 ms."""


def delayed(command_lines: list[str], cache: str, what: str) -> list[Outcome]:
    """what: an operation of the lanes, or `collectives`. Each is late by up to CYCLES, another time on each rank."""
    return run_all(command_lines, cache, lambda _outcome: late_collectives() if what == "collectives" else late(what))


@contextlib.contextmanager
def late(what: str) -> Iterator[None]:
    """A spin kernel on the lane's own stream before each such operation; the CPU's lane sleeps."""
    original, luck = getattr(SubgroupWorker, what), random.Random(os.getpid())

    def spinning(self: SubgroupWorker, op: Any) -> int:
        if what == "update_cpu" or not torch.cuda.is_available():
            time.sleep(0.01 * luck.random())
        else:
            torch.cuda._sleep(int(CYCLES * luck.random()))
        return original(self, op)

    with mock.patch.object(SubgroupWorker, what, spinning):
        yield


@contextlib.contextmanager
def late_collectives() -> Iterator[None]:
    """Reductions of gradients and gathers of weights start late; the stream that asked for them does not wait."""
    original, luck = param_and_grad_buffer._coalescing_manager, random.Random(os.getpid())
    if not torch.cuda.is_available():
        yield
        return
    side = torch.cuda.Stream()

    @contextlib.contextmanager
    def manager(*arguments: Any, **options: Any) -> Iterator[Any]:
        joined = original(*arguments, **options)
        handle = joined.__enter__()
        yield handle
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):  # what was collected is sent when the manager is left
            torch.cuda._sleep(int(CYCLES * luck.random()))
            joined.__exit__(None, None, None)
        if not options.get("async_ops"):
            here.wait_stream(side)

    with mock.patch.object(param_and_grad_buffer, "_coalescing_manager", manager):
        yield


def without_waiting_for_reductions(command_lines: list[str], cache: str) -> list[Outcome]:
    """Gradients are flushed, and used, before their late reduction has ended."""

    @contextlib.contextmanager
    def mutation(_outcome: Outcome) -> Iterator[None]:
        with late_collectives(), mock.patch.object(CudaDevice, "following", _follow_nothing):
            yield

    return run_all(command_lines, cache, mutation)


@contextlib.contextmanager
def _follow_nothing(self: CudaDevice, work: Any) -> Iterator[None]:
    yield
