"""A GPU's memory on paper, so that machines without one train with automatic residents; importable by a rank pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_offload.optimizer import build, factory
from deep_offload.optimizer.residency import GpuMemory
from deep_offload.plan.ops import Place
from deep_offload.runtime import state
from megatron.training import training

PLENTY = 1 << 40


@contextlib.contextmanager
def paper_gpu(at_start: int, *at_peak: int) -> Iterator[None]:
    """Runs inside see so many bytes free for state at their start, and so many more left over at the measured peak:
    the same on all ranks, or one number for each."""

    def reader(by_rank: tuple[int, ...]) -> Any:
        def read() -> GpuMemory:
            free = by_rank[dist.get_rank() % len(by_rank)]
            # A GPU of size 0 keeps no reserve, so that these are the bytes of budget and headroom.
            return GpuMemory(free=free, total=0, reserved=0, allocated=0, peak=0)

        return lambda _device: read

    with (
        mock.patch.object(build, "memory_reader", reader((at_start,))),
        mock.patch.object(factory, "memory_reader", reader(at_peak or (0,))),
        mock.patch.object(training, "estimated_bytes", lambda *_unused: 0),
    ):
        yield


@contextlib.contextmanager
def one_rank_grows_more(_outcome: Any) -> Iterator[None]:
    """Nothing is resident at the start; all of the first rank's state stays after three steps, a part of others'."""
    with paper_gpu(1, PLENTY, 100_000):
        yield


@contextlib.contextmanager
def device_of(num_bytes: int) -> Iterator[list[int]]:
    """State on the device may take so many bytes at one start; yields a list that gets a 1 for each refusal."""
    allocate, taken, refused = state._allocate, [0], []

    def limited(fields, numel, device):
        taken[0] += sum(field.itemsize for field in fields) * numel
        if taken[0] > num_bytes:
            taken[0] = 0  # what was taken is released by then
            refused.append(1)
            raise torch.OutOfMemoryError("no room")
        return allocate(fields, numel, device)

    with mock.patch.object(state, "_allocate", limited):
        yield refused


def counts(engine: Any) -> dict[str, int]:
    """Subgroups by place."""
    placement = engine.settings.placement
    return {place.value: sum(p is place for p in placement) for place in Place}
