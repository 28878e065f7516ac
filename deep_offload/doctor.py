"""`python -m deep_offload doctor`: measure this machine, judge what will cost speed, keep the profile for training."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from deep_offload.doctor_verdicts import Facts, Finding, Gpu, judge
from deep_offload.kernels import cpu as cpu_kernels
from deep_offload.model.hardware import HardwareProfile, profile_to_json
from deep_offload.model.machines import cache_file
from deep_offload.model.this_machine import cpu_update_threads
from deep_offload.runtime import probe
from deep_offload.runtime.limits import read_host_limits
from deep_offload.runtime.measure import profile_for_run

PACKAGES = ("torch", "triton", "megatron-core", "deep-offload", "numpy")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; 0, or 2 if training would fail on this machine."""
    started = time.perf_counter()
    log = (lambda _line: None) if arguments.json else print
    facts, profile = examine(
        use_gpu=not arguments.use_cpu, disk=arguments.disk, write_profile=not arguments.no_profile, log=log
    )
    findings = judge(facts)
    seconds = time.perf_counter() - started
    print(as_json(facts, findings, profile, seconds) if arguments.json else as_text(findings, seconds))
    return 2 if any(finding.verdict == "bad" for finding in findings) else 0


def as_text(findings: list[Finding], seconds: float) -> str:
    """Findings, then the number of each verdict."""
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("good", "cost", "bad", "note")}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([*map(str, findings), f"{summary}; {seconds:.1f} s"])


def as_json(facts: Facts, findings: list[Finding], profile: HardwareProfile | None, seconds: float) -> str:
    """The same as one JSON object."""
    values = {
        "facts": asdict(facts),
        "findings": [asdict(finding) for finding in findings],
        "profile": None if profile is None else asdict(profile),
        "seconds": round(seconds, 2),
    }
    return json.dumps(values, indent=1)


def examine(
    *, use_gpu: bool, disk: Path, write_profile: bool, log: Callable[[str], None]
) -> tuple[Facts, HardwareProfile | None]:
    """Measure everything; also the profile if it was asked for and could be measured."""
    has_gpu = use_gpu and torch.cuda.is_available()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if has_gpu else []
    limits = read_host_limits()
    threads = cpu_update_threads(limits.cores, max(1, len(devices)), has_gpu)
    facts = Facts(
        gpus=tuple(_gpu(device) for device in devices),
        gpu_problem=_gpu_problem() if use_gpu and not has_gpu else "",
        together=tuple(probe.copies_together(devices)) if len(devices) > 1 else (),
        all_reduce=probe.all_reduce_bytes_per_s(devices) if len(devices) > 1 else None,
        nccl_variables={k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")},
        cores=limits.cores,
        cpu_threads=threads,
        numa_nodes=numa_nodes(),
        available_bytes=limits.available_bytes,
        available_source=limits.source,
        memlock_bytes=limits.memlock_bytes,
        huge_pages=huge_pages(),
        disk_folder=str(disk.resolve()),
        versions=versions(),
    )
    facts = _with_disk(facts, disk)
    try:
        cpu_kernels.extension()
    except cpu_kernels.ExtensionMissingError as error:
        return replace(facts, extension_problem=str(error)), None
    facts = replace(
        facts,
        isa=cpu_kernels.selected_isa(),
        isas=cpu_kernels.supported_isas(),
        triad=probe.triad_curve(thread_counts(limits.cores)),
        triad_under_copies=probe.triad_under_copies(limits.cores, devices),
    )
    if not write_profile:
        return facts, None
    return _with_profile(facts, devices[0] if devices else torch.device("cpu"), limits.cores, log)


def _with_profile(
    facts: Facts, device: torch.device, cores: int, log: Callable[[str], None]
) -> tuple[Facts, HardwareProfile]:
    """Measure what a run with one rank goes by, and keep it where that looks for it.

    Several ranks share the host's memory, so a run of them measures its own, all at once.
    """
    threads = cpu_update_threads(cores, 1, device.type == "cuda")
    profile = profile_for_run(None, device, threads, remeasure=True, log=log)
    profile = replace(
        profile, disk_write_bytes_per_s=facts.disk_write or 0.0, collective_bytes_per_s=facts.all_reduce or 0.0
    )
    path = cache_file(profile.fingerprint)
    try:
        path.write_text(profile_to_json(profile))
    except OSError:
        path = Path("")  # profile_for_run has said why
    facts = replace(
        facts,
        cpu_adam=profile.cpu_adam_param_params_per_s,
        cpu_adam_busy=profile.cpu_adam_param_busy_params_per_s,
        cpu_adam_threads=threads,
        profile_file="" if path == Path("") else str(path),
    )
    return facts, profile


def _with_disk(facts: Facts, folder: Path) -> Facts:
    try:
        return replace(facts, disk_write=probe.disk_write_bytes_per_s(folder))
    except OSError as error:
        return replace(facts, disk_problem=f"{folder} cannot be written ({error.strerror})")


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores."""
    return sorted({*(1 << i for i in range(cores.bit_length()) if 1 << i <= cores), cores})


def versions() -> dict[str, str]:
    """Python, kernel, packages, CUDA and driver, as far as they are there."""
    found = {"python": platform.python_version(), "linux": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    try:
        found["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        pass
    return found


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> dict[int, int]:
    """Cores that this process may use on each NUMA node; empty where the kernel does not say."""
    allowed, nodes = os.sched_getaffinity(0), {}
    for folder in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cores = _cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if count := len(cores & allowed):
            nodes[int(folder.name[4:])] = count
    return nodes


def _cpu_list(text: str) -> set[int]:
    """The kernel's `0-3,8` as a set."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """The chosen word, which the kernel puts in brackets."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else ""


def _gpu_problem() -> str:
    """A GPU that torch cannot use; empty where there is none."""
    if Path("/proc/driver/nvidia/gpus").exists() or Path("/dev/nvidia0").exists():
        why = "finds no usable driver" if torch.version.cuda else "is built without CUDA"
        return f"the machine has an NVIDIA GPU, but torch {torch.__version__} {why}"
    return ""


def _gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    rates = probe.copy_rates(device)
    return Gpu(properties.name, properties.total_memory, numa_node(properties), **asdict(rates))


def numa_node(properties: object, root: Path = Path("/sys")) -> int:
    """The node that the kernel gives for the GPU's PCI address, 0 where there is only one; -1: unknown.

    A kernel without NUMA, and many virtual machines, give -1 for every device.
    """
    nodes = list((root / "devices/system/node").glob("node[0-9]*"))
    try:
        domain, bus, slot = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
        node = int((root / f"bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        node = -1
    return 0 if node < 0 and len(nodes) <= 1 else node
