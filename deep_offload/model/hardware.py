"""Rates and sizes of one machine, as numbers in a JSON file. Standard library only."""

from __future__ import annotations

import difflib
import json
import reprlib
from dataclasses import asdict, dataclass, fields
from typing import Any

PROFILE_FORMAT = 2
"""Version of the JSON file; a file of another version is refused. CPU rates of version 1 were those of arrays that a
cache holds in part."""

_RECALIBRATE = "measure a new one with `python -m deep_offload calibrate`"

_MOST = 1e30
"""More of anything than a machine has, and far below what arithmetic with floats can take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """What one rank can use of a machine: bytes/s of each lane and parameters/s of each kind of update.

    "Alone" is measured with all other lanes idle, "both" with the other direction of the link busy, "busy" with
    the other direction and the CPU update busy (for the CPU update: with both directions busy). Rates are those of one
    rank while the other ranks of the host are idle, apart from `host_dram_bytes_per_s`, which all ranks share.
    Raises ValueError, one sentence, for values that no machine has.
    """

    name: str
    """Short name, such as h200."""

    source: str
    """Where the figures come from, one line."""

    date: str
    """Day of the measurement, YYYY-MM-DD."""

    fingerprint: str = ""
    """Identity of the measured machine (`runtime.measure.fingerprint`); empty for built-in profiles."""

    is_estimate: bool = False
    """Figures are guessed from data sheets, not measured."""

    num_gpus: int
    """GPUs of the host, each with one rank; 0 where the CPU plays the device."""

    num_cores: int
    """Cores of the host that ranks may use."""

    cpu_threads: int
    """Threads of the CPU update of one rank, with which its rates hold."""

    gpu_memory_bytes: int
    """Memory of one GPU; 0 where there is none."""

    host_memory_bytes: int
    """Memory of the host that its ranks together may use; 0 when nothing limits it (then fits are not checked)."""

    h2d_bytes_per_s: float
    """Pinned host to device, alone."""

    d2h_bytes_per_s: float
    """Device to pinned host, alone."""

    h2d_both_bytes_per_s: float
    """Pinned host to device while the other direction is busy."""

    d2h_both_bytes_per_s: float
    """Device to pinned host while the other direction is busy."""

    h2d_busy_bytes_per_s: float
    """Pinned host to device while the other direction and the CPU update are busy."""

    d2h_busy_bytes_per_s: float
    """Device to pinned host while the other direction and the CPU update are busy."""

    dram_bytes_per_s: float
    """Host memory traffic, reads plus writes, that one rank reaches with all its lanes."""

    host_dram_bytes_per_s: float
    """Host memory traffic of all ranks of the host together."""

    cpu_adam_fp32_params_per_s: float
    """CPU update with fp32 gradients, alone."""

    cpu_adam_param_params_per_s: float
    """CPU update with 16-bit gradients (wire `param`), alone."""

    cpu_adam_fp32_busy_params_per_s: float
    """CPU update with fp32 gradients while both directions of the link are busy."""

    cpu_adam_param_busy_params_per_s: float
    """CPU update with 16-bit gradients while both directions of the link are busy."""

    gpu_adam_params_per_s: float
    """GPU update of state that is on the device."""

    gpu_upcast_params_per_s: float
    """16-bit gradients to fp32 on the device."""

    gpu_flops_per_s: float
    """16-bit matrix arithmetic that training reaches on one GPU, FLOP/s."""

    collective_bytes_per_s: float
    """Bytes of a reduce-scatter or all-gather per second and GPU inside a host; 0 when it has one GPU."""

    network_bytes_per_s: float = 0.0
    """The same between hosts; 0 when unknown."""

    disk_write_bytes_per_s: float = 0.0
    """Bytes per second of a checkpoint's write from one host; 0 when unknown."""

    op_overhead_seconds: float = 3e-5
    """Time of an operation beyond its bytes: launch, event, thread wake-up."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float"):
                self._check_number(field.name, value, field.type)
            elif not isinstance(value, bool if field.type == "bool" else str):
                raise ValueError(
                    f"{field.name} of hardware profile {reprlib.repr(self.name)} is {reprlib.repr(value)}, expected "
                    f"{field.type}"
                )

    def _check_number(self, name: str, value: object, kind: str) -> None:
        allowed = int if kind == "int" else (int, float)
        is_number = isinstance(value, allowed) and not isinstance(value, bool)
        may_be_zero = name in _MAY_BE_ZERO
        if not is_number or not 0 <= value <= _MOST or (value == 0 and not may_be_zero):  # NaN is not between
            least = "0 or more" if may_be_zero else "more than 0"
            raise ValueError(
                f"{name} of hardware profile {self.name!r} is {reprlib.repr(value)}, it must be a number, {least} and "
                f"at most {_MOST:.0e}: {_RECALIBRATE}"
            )

    def rank_dram_bytes_per_s(self, num_ranks: int) -> float:
        """Host memory traffic of one of `num_ranks` ranks of the host that all work at once."""
        return min(self.dram_bytes_per_s, self.host_dram_bytes_per_s / max(1, num_ranks))

    def cpu_adam_params_per_s(self, wire: str, *, busy: bool) -> float:
        """Rate of the CPU update for gradients on the wire `fp32` or `param`, alone or with the link busy."""
        if wire == "fp32":
            return self.cpu_adam_fp32_busy_params_per_s if busy else self.cpu_adam_fp32_params_per_s
        return self.cpu_adam_param_busy_params_per_s if busy else self.cpu_adam_param_params_per_s

    def scaled(self, factor: float) -> HardwareProfile:
        """The same machine with every rate multiplied by `factor` (its overhead divided)."""
        values = asdict(self)
        for name in values:
            if name.endswith("_per_s"):
                values[name] *= factor
        values["op_overhead_seconds"] /= factor
        return HardwareProfile(**values)


_MAY_BE_ZERO = {
    "num_gpus",
    "gpu_memory_bytes",
    "host_memory_bytes",
    "collective_bytes_per_s",
    "network_bytes_per_s",
    "disk_write_bytes_per_s",
    "op_overhead_seconds",
}


def profile_to_json(profile: HardwareProfile) -> str:
    """The text of a profile file."""
    return json.dumps({"format": PROFILE_FORMAT, **asdict(profile)}, indent=1) + "\n"


def profile_from_json(text: str, where: str = "the hardware profile") -> HardwareProfile:
    """The inverse of `profile_to_json`. Raises ValueError, one sentence that begins with `where`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, a number with too many digits, or nested too deeply
        raise ValueError(f"{where} is no JSON that can be read ({error}): {_RECALIBRATE}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} holds a JSON {type(values).__name__} instead of an object: {_RECALIBRATE}")
    version = values.pop("format", None)
    if version != PROFILE_FORMAT:
        given = reprlib.repr(version)
        raise ValueError(f"{where} has format {given}, this version reads {PROFILE_FORMAT}: {_RECALIBRATE}")
    return HardwareProfile(**_checked_names(values, where))


def _checked_names(values: dict[str, Any], where: str) -> dict[str, Any]:
    known = {field.name for field in fields(HardwareProfile)}
    missing = sorted(known - values.keys())
    if missing:
        raise ValueError(f"{where} lacks the field {', '.join(missing)}: {_RECALIBRATE}")
    for name in values.keys() - known:
        nearest = difflib.get_close_matches(name, known, 1)
        hint = f", did you mean {nearest[0]}?" if nearest else f": {_RECALIBRATE}"
        raise ValueError(f"{where} has an unknown field {name}{hint}")
    return values
