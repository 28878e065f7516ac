"""Small transfers of the training loop, which do not queue behind those of the lanes.

A copy engine works in the order of issue: a loss or the gradient norm on its way to the host would wait for every flush
that is in the queue, some 100 ms. A kernel that reads or writes pinned memory goes past it. Batches go by one too: up
to 16 KiB the driver's own copies to the device were seen to pass, larger ones were not tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_in_use: deque[tuple[torch.cuda.Event, Tensor]] = deque()
"""Pinned memory of kernels that may still run: torch's allocator knows of its own copies only."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """Values on the host, written when the stream has reached `event`; None: they are there."""

    tensors: tuple[Tensor, ...]
    event: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """Return the values, complete."""
        if self.event is not None:
            self.event.synchronize()  # a kernel writes them
        return self.tensors


def to_device(source: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's values on `device`, complete in the order of the current stream; waits for nothing."""
    if device.type != "cuda" or source.is_cuda:
        return source.to(device)
    from deep_offload.kernels import gpu  # needs triton

    source = source.contiguous()
    if not source.is_pinned():
        source = source.pin_memory()
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    gpu.copy_past_engines(target, source)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    _keep(done, [source])
    return target


def to_host(sources: Sequence[Tensor]) -> Arriving:
    """Begin to bring tensors to the host, as they are in the order of the current stream; waits for nothing."""
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
    _keep(event, targets)
    return Arriving(tuple(targets), event)


def read(source: Tensor) -> float:
    """Return the value of a tensor of one element."""
    return float(to_host([source.detach()]).wait()[0].item())


def _keep(done: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
    """Hold pinned memory until its kernel is through, whoever else lets go of it."""
    while _in_use and _in_use[0][0].query():
        _in_use.popleft()
    _in_use.extend((done, tensor) for tensor in tensors)
