"""Small transfers of the training loop, which do not queue behind those of the lanes.

A copy engine works in the order of issue: a few bytes for the loop (a batch, a loss, the gradient norm) would wait for
every prefetch or flush that is in its queue, some 100 ms. A kernel that reads or writes pinned memory goes past it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_being_read: deque[tuple[torch.cuda.Event, Tensor]] = deque()
"""Pinned sources of kernels that may still run: torch's allocator knows of its own copies only."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """Copies on the host, written by what the stream does when `event` is reached; None: they are complete."""

    tensors: tuple[Tensor, ...]
    event: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """Return the copies, complete."""
        if self.event is not None:
            self.event.synchronize()  # a kernel writes them
        return self.tensors


def to_device(source: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on `device`, complete in the order of the current stream; waits for nothing."""
    if device.type != "cuda":
        return source.to(device)
    from deep_offload.kernels import gpu  # needs triton

    source = source.contiguous()
    if not source.is_pinned():
        source = source.pin_memory()
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    gpu.copy_past_engines(target, source)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    while _being_read and _being_read[0][0].query():
        _being_read.popleft()
    _being_read.append((done, source))
    return target


def to_host(sources: Sequence[Tensor]) -> Arriving:
    """Begin to copy tensors to the host, as they are in the order of the current stream; waits for nothing."""
    if not any(source.is_cuda for source in sources):
        return Arriving(tuple(sources), None)
    from deep_offload.kernels import gpu  # needs triton

    targets = []
    for source in sources:
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        gpu.copy_past_engines(target, source.contiguous())
        targets.append(target)
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(sources[0].device))
    return Arriving(tuple(targets), event)


def read(source: Tensor) -> float:
    """Return the value of a tensor of one element."""
    return to_host([source.detach()]).wait()[0].item()
