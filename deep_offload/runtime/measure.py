"""Fills a `HardwareProfile` on this machine in seconds, and keeps it in a cache.

Every rate is also measured while the other lanes work, because they share the host's memory: each lane loops on a
thread of its own, as in training, and its calls are counted. Without a GPU the link is a copy between host buffers and
the device's update is the specification in torch, just as the host backend runs them.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deep_offload.model.hardware import HardwareProfile, profile_from_json, profile_to_json
from deep_offload.model.machines import BUILT_IN_PROFILES, cache_file
from deep_offload.model.this_machine import NO_GPU, cpu_name, fingerprint_of
from deep_offload.runtime.lane_bench import CudaBench, HostBench, LaneBench
from deep_offload.runtime.limits import HostLimits, read_host_limits

TRAINING_FLOPS_SHARE = 0.6
"""Part of a large matrix product's rate that whole training steps reach."""

_CPU_ADAM_BYTES = {"fp32": 30, "param": 28}
"""Host memory traffic of the CPU update of one parameter, by the gradient's type."""


@dataclass(frozen=True, slots=True)
class Together:
    """How ranks measure at the same time. All of them call both, equally often and in the same order.

    any: whether any rank says yes; meet: returns once all ranks are there.
    """

    any: Callable[[bool], bool] = bool
    meet: Callable[[], None] = lambda: None


ALONE = Together()


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
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"--offload-profile {given} cannot be read ({why}): leave it out to measure this machine"
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
        bench: LaneBench = CudaBench(device, num_threads, num_parts(limits.available_bytes, num_ranks), log)
    else:
        bench = HostBench(num_threads, log)
    try:
        return _profile(bench, device, limits, num_threads, num_ranks, meet)
    finally:
        bench.close()


def num_parts(available_bytes: int | None, num_ranks: int) -> int:
    """Parts of a GPU's bench buffers: enough to leave the caches behind, in a quarter of the host's memory at most."""
    if available_bytes is None:
        return CudaBench.most_parts
    each = CudaBench.cpu_numel * CudaBench.bytes_per_element()
    return max(1, min(CudaBench.most_parts, available_bytes // (4 * num_ranks * each)))


def _profile(
    bench: LaneBench,
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


def _host_dram_bytes_per_s(bench: LaneBench, rank_rate: float, num_ranks: int, cores: int) -> float:
    """What all ranks reach together: what they just had at once, or for a rank alone all cores' triad."""
    return rank_rate * num_ranks if num_ranks > 1 else max(rank_rate, bench.triad_bytes_per_s(cores))


def _lane_rates(bench: LaneBench, num_threads: int, meet: Callable[[], None]) -> dict[str, float]:
    """Medians over rounds, each of which takes all rates; host memory has what the lanes reach together."""
    rounds = [_round_of_rates(bench, num_threads, meet) for _ in range(bench.num_rounds)]
    rates = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    copies = (rates["h2d_busy_bytes_per_s"] + rates["d2h_busy_bytes_per_s"]) * bench.dram_bytes_per_copied_byte
    together = [rates[f"cpu_adam_{wire}_busy_params_per_s"] * moved + copies for wire, moved in _CPU_ADAM_BYTES.items()]
    rates["dram_bytes_per_s"] = max(rates["dram_bytes_per_s"], *together)
    return rates


def _round_of_rates(bench: LaneBench, num_threads: int, meet: Callable[[], None]) -> dict[str, float]:
    """Rates of the contending lanes: alone, with both directions of the link, and with the CPU update as well."""
    up, down = bench.h2d, bench.d2h

    def rates_of(**loops: Callable[[], object]) -> dict[str, float]:
        rates = _rates(loops, bench.window_seconds, meet)
        bench.settle()
        return rates

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
            alone * _CPU_ADAM_BYTES[wire],
            busy["cpu"] * bench.cpu_numel * _CPU_ADAM_BYTES[wire] + copies,
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
    A loop counts what it has finished before the first of them ends, so that no lane is counted while others idle, and
    from its first call's end on, since that call may have begun before the clock did.
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
        num, began = (len(counted) - 1, counted[0]) if len(counted) > 1 else (1, start)
        rates[name] = num / max(counted[-1] - began, 1e-9)
    return rates
