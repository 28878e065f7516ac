"""Fills a `HardwareProfile` on this machine in seconds, and keeps it in a cache.

Every rate is also measured while the other lanes work, because they share the host's memory: each lane loops on a
thread of its own, as in training, and its calls are counted. Without a GPU the link is a copy between host buffers and
the device's update is the specification in torch, just as the host backend runs them.
"""

from __future__ import annotations

import datetime
import os
import platform
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.kernels import reference
from deep_offload.kernels.scalars import AdamClass, scalar_row
from deep_offload.model.hardware import HardwareProfile, profile_from_json, profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES, cache_file
from deep_offload.model.this_machine import NO_GPU, cpu_name, fingerprint_of
from deep_offload.plan.layout import MasterStorage
from deep_offload.runtime.arena import ArraySpec, HostArena
from deep_offload.runtime.limits import HostLimits, read_host_limits

TRAINING_FLOPS_SHARE = 0.6
"""Part of a large matrix product's rate that whole training steps reach."""

_CPU_ADAM_BYTES = {torch.float32: 30, torch.bfloat16: 28}
"""Host memory traffic of the CPU update of one parameter, by the gradient's type."""


@dataclass(frozen=True, slots=True)
class Together:
    """How ranks measure at the same time. All of them call both, equally often and in the same order.

    any: whether any rank says yes; meet: returns once all ranks are there.
    """

    any: Callable[[bool], bool] = bool
    meet: Callable[[], None] = lambda: None


ALONE = Together()


def all_ranks() -> Together:
    """All ranks of the job: those of a node share its memory, and one that measured alone would find it idle."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE

    def any_rank(mine: bool) -> bool:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return any(everyone)

    return Together(any_rank, dist.barrier)


def fingerprint(device: torch.device, num_threads: int, num_ranks: int = 1) -> str:
    """What makes rates comparable: processor, cores, threads, ranks at work and the GPU. Equal nodes are equal."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        accelerator = f"{properties.name} {round(properties.total_memory / 2**30)} GiB x {torch.cuda.device_count()}"
    else:
        accelerator = NO_GPU
    return fingerprint_of(cpu_name(), read_host_limits().cores, num_ranks, num_threads, accelerator)


def profile_for_run(
    given: str | None,
    device: torch.device,
    num_threads: int,
    num_ranks: int = 1,
    *,
    remeasure: bool = False,
    together: Together = ALONE,
    log: Callable[[str], None] = lambda _line: None,
) -> HardwareProfile:
    """The profile that training goes by: the given file's, the cached one, or measured now and cached.

    num_ranks: ranks of this host; all of them call this at once, so that each rate holds with all ranks at work, and
    if one of those that are `together` must measure, all do.
    Raises ValueError when the given file is none, or was measured on another machine.
    """
    machine = fingerprint(device, num_threads, num_ranks)
    if given is not None:
        return _given_profile(given, machine)
    path = cache_file(machine)
    cached = None if remeasure else _cached_profile(path, machine, log)
    if not together.any(cached is None):
        assert cached is not None
        return cached
    start = time.perf_counter()
    profile = measure_profile(device, num_threads, num_ranks, log, together.meet)
    log(f"measured this machine in {time.perf_counter() - start:.1f} s: {path}")
    _write_profile(path, profile, log)
    return profile


def keep_profile(profile: HardwareProfile, log: Callable[[str], None] = lambda _line: None) -> bool:
    """Let the next start on the profile's machine go by it; returns whether it will.

    Several ranks may call this: the last one's is kept.
    """
    return bool(profile.fingerprint) and _write_profile(cache_file(profile.fingerprint), profile, log)


def _given_profile(given: str, machine: str) -> HardwareProfile:
    if given in BUILT_IN_PROFILES:
        raise ValueError(
            f"--offload-profile {given} is a built-in profile, for --dry-run and `python -m deep_offload plan` only: "
            "leave it out to measure this machine"
        )
    try:
        text = Path(given).read_text()
    except OSError as error:
        raise ValueError(
            f"--offload-profile {given} cannot be read ({error.strerror}): leave it out to measure this machine"
        ) from error
    profile = profile_from_json(text, f"--offload-profile {given}")
    if profile.fingerprint != machine:
        raise ValueError(
            f"--offload-profile {given} was measured on another machine ({profile.fingerprint or 'unknown'}), this is "
            f"{machine}: leave it out to measure this one"
        )
    return profile


