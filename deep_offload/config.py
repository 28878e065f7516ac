"""Settings of the offload engine, checked once at the door. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GRAD_WIRES = ("auto", "fp32", "param")

_MOST_GIB = 1e9
"""More memory than any machine has, and few enough bytes to count with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """How optimizer state is placed and moved. Field names are the command line's flags with underscores.

    Raises ValueError, one sentence, for values that no run could use.
    """

    interleaved_offload: bool = False
    """Keep Adam's state in host memory and update it on CPU and GPU at once. False: all state stays on the GPU."""

    offload_gpu_share: float | Literal["auto"] = "auto"
    """Share (0..1) of the offloaded subgroups that the GPU updates; 0 is ZeRO-Offload, 1 streams everything."""

    offload_stride: int | Literal["auto", "none"] = "auto"
    """Update every K-th offloaded subgroup on the GPU (the method's k); overrides the share. none: all on the CPU."""

    offload_resident_fraction: float | Literal["auto"] = "auto"
    """Fraction (0..1) of the subgroups whose state STAYS on the GPU. auto: all that fits beside training. DeepSpeed's
    `ratio` and Megatron's `--optimizer-offload-fraction` name the offloaded part instead: theirs is 1 minus ours."""

    offload_subgroup_numel: int | Literal["auto"] = "auto"
    """Target elements in one subgroup, the unit of scheduling. auto: 2**26, less for small shards."""

    offload_num_slots: int | Literal["auto"] = "auto"
    """GPU staging slots; each holds one subgroup's state while it is updated there. auto: 4, or where nothing may
    stay on the GPU (`--offload-resident-fraction 0`) 8, or 15 % of the subgroups where those are more, if they fit and
    shorten the iteration."""

    offload_cpu_threads: int | Literal["auto"] = "auto"
    """OpenMP threads of the CPU update of this rank. auto: the rank's share of cores, less one."""

    offload_grad_wire: Literal["auto", "fp32", "param"] = "auto"
    """Type in which gradients reach the host: fp32 (upcast on the GPU) or the 16-bit type of the gradient buffer."""

    offload_split_master: Literal["auto", "on", "off"] = "auto"
    """Keep only the low 16 bits of a bf16 parameter's master for subgroups that the GPU updates (10 B each way)."""

    offload_profile: str | None = None
    """JSON file of measured rates; measured at start when absent."""

    offload_device_budget_gib: float | None = None
    """GiB of GPU memory that residents and staging slots may take; what training leaves when absent."""

    offload_host_budget_gib: float | None = None
    """GiB of host memory that this rank may pin for optimizer state."""

    offload_trace: str | None = None
    """File for the last steps' lanes as a Chrome trace (JSON, opens in Perfetto), predicted lanes beside measured."""

    offload_trace_steps: int = 1
    """Steps of --offload-trace and of the trace in --run-dir."""

    offload_verify_interval: int = 0
    """Steps from one check to the next in which CPU and GPU both update a subgroup and are compared bit by bit; a
    difference ends the run. 0: no checks."""

    log_state_digest: bool = False
    """Print the sha256 of parameters and optimizer state at the end of training."""

    def __post_init__(self) -> None:
        _check_fraction("--offload-gpu-share", self.offload_gpu_share)
        _check_fraction("--offload-resident-fraction", self.offload_resident_fraction)
        if self.offload_stride not in ("auto", "none"):
            _check_positive_int("--offload-stride", self.offload_stride, "auto, none")
            if self.offload_gpu_share != "auto":
                raise ValueError(
                    f"--offload-stride {self.offload_stride} and --offload-gpu-share {self.offload_gpu_share} "
                    f"both choose "
                    "the GPU's subgroups: give only one of them"
                )
        if self.offload_stride == "none" and self.offload_gpu_share not in ("auto", 0.0):
            raise ValueError(
                f"--offload-stride none updates everything on the CPU, but --offload-gpu-share is "
                f"{self.offload_gpu_share}: "
                "give only one of them"
            )
        if self.offload_subgroup_numel != "auto":
            _check_positive_int("--offload-subgroup-numel", self.offload_subgroup_numel, "auto")
        if self.offload_num_slots != "auto":
            _check_positive_int("--offload-num-slots", self.offload_num_slots, "auto")
        _check_positive_int("--offload-trace-steps", self.offload_trace_steps, None)
        if self.offload_verify_interval < 0:
            raise ValueError(
                f"--offload-verify-interval is {self.offload_verify_interval}, allowed are 0 (no checks) and more"
            )
        if self.offload_cpu_threads != "auto":
            _check_positive_int("--offload-cpu-threads", self.offload_cpu_threads, "auto")
        if self.offload_grad_wire not in GRAD_WIRES:
            raise ValueError(f"--offload-grad-wire is {self.offload_grad_wire!r}, allowed are {', '.join(GRAD_WIRES)}")
        if self.offload_split_master not in ("auto", "on", "off"):
            raise ValueError(f"--offload-split-master is {self.offload_split_master!r}, allowed are auto, on, off")
        for flag, value in (
            ("--offload-device-budget-gib", self.offload_device_budget_gib),
            ("--offload-host-budget-gib", self.offload_host_budget_gib),
        ):
            if value is not None and not 0 < value <= _MOST_GIB:  # NaN is neither
                raise ValueError(f"{flag} is {value}, allowed are numbers of GiB above 0 and up to {_MOST_GIB:.0e}")


def _check_fraction(flag: str, value: float | str) -> None:
    if value == "auto":
        return
    if isinstance(value, str) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{flag} is {value!r}, allowed are auto and numbers from 0 to 1")


def _check_positive_int(flag: str, value: int | str, words: str | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        allowed = "whole numbers from 1" if words is None else f"{words} and whole numbers from 1"
        raise ValueError(f"{flag} is {value!r}, allowed are {allowed}")
