"""Host buffers and one call of each lane's work, for `measure` to count."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor

from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.kernels import reference
from deep_offload.kernels.scalars import AdamClass, scalar_row
from deep_offload.plan.layout import MasterStorage
from deep_offload.runtime.arena import ArraySpec, HostArena


def _median_seconds(call: Callable[[], float], repeats: int = 5) -> float:
    return sorted(call() for _ in range(repeats))[repeats // 2]


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


class LaneBench(ABC):
    """Host buffers and the work of each lane; a device fills in its own.

    The buffers come from the arena that holds optimizer state in training: the kind of pages changes the rates. They
    are used part after part, because in training no byte of the state is in a cache any more.
    """

    cpu_numel = 1 << 23
    num_copy_buffers: int
    device_memory_bytes = 0
    dram_bytes_per_copied_byte = 1
    op_overhead_seconds = 3e-5
    window_seconds = 0.1
    num_rounds = 1

    def __init__(self, num_threads: int, num_parts: int, *, pin: bool, log: Callable[[str], None]) -> None:
        self.num_threads = num_threads
        self.scalars = torch.tensor([scalar_row(AdamClass(1e-4, 0.9, 0.95, 1e-8, 0.1, 10))], dtype=torch.float32)
        self.segments = torch.tensor([[0, self.cpu_numel, 0]], dtype=torch.int64)
        wide = ArraySpec(self.cpu_numel * num_parts, torch.float32)
        narrow = ArraySpec(self.cpu_numel * num_parts, torch.bfloat16)
        specs = [wide] * (4 + self.num_copy_buffers) + [narrow] * 2
        self._arena = HostArena(specs, pin=pin, num_threads=num_threads, warn=log)
        for array in self._arena.arrays:
            array.fill_(1e-3)  # zeros and subnormal numbers have speeds of their own
        *copies, self.weight, narrow_grad = self._arena.arrays[4:]
        self.state, wide_grad = self._arena.arrays[:3], self._arena.arrays[3]
        self.grads = {torch.float32: wide_grad, torch.bfloat16: narrow_grad}
        self.copy_buffers: list[Tensor] = copies
        self.copy_bytes = 4 * self.cpu_numel

    @classmethod
    def bytes_per_element(cls) -> int:
        """Of all buffers together."""
        return 4 * (4 + cls.num_copy_buffers) + 2 * 2

    def close(self) -> None:
        """Unpin and free the buffers, which copies may still read and write after an error."""
        try:
            self.settle()
        finally:
            self._arena.close()

    def cpu_update(self, grad_dtype: torch.dtype) -> Callable[[], object]:
        """One CPU update of `cpu_numel` parameters; weights overwrite 16-bit gradients, as in training."""
        grad = self.grads[grad_dtype]
        weight = grad if grad_dtype == torch.bfloat16 else self.weight
        scale = 1e-3 if grad is weight else 1.0
        parts = self.parts(*self.state, grad, weight)

        def call() -> None:
            cpu_kernels.adam_update(*next(parts), self.segments, self.scalars, scale, True, self.num_threads)

        return call

    def parts(self, *buffers: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """`cpu_numel` elements of each buffer, the next ones each time, from the start again after the last."""
        return cycle(list(zip(*(buffer.split(self.cpu_numel) for buffer in buffers))))

    def triad_bytes_per_s(self, num_threads: int) -> float:
        seconds = _median_seconds(lambda: cpu_kernels.triad_seconds(*self.state, num_threads))
        for buffer in self.state:
            buffer.fill_(1e-3)
        return 12 * self.state[0].numel() / seconds

    def settle(self) -> None:
        """Wait for copies that are still on their way."""
        return

    @abstractmethod
    def h2d(self) -> None: ...

    @abstractmethod
    def d2h(self) -> None: ...

    @abstractmethod
    def gpu_adam_params_per_s(self) -> float: ...

    @abstractmethod
    def upcast_params_per_s(self) -> float: ...

    @abstractmethod
    def matmul_flops_per_s(self) -> float: ...


class HostBench(LaneBench):
    """No GPU: both sides of the link are host memory, and copies read and write it."""

    dram_bytes_per_copied_byte = 2
    num_copy_buffers = 4

    def __init__(self, num_threads: int, log: Callable[[str], None]) -> None:
        super().__init__(num_threads, 1, pin=False, log=log)
        self.up, self.down = self.copy_buffers[:2], self.copy_buffers[2:]

    def h2d(self) -> None:
        self.up[1].copy_(self.up[0])

    def d2h(self) -> None:
        self.down[1].copy_(self.down[0])

    def gpu_adam_params_per_s(self) -> float:
        numel = 1 << 18
        arrays = [buffer[:numel] for buffer in (*self.state, self.grads[torch.float32], self.weight)]
        segments = torch.tensor([[0, numel, 0]], dtype=torch.int64)

        def call() -> None:
            reference.adam_update(*arrays, segments, self.scalars, 1.0, MasterStorage.FULL, True)

        call()
        return numel / _median_seconds(_timed(call), 3)

    def upcast_params_per_s(self) -> float:
        call = _timed(lambda: self.up[1].copy_(self.grads[torch.bfloat16]))
        return self.cpu_numel / _median_seconds(call, 3)

    def matmul_flops_per_s(self) -> float:
        a = torch.full((512, 512), 0.01)
        torch.mm(a, a)
        return 2 * 512**3 / _median_seconds(_timed(lambda: torch.mm(a, a)), 3)


class CudaBench(LaneBench):
    """A GPU: pinned host buffers, a stream per direction."""

    cpu_numel = 1 << 25
    most_parts = 4  # 1.5 GiB of state: a server's last cache holds most of a single part
    num_copy_buffers = 2
    window_seconds = 0.3  # some thirty copies and CPU updates: predictions are as good as these rates
    num_rounds = 3  # the first windows of a process may be slower by a third

    def __init__(self, device: torch.device, num_threads: int, num_parts: int, log: Callable[[str], None]) -> None:
        super().__init__(num_threads, num_parts, pin=True, log=log)
        self.device = device
        self.device_memory_bytes = torch.cuda.get_device_properties(device).total_memory
        self.streams = {lane: torch.cuda.Stream(device) for lane in ("h2d", "d2h")}
        self._host = {lane: self.parts(buffer) for lane, buffer in zip(self.streams, self.copy_buffers)}
        self._ends: dict[str, torch.cuda.Event] = {}
        self.on_device = {lane: torch.full((self.cpu_numel,), 1e-3, device=device) for lane in self.streams}

    def h2d(self) -> None:
        self._copies("h2d", self.on_device["h2d"], *next(self._host["h2d"]))

    def d2h(self) -> None:
        self._copies("d2h", *next(self._host["d2h"]), self.on_device["d2h"])

    def _copies(self, lane: str, target: Tensor, source: Tensor) -> None:
        """Queue a copy in pieces, then wait for the one before: as in training the queue never runs empty, and the
        wait sleeps, so that it takes no core from the CPU's update."""
        stream, end = self.streams[lane], torch.cuda.Event(blocking=True)
        piece = self.cpu_numel // 4
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for start in range(0, self.cpu_numel, piece):
                target[start : start + piece].copy_(source[start : start + piece], non_blocking=True)
            end.record()
            before, self._ends[lane] = self._ends.get(lane), end
            if before is not None:
                before.synchronize()

    def settle(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()
        self._ends.clear()

    def gpu_adam_params_per_s(self) -> float:
        from deep_offload.kernels import gpu  # optional heavy import: triton

        arrays = [torch.full((self.cpu_numel,), 1e-3, device=self.device) for _ in range(3)]
        grad, weight = (torch.full_like(arrays[0], 1e-3, dtype=torch.bfloat16) for _ in range(2))
        table = gpu.SegmentTable.build(self.segments, self.device)
        scalars = self.scalars.to(self.device)

        def call() -> None:
            gpu.adam_update(*arrays, grad, weight, table, scalars, 1.0, MasterStorage.FULL, True)

        return self.cpu_numel / self._device_seconds(call)

    def upcast_params_per_s(self) -> float:
        source = torch.full((self.cpu_numel,), 1e-3, dtype=torch.bfloat16, device=self.device)
        return self.cpu_numel / self._device_seconds(lambda: self.on_device["h2d"].copy_(source))

    def matmul_flops_per_s(self) -> float:
        size = 8192
        a = torch.full((size, size), 0.01, dtype=torch.bfloat16, device=self.device)
        return 2 * size**3 / self._device_seconds(lambda: torch.mm(a, a))

    def _device_seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """Seconds of one call on the device, launches queued up."""
        call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
