"""Profiles by name, file and cache. Built in: this project's machine, two published nodes, and marked estimates."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from deep_offload.model.hardware import HardwareProfile, profile_from_json

_GIB = 1 << 30

_H200 = HardwareProfile(
    name="h200",
    source="measured by this project: 1 x H200, PCIe 5 x16, 16 cores; busy rates fitted to its share sweep",
    date="2026-08-20",
    num_gpus=1,
    num_cores=16,
    cpu_threads=15,
    gpu_memory_bytes=139 * _GIB,
    host_memory_bytes=125 * _GIB,
    h2d_bytes_per_s=55.1e9,
    d2h_bytes_per_s=55.2e9,
    h2d_both_bytes_per_s=46.7e9,
    d2h_both_bytes_per_s=46.7e9,
    h2d_busy_bytes_per_s=38e9,
    d2h_busy_bytes_per_s=38e9,
    dram_bytes_per_s=148e9,
    host_dram_bytes_per_s=148e9,
    cpu_adam_fp32_params_per_s=3.9e9,
    cpu_adam_param_params_per_s=4.2e9,
    cpu_adam_fp32_busy_params_per_s=2.35e9,
    cpu_adam_param_busy_params_per_s=2.5e9,
    gpu_adam_params_per_s=139e9,
    gpu_upcast_params_per_s=500e9,
    gpu_flops_per_s=450e12,
    collective_bytes_per_s=0.0,
    disk_write_bytes_per_s=1.5e9,
)

_H200X2 = HardwareProfile(
    name="h200x2",
    source="measured by this project: 2 x H200 of one host, 32 cores, 16 threads a rank; network not measured",
    date="2026-08-20",
    num_gpus=2,
    num_cores=32,
    cpu_threads=15,
    gpu_memory_bytes=139 * _GIB,
    host_memory_bytes=250 * _GIB,
    h2d_bytes_per_s=55.1e9,
    d2h_bytes_per_s=55.2e9,
    h2d_both_bytes_per_s=46.7e9,
    d2h_both_bytes_per_s=46.7e9,
    h2d_busy_bytes_per_s=38e9,
    d2h_busy_bytes_per_s=38e9,
    dram_bytes_per_s=148e9,
    host_dram_bytes_per_s=190e9,
    cpu_adam_fp32_params_per_s=3.9e9,
    cpu_adam_param_params_per_s=4.2e9,
    cpu_adam_fp32_busy_params_per_s=2.35e9,
    cpu_adam_param_busy_params_per_s=2.5e9,
    gpu_adam_params_per_s=139e9,
    gpu_upcast_params_per_s=500e9,
    gpu_flops_per_s=450e12,
    collective_bytes_per_s=300e9,
    disk_write_bytes_per_s=1.5e9,
)


def _published(name: str, source: str, **values: float) -> HardwareProfile:
    """A node of the method's publication: link, CPU and GPU rates as published, DRAM from its memory channels."""
    link, busy_link = values.pop("link"), values.pop("busy_link")
    cpu, busy_cpu = values.pop("cpu"), values.pop("busy_cpu")
    return HardwareProfile(
        name=name,
        source=source,
        date="2024-04-13",
        num_gpus=4,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        h2d_both_bytes_per_s=busy_link,
        d2h_both_bytes_per_s=busy_link,
        h2d_busy_bytes_per_s=busy_link,
        d2h_busy_bytes_per_s=busy_link,
        cpu_adam_fp32_params_per_s=cpu,
        cpu_adam_param_params_per_s=cpu * 32 / 30,
        cpu_adam_fp32_busy_params_per_s=busy_cpu,
        cpu_adam_param_busy_params_per_s=busy_cpu * 32 / 30,
        **values,  # type: ignore[arg-type]
    )


_H100X4 = _published(
    "h100x4",
    "published (Middleware 2024): 4 x H100, link 50 GB/s, CPU 2 G/s and GPU 25 G/s a rank; DRAM derived",
    num_cores=96,
    cpu_threads=23,
    gpu_memory_bytes=80 * _GIB,
    host_memory_bytes=512 * _GIB,
    link=55e9,
    busy_link=50e9,
    dram_bytes_per_s=140e9,
    host_dram_bytes_per_s=400e9,
    cpu=2.0e9,
    busy_cpu=1.7e9,
    gpu_adam_params_per_s=25e9,
    gpu_upcast_params_per_s=300e9,
    gpu_flops_per_s=400e12,
    collective_bytes_per_s=200e9,
)

