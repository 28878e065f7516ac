"""Short measurements of a machine that only a person asks for: copies of every kind, memory under load, disk, NCCL.

What training goes by is in measure.py. Every function ends within a few seconds; rates are medians or means over 0.1 s.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deep_offload.kernels import cpu as cpu_kernels

_COPY_BYTES = 1 << 27
_TRIAD_NUMEL = 1 << 25  # 400 MB in all: a pass takes milliseconds, waking the threads microseconds
_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes/s between host and one GPU. `both`: each direction while the other is busy."""

    pinned_h2d: float
    pinned_d2h: float
    pageable_h2d: float
    pageable_d2h: float
    both_h2d: float
    both_d2h: float


class _Link:
    """Buffers on both sides of one GPU's link, and copies that return when they are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        numel = _COPY_BYTES // 4
        self.on_device = [torch.zeros(numel, device=device) for _ in range(2)]
        self.pinned = [torch.zeros(numel, pin_memory=True) for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(self, direction: int, host: Tensor | None = None) -> None:
        """0: to the device, 1: to the host."""
        host = self.pinned[direction] if host is None else host
        device = self.on_device[direction]
        with torch.cuda.device(self.device), torch.cuda.stream(self.streams[direction]):
            source, target = (host, device) if direction == 0 else (device, host)
            target.copy_(source, non_blocking=True)
        self.streams[direction].synchronize()


def copy_rates(device: torch.device) -> CopyRates:
    """Measure one GPU's link with everything else idle; under a second."""
    link = _Link(device)
    pageable = torch.zeros(_COPY_BYTES // 4)
    alone = [_rate(lambda d=d: link.copy(d)) for d in (0, 1)]
    slow = [_rate(lambda d=d: link.copy(d, pageable)) for d in (0, 1)]
    both = _rates_together([lambda: link.copy(0), lambda: link.copy(1)])
    return CopyRates(alone[0], alone[1], slow[0], slow[1], both[0], both[1])


def copies_together(devices: Sequence[torch.device]) -> list[float]:
    """Bytes/s of each GPU, both directions summed, while all GPUs copy both ways at once."""
    links = [_Link(device) for device in devices]
    rates = _rates_together([lambda link=link, d=d: link.copy(d) for link in links for d in (0, 1)])
    return [rates[2 * i] + rates[2 * i + 1] for i in range(len(links))]


def triad_curve(counts: Sequence[int]) -> dict[int, float]:
    """Bytes/s of host memory (reads plus writes) with each number of threads."""
    arrays = _triad_arrays()
    return {count: _triad(arrays, count) for count in counts}


def triad_under_copies(num_threads: int, devices: Sequence[torch.device]) -> float:
    """Bytes/s of host memory left to `num_threads` threads while every GPU copies both ways; without a GPU two host
    copies run instead."""
    arrays = _triad_arrays()
    loops: list[Callable[[], object]] = []
    for device in devices:
        link = _Link(device)
        loops += [lambda link=link, d=d: link.copy(d) for d in (0, 1)]
    if not devices:
        pairs = [(torch.zeros(_TRIAD_NUMEL), torch.zeros(_TRIAD_NUMEL)) for _ in range(2)]
        loops = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]
    with _running(loops):
        return _triad(arrays, num_threads)


def disk_write_bytes_per_s(folder: Path, num_bytes: int = 1 << 28) -> float:
    """Bytes/s of a file written to `folder` and synced. The file is removed. Raises OSError where it cannot be."""
    path = folder / f".deep_offload_probe.{os.getpid()}"
    block = os.urandom(1 << 22)  # zeros would be compressed or never written by some file systems
    start = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(max(1, num_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
    return max(1, num_bytes // len(block)) * len(block) / seconds


def all_reduce_bytes_per_s(devices: Sequence[torch.device]) -> float:
    """Bytes/s and GPU of a reduce-scatter, from an all-reduce (two of its kind) over all GPUs in this process."""
    import torch.cuda.nccl as nccl  # needs a build with NCCL

    tensors = [torch.zeros(1 << 25, device=device) for device in devices]

    def call() -> None:
        nccl.all_reduce(tensors)
        for device in devices:
            torch.cuda.synchronize(device)

    call()
    start = time.perf_counter()
    for _ in range(5):
        call()
    seconds = (time.perf_counter() - start) / 5
    return 2 * tensors[0].nbytes * (len(devices) - 1) / len(devices) / seconds


def _triad_arrays() -> list[Tensor]:
    arrays = [torch.empty(_TRIAD_NUMEL) for _ in range(3)]
    for array in arrays:
        cpu_kernels.first_touch(array, max(1, len(os.sched_getaffinity(0))))
    return arrays


def _triad(arrays: list[Tensor], num_threads: int) -> float:
    for _ in range(2):  # a new number of threads starts them first
        cpu_kernels.triad_seconds(*arrays, num_threads)
    seconds = sorted(cpu_kernels.triad_seconds(*arrays, num_threads) for _ in range(5))[2]
    return 12 * _TRIAD_NUMEL / seconds


def _rate(call: Callable[[], object]) -> float:
    call()
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _SECONDS or count < 2:
        call()
        count += 1
    return count * _COPY_BYTES / seconds


def _rates_together(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Bytes/s of each copy while all of them run in loops."""
    counts = [0] * len(calls)
    with _running([_counted(call, counts, i) for i, call in enumerate(calls)]):
        time.sleep(0.05)
        before, start = list(counts), time.perf_counter()
        time.sleep(3 * _SECONDS)
        after, seconds = list(counts), time.perf_counter() - start
    return [(b - a) * _COPY_BYTES / seconds for a, b in zip(before, after)]


def _counted(call: Callable[[], object], counts: list[int], i: int) -> Callable[[], object]:
    def counted() -> None:
        call()
        counts[i] += 1

    return counted


@contextmanager
def _running(loops: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Each call over and over on a thread of its own; the first error of any is raised at the end."""
    stop, errors = threading.Event(), []

    def run(call: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                call()
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
