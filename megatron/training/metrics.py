"""What a run prints while it trains: Megatron's log line, byte for byte, with our fields at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime

from megatron.training.config import TrainingConfig
from megatron.training.train_step import Losses, StepResult


@dataclass(slots=True)
class Interval:
    """Sums since the last log line."""

    num_iterations: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    loss_sums: Losses = field(default_factory=dict)
    skipped_loss_sums: Losses = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def add(self, result: StepResult) -> None:
        """Count a step. Losses of skipped steps are kept apart: they show only where nothing else does."""
        self.num_iterations += 1
        self.num_skipped += result.is_skipped
        self.num_nan += any(not math.isfinite(loss) for loss in result.losses.values())
        sums = self.skipped_loss_sums if result.is_skipped else self.loss_sums
        for name, loss in result.losses.items():
            sums[name] = sums.get(name, 0.0) + loss

    def mean_losses(self) -> Losses:
        """Return the mean over the steps that updated, or, if all were skipped, over those: a NaN must be seen."""
        num_updated = self.num_iterations - self.num_skipped
        if num_updated:
            return {name: total / num_updated for name, total in self.loss_sums.items()}
        return {name: total / self.num_skipped for name, total in self.skipped_loss_sums.items()}

    def leave_out(self, seconds: float) -> None:
        """Do not count time that went into something else, such as an evaluation."""
        self.started += seconds

    def seconds_per_iteration(self) -> float:
        """Return the wall time of one step."""
        return (time.monotonic() - self.started) / max(self.num_iterations, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogValues:
    """Everything the log line shows beside the interval's sums. None leaves a field out."""

    iteration: int
    num_iterations: int
    consumed_samples: int
    seconds_per_iteration: float
    tflops_per_gpu: float | None
    learning_rate: float
    decoupled_learning_rate: float | None
    batch_size: int
    loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    extra: Sequence[tuple[str, str]] = ()


def log_line(values: LogValues, interval: Interval, now: datetime) -> str:
    """Return the line of one log interval.

    Fields and widths are Megatron's, because people's parsers depend on them; `extra` stands at the end.
    """
    line = f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}]"
    line += f" iteration {values.iteration:8d}/{values.num_iterations:8d} |"
    line += f" consumed samples: {values.consumed_samples:12d} |"
    line += f" elapsed time per iteration (ms): {values.seconds_per_iteration * 1000.0:.1f} |"
    if values.tflops_per_gpu is not None:
        line += f" throughput per GPU (TFLOP/s/GPU): {values.tflops_per_gpu:.1f} |"
    line += f" learning rate: {values.learning_rate:.6E} |"
    if values.decoupled_learning_rate is not None:
        line += f" decoupled learning rate: {values.decoupled_learning_rate:.6E} |"
    line += f" global batch size: {values.batch_size:5d} |"
    for name, loss in interval.mean_losses().items():
        line += f" {name}: {loss:.6E} |"
    line += f" loss scale: {values.loss_scale:.1f} |"
    if values.grad_norm is not None:
        line += f" grad norm: {values.grad_norm:.3f} |"
    if values.num_zeros is not None:
        line += f" num zeros: {values.num_zeros} |"
    if values.params_norm is not None:
        line += f" params norm: {values.params_norm:.3f} |"
    line += f" number of skipped iterations: {interval.num_skipped:3d} |"
    line += f" number of nan iterations: {interval.num_nan:3d} |"
    for name, text in values.extra:
        line += f" {name}: {text} |"
    return line


def flat_settings(config: TrainingConfig) -> dict[str, object]:
    """Return every setting by its flag's name with underscores."""
    values: dict[str, object] = {}
    for place in fields(config):
        section = getattr(config, place.name)
        if is_dataclass(section):
            values.update({inner.name: getattr(section, inner.name) for inner in fields(section)})
        elif place.name != "notes":
            values[place.name] = section
    return values


def datetime_line(label: str) -> str:
    """Return Megatron's `[label] datetime: ...` line."""
    return f"[{label}] datetime: {datetime.now().strftime('%Y-%m-%d %H:%M:%S')} "


def gibibytes(num_bytes: int) -> str:
    """Return a byte count as people read it: GiB from 0.1 up, MiB below."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.2f} MiB"