_A100X4 = _published(
    "a100x4",
    "published (Middleware 2024): 4 x A100, PCIe 4, CPU 0.76 G/s a rank in the authors' logs; DRAM derived",
    num_cores=32,
    cpu_threads=7,
    gpu_memory_bytes=40 * _GIB,
    host_memory_bytes=512 * _GIB,
    link=25e9,
    busy_link=22e9,
    dram_bytes_per_s=60e9,
    host_dram_bytes_per_s=145e9,
    cpu=0.95e9,
    busy_cpu=0.75e9,
    gpu_adam_params_per_s=18e9,
    gpu_upcast_params_per_s=200e9,
    gpu_flops_per_s=170e12,
    collective_bytes_per_s=100e9,
)


def _estimate(name: str, what: str, **values: float) -> HardwareProfile:
    """A guess from data sheets: the CPU update is taken to be bound by the rank's share of memory traffic."""
    h2d, d2h, both = values.pop("h2d"), values.pop("d2h"), values.pop("both")
    ranks, dram = int(values["num_gpus"]), values["host_dram_bytes_per_s"]
    alone = min(dram, 2 * dram / ranks)
    busy = max(0.25 * dram / ranks, dram / ranks - both * (h2d + d2h))
    return HardwareProfile(
        name=name,
        source=f"estimate from data sheets, not measured: {what}",
        date="2026-08-20",
        is_estimate=True,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        h2d_both_bytes_per_s=h2d * both,
        d2h_both_bytes_per_s=d2h * both,
        h2d_busy_bytes_per_s=h2d * both * 0.9,
        d2h_busy_bytes_per_s=d2h * both * 0.9,
        dram_bytes_per_s=alone,
        cpu_adam_fp32_params_per_s=alone * 0.8 / 30,
        cpu_adam_param_params_per_s=alone * 0.8 / 28,
        cpu_adam_fp32_busy_params_per_s=busy * 0.8 / 30,
        cpu_adam_param_busy_params_per_s=busy * 0.8 / 28,
        **values,  # type: ignore[arg-type]
    )


_V100X8 = _estimate(
    "v100x8",
    "8 x V100 32 GB, PCIe 3 x16, two sockets of DDR4",
    num_gpus=8,
    num_cores=80,
    cpu_threads=9,
    gpu_memory_bytes=32 * _GIB,
    host_memory_bytes=768 * _GIB,
    h2d=12e9,
    d2h=12.5e9,
    both=0.85,
    host_dram_bytes_per_s=200e9,
    gpu_adam_params_per_s=20e9,
    gpu_upcast_params_per_s=100e9,
    gpu_flops_per_s=60e12,
    collective_bytes_per_s=60e9,
)

_H100X8 = _estimate(
    "h100x8",
    "8 x H100 80 GB, PCIe 5 x16, two sockets of DDR5",
    num_gpus=8,
    num_cores=112,
    cpu_threads=13,
    gpu_memory_bytes=80 * _GIB,
    host_memory_bytes=2048 * _GIB,
    h2d=55e9,
    d2h=55e9,
    both=0.85,
    host_dram_bytes_per_s=480e9,
    gpu_adam_params_per_s=90e9,
    gpu_upcast_params_per_s=300e9,
    gpu_flops_per_s=420e12,
    collective_bytes_per_s=300e9,
    network_bytes_per_s=45e9,
)

_GH200 = _estimate(
    "gh200",
    "GH200, NVLink-C2C (copy engines 412 up, 170 down in public reports), LPDDR5X",
    num_gpus=1,
    num_cores=72,
    cpu_threads=71,
    gpu_memory_bytes=96 * _GIB,
    host_memory_bytes=480 * _GIB,
    h2d=412e9,
    d2h=170e9,
    both=0.9,
    host_dram_bytes_per_s=420e9,
    gpu_adam_params_per_s=130e9,
    gpu_upcast_params_per_s=400e9,
    gpu_flops_per_s=430e12,
    collective_bytes_per_s=0.0,
    network_bytes_per_s=45e9,
)