def _cached_profile(path: Path, machine: str, log: Callable[[str], None]) -> HardwareProfile | None:
    try:
        profile = profile_from_json(path.read_text(), f"the cached hardware profile {path}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log(f"{error}; measuring again")
        return None
    if profile.fingerprint != machine:
        log(f"the cached hardware profile {path} is another machine's; measuring again")
        return None
    return profile


def _write_profile(path: Path, profile: HardwareProfile, log: Callable[[str], None]) -> bool:
    """Write the whole file at once: other ranks of this host may be doing the same. Returns whether it is there."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(profile_to_json(profile))
        os.replace(temporary, path)
    except OSError as error:
        log(f"the hardware profile could not be kept in {path} ({error.strerror}); set DEEP_OFFLOAD_CACHE")
        return False
    return True


def measure_profile(
    device: torch.device,
    num_threads: int,
    num_ranks: int = 1,
    log: Callable[[str], None] = lambda _line: None,
    meet: Callable[[], None] = ALONE.meet,
) -> HardwareProfile:
    """Measure this machine: under 5 s without a GPU, under 20 s with one. Holds up to 3.5 GiB of host memory meanwhile
    with a GPU, 0.3 GiB without. meet: see `Together`; before each rate that ranks share the host's memory for."""
    limits = read_host_limits()
    if device.type == "cuda":
        bench: _Bench = _CudaBench(device, num_threads, num_parts(limits.available_bytes, num_ranks), log)
    else:
        bench = _HostBench(num_threads, log)
    try:
        return _profile(bench, device, limits, num_threads, num_ranks, meet)
    finally:
        bench.close()


def num_parts(available_bytes: int | None, num_ranks: int) -> int:
    """Parts of a GPU's bench buffers: enough to leave the caches behind, in a quarter of the host's memory at most."""
    if available_bytes is None:
        return _CudaBench.most_parts
    each = _CudaBench.cpu_numel * _CudaBench.bytes_per_element()
    return max(1, min(_CudaBench.most_parts, available_bytes // (4 * num_ranks * each)))


def _profile(
    bench: _Bench,
    device: torch.device,
    limits: HostLimits,
    num_threads: int,
    num_ranks: int,
    meet: Callable[[], None],
) -> HardwareProfile:
    rates = _lane_rates(bench, num_threads, meet)
    machine = fingerprint(device, num_threads, num_ranks)
    return HardwareProfile(
        name=platform.node() or "this machine",
        source=f"measured by deep_offload.runtime.measure with {num_ranks} rank(s) at work",
        date=datetime.date.today().isoformat(),
        fingerprint=machine,
        num_gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        num_cores=limits.cores,
        cpu_threads=num_threads,
        gpu_memory_bytes=bench.device_memory_bytes,
        host_memory_bytes=limits.available_bytes or 0,
        host_dram_bytes_per_s=_host_dram_bytes_per_s(bench, rates["dram_bytes_per_s"], num_ranks, limits.cores),
        gpu_adam_params_per_s=bench.gpu_adam_params_per_s(),
        gpu_upcast_params_per_s=bench.upcast_params_per_s(),
        gpu_flops_per_s=TRAINING_FLOPS_SHARE * bench.matmul_flops_per_s(),
        collective_bytes_per_s=0.0,
        op_overhead_seconds=bench.op_overhead_seconds,
        **rates,
    )


def _host_dram_bytes_per_s(bench: _Bench, rank_rate: float, num_ranks: int, cores: int) -> float:
    """What all ranks reach together: what they just had at once, or for a rank alone all cores' triad."""
    return rank_rate * num_ranks if num_ranks > 1 else max(rank_rate, bench.triad_bytes_per_s(cores))


def _lane_rates(bench: _Bench, num_threads: int, meet: Callable[[], None]) -> dict[str, float]:
    """Rates of the contending lanes: alone, with both directions of the link, and with the CPU update as well."""
    up, down = bench.h2d, bench.d2h

    def rates_of(**loops: Callable[[], object]) -> dict[str, float]:
        return _rates(loops, bench.window_seconds, meet)

    alone_up = rates_of(h2d=up)["h2d"] * bench.copy_bytes
    alone_down = rates_of(d2h=down)["d2h"] * bench.copy_bytes
    both = {lane: calls * bench.copy_bytes for lane, calls in rates_of(h2d=up, d2h=down).items()}
    rates: dict[str, float] = {}
    busy_link: list[Mapping[str, float]] = []
    meet()
    traffic = [bench.triad_bytes_per_s(num_threads)]
    for wire, dtype in (("fp32", torch.float32), ("param", torch.bfloat16)):
        update = bench.cpu_update(dtype)
        alone = rates_of(cpu=update)["cpu"] * bench.cpu_numel
        busy = rates_of(cpu=update, h2d=up, d2h=down)
        rates[f"cpu_adam_{wire}_params_per_s"] = alone
        rates[f"cpu_adam_{wire}_busy_params_per_s"] = min(alone, busy["cpu"] * bench.cpu_numel)
        busy_link.append({lane: calls * bench.copy_bytes for lane, calls in busy.items() if lane != "cpu"})
        copies = sum(busy_link[-1].values()) * bench.dram_bytes_per_copied_byte
        traffic += [
            alone * _CPU_ADAM_BYTES[dtype],
            busy["cpu"] * bench.cpu_numel * _CPU_ADAM_BYTES[dtype] + copies,
        ]
    for lane, alone in (("h2d", alone_up), ("d2h", alone_down)):
        with_other = min(alone, both[lane])
        rates[f"{lane}_bytes_per_s"] = alone
        rates[f"{lane}_both_bytes_per_s"] = with_other
        rates[f"{lane}_busy_bytes_per_s"] = min(with_other, *(link[lane] for link in busy_link))
    rates["dram_bytes_per_s"] = max(traffic)  # more than the triad where the lanes together reach more
    return rates


def _rates(
    loops: Mapping[str, Callable[[], object]], seconds: float, meet: Callable[[], None] = ALONE.meet
) -> dict[str, float]:
    """Calls per second of each loop, all of them running at once, each on its own thread.

    meet: what all ranks pass together before the clock starts, so that all measure the same thing.
    A loop counts what it has finished before the first of them ends, so that no lane is counted while others idle.
    """
    for call in loops.values():
        call()  # first calls build kernels and touch memory
    meet()
    start_line = threading.Barrier(len(loops) + 1)
    stop = threading.Event()
    finished: dict[str, list[float]] = {name: [] for name in loops}
    errors: list[BaseException] = []

    def run(name: str, call: Callable[[], object]) -> None:
        start_line.wait()
        try:
            while not (stop.is_set() and finished[name]):  # at least one, even where the cores came late
                call()
                finished[name].append(time.perf_counter())
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in loops.items()]
    for thread in threads:
        thread.start()
    start_line.wait()
    start = time.perf_counter()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    rates: dict[str, float] = {}
    for name, ends in finished.items():
        counted = [end for end in ends if end - start <= 1.5 * seconds] or ends
        rates[name] = len(counted) / max(counted[-1] - start, 1e-9)
    return rates


def _median_seconds(call: Callable[[], float], repeats: int = 5) -> float:
    return sorted(call() for _ in range(repeats))[repeats // 2]


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


class _Bench(ABC):
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
        """Unpin and free the buffers."""
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


class _HostBench(_Bench):
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


class _CudaBench(_Bench):
    """A GPU: pinned host buffers, a stream per direction."""

    cpu_numel = 1 << 25
    most_parts = 4  # 1.5 GiB of state: a server's last cache holds most of a single part
    num_copy_buffers = 2
    window_seconds = 0.3  # some thirty copies and CPU updates: predictions are as good as these rates

    def __init__(self, device: torch.device, num_threads: int, num_parts: int, log: Callable[[str], None]) -> None:
        super().__init__(num_threads, num_parts, pin=True, log=log)
        self.device = device
        self.device_memory_bytes = torch.cuda.get_device_properties(device).total_memory
        self.streams = {lane: torch.cuda.Stream(device) for lane in ("h2d", "d2h")}
        self._host = {lane: self.parts(buffer) for lane, buffer in zip(self.streams, self.copy_buffers)}
        self.on_device = {lane: torch.full((self.cpu_numel,), 1e-3, device=device) for lane in self.streams}

    def h2d(self) -> None:
        self._copies("h2d", self.on_device["h2d"], *next(self._host["h2d"]))

    def d2h(self) -> None:
        self._copies("d2h", *next(self._host["d2h"]), self.on_device["d2h"])

    def _copies(self, lane: str, target: Tensor, source: Tensor) -> None:
        """Copy in pieces that queue up, so that the engine never waits for this thread; then wait for the last."""
        stream = self.streams[lane]
        piece = self.cpu_numel // 4
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for start in range(0, self.cpu_numel, piece):
                target[start : start + piece].copy_(source[start : start + piece], non_blocking=True)
        stream.synchronize()

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
