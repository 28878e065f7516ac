"""Which measured profile is of this machine, told without torch. Standard library only.

A profile's fingerprint is `CPU / N cores / RANKS x THREADS threads / GPU`: what makes rates comparable.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.machines import BUILT_IN_PROFILES, cached_profiles, load_profile

NO_GPU = "no GPU"
"""The accelerator in a fingerprint where the CPU plays the device."""


def fingerprint_of(cpu: str, cores: int, num_ranks: int, num_threads: int, accelerator: str) -> str:
    """Identity of a machine and of the ranks at work on it."""
    return f"{cpu} / {cores} cores / {num_ranks} x {num_threads} threads / {accelerator}"


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def cpu_update_threads(cores: int, ranks: int, has_gpu: bool) -> int:
    """Threads of one rank's CPU update: its share of the cores, one of them left to the thread that launches
    kernels."""
    share = max(1, cores // ranks)
    return max(1, share - 1) if has_gpu else share


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """This host as training would see it.

    cores: those that this process may use; has_gpu: training would use GPUs; gpu_names: of each of them, where the
    driver tells them and no variable hides some, else empty.
    """

    cpu: str
    cores: int
    has_gpu: bool
    gpu_names: tuple[str, ...] = ()

    def is_measured_by(self, profile: HardwareProfile) -> bool:
        """Whether the profile is of this machine, whatever ranks and threads were at work."""
        cpu, cores, _, accelerator = _parts(profile.fingerprint)
        if cpu != self.cpu or cores != f"{self.cores} cores" or (accelerator != NO_GPU) != self.has_gpu:
            return False
        # NAME N GiB x COUNT
        name, count = accelerator.rsplit(" ", 4)[0], accelerator.rpartition(" x ")[2]
        return not self.gpu_names or (name in self.gpu_names and count == str(len(self.gpu_names)))

    def __str__(self) -> str:
        names = " and ".join(sorted(set(self.gpu_names))) or ("a GPU" if self.has_gpu else NO_GPU)
        return f"{self.cpu} / {self.cores} cores / {names}"


def find_this_machine(*, use_cpu: bool, root: Path = Path("/")) -> ThisMachine:
    """This host. use_cpu: training leaves GPUs out. root: folder that holds `dev` and `proc`, for tests."""
    has_gpu = not use_cpu and any((root / "dev").glob("nvidia[0-9]*"))
    names = tuple(_gpu_names(root)) if has_gpu and "CUDA_VISIBLE_DEVICES" not in os.environ else ()
    return ThisMachine(cpu_name(), len(os.sched_getaffinity(0)), has_gpu, names)


def training_profile(
    given: str | None, machine: ThisMachine, num_ranks: int, num_threads: int | None
) -> tuple[HardwareProfile, str]:
    """The profile that training on this machine would go by, and one line on where it is from. Measures nothing.

    The given one; else the cached one of this machine with as many ranks and threads at work; else the newest of this
    machine; else the built-in h200. num_threads None: as many as training chooses. Raises ValueError for a wrong name
    or file.
    """
    if given is not None:
        return load_profile(given), f"hardware profile {given} as given"
    threads = num_threads or cpu_update_threads(machine.cores, num_ranks, machine.has_gpu)
    wanted = f"{num_ranks} x {threads} threads"
    ours = [(path, profile) for path, profile in cached_profiles() if machine.is_measured_by(profile)]
    for path, profile in ours:
        if _parts(profile.fingerprint)[2] == wanted:
            return (
                profile,
                f"hardware profile measured before on this machine with {wanted}, as training takes here: {path}",
            )
    if ours:
        path, profile = ours[0]
        return profile, (
            f"hardware profile measured before on this machine, but with {_parts(profile.fingerprint)[2]}, where "
            f"training would use {wanted} and measure anew: {path}"
        )
    return BUILT_IN_PROFILES["h200"], (
        f"this machine ({machine}) was not measured yet, so the built-in profile h200 is used: run `python -m "
        "deep_offload calibrate` here, or give --offload-profile the file or name of another machine"
    )


def _parts(fingerprint: str) -> list[str]:
    """Processor, cores, ranks and threads, accelerator; four empty ones for the fingerprint of a built-in profile."""
    parts = fingerprint.rsplit(" / ", 3)
    return parts if len(parts) == 4 else [""] * 4


def _gpu_names(root: Path) -> Iterator[str]:
    for file in sorted((root / "proc" / "driver" / "nvidia" / "gpus").glob("*/information")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        yield from (line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:"))