_GB200 = _estimate(
    "gb200",
    "one GB200 board: 2 GPUs on one Grace (copy engines 211 up, 190 down in public reports), LPDDR5X",
    num_gpus=2,
    num_cores=72,
    cpu_threads=35,
    gpu_memory_bytes=186 * _GIB,
    host_memory_bytes=480 * _GIB,
    h2d=211e9,
    d2h=190e9,
    both=0.9,
    host_dram_bytes_per_s=420e9,
    gpu_adam_params_per_s=220e9,
    gpu_upcast_params_per_s=700e9,
    gpu_flops_per_s=1000e12,
    collective_bytes_per_s=700e9,
    network_bytes_per_s=45e9,
)

BUILT_IN_PROFILES: dict[str, HardwareProfile] = {
    profile.name: profile for profile in (_H200, _H200X2, _H100X4, _A100X4, _V100X8, _H100X8, _GH200, _GB200)
}


def load_profile(name_or_path: str) -> HardwareProfile:
    """A built-in profile by its name, or a file. Raises ValueError naming the built-in ones when it is neither."""
    if name_or_path in BUILT_IN_PROFILES:
        return BUILT_IN_PROFILES[name_or_path]
    try:
        text = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"hardware profile {name_or_path!r} cannot be read ({why}): give a file, or one of "
            f"{', '.join(BUILT_IN_PROFILES)}"
        ) from error
    return profile_from_json(text, f"hardware profile {name_or_path}")


def cache_directory() -> Path:
    """Where profiles of measured machines are kept: DEEP_OFFLOAD_CACHE, or deep_offload in the user's cache."""
    override = os.environ.get("DEEP_OFFLOAD_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deep_offload"


def cache_file(fingerprint: str) -> Path:
    """The cache's file for the machine with this fingerprint."""
    return cache_directory() / f"profile-{hashlib.sha256(fingerprint.encode()).hexdigest()[:12]}.json"


def cached_profiles() -> list[tuple[Path, HardwareProfile]]:
    """All readable profiles of the cache with their files, the newest first."""
    found = []
    for path in cache_directory().glob("profile-*.json"):
        try:
            profile = profile_from_json(path.read_text(encoding="utf-8"), str(path))
            found.append((path.stat().st_mtime, path, profile))
        except (OSError, ValueError):  # of an older version, no text, or gone: training measures again
            continue
    found.sort(key=lambda one: one[0], reverse=True)
    return [(path, profile) for _, path, profile in found]


def planning_profile(name_or_path: str | None) -> tuple[HardwareProfile, str]:
    """A profile to plan with, and one line on where it comes from and which machine's it is. Measures nothing.

    The given one, else the newest of the cache that has a GPU, else the built-in h200. Raises ValueError for a wrong
    name or file.
    """
    if name_or_path is not None:
        return load_profile(name_or_path), f"hardware profile {name_or_path} as given"
    cached = cached_profiles()
    for path, profile in cached:
        if profile.num_gpus:
            machine = profile.fingerprint or "unknown machine"
            return profile, f"hardware profile measured before on {profile.name} ({machine}): {path}"
    why = "only machines without a GPU were measured" if cached else "no machine was measured yet"
    return BUILT_IN_PROFILES["h200"], (
        f"{why}, so the built-in profile h200 is used: run `python -m deep_offload calibrate` on the machine that "
        "will train, or give --profile"
    )


_WITHOUT_BF16 = re.compile(
    r"\b([vp]100|t4|t[46]00|t1[02]00|tesla [kmp][0-9]+|titan|gtx|quadro|rtx 20[5-8]0)(?![0-9])", re.IGNORECASE
)
"""GPUs before Ampere: Turing (T4, Quadro RTX), Volta, Pascal and older."""


def accelerator_of(profile: HardwareProfile) -> str:
    """The GPU that was measured, as its driver names it; the name of a profile that nobody measured."""
    return profile.fingerprint.rpartition(" / ")[2] or profile.name


def has_bf16(profile: HardwareProfile) -> bool:
    """Whether the profile's GPU computes in bf16; older ones are known by name."""
    return _WITHOUT_BF16.search(accelerator_of(profile)) is None
