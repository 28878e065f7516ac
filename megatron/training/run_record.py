"""What a run writes into `--run-dir`: `run.jsonl`, one event a line, and a trace of its last steps.

`python -m deep_offload report RUN_DIR` makes a page of it. Lines are written as they come, so a run that died has a
report too. Events: start, placement (changed while the run goes on), note, step, evaluation, checkpoint, end.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from deep_offload.model.run import model_bytes
from deep_offload.model.trace import Expectation, run_trace
from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.plan.timeline import Timeline
from megatron.training.config import TrainingConfig
from megatron.training.dry_run import run_shape
from megatron.training.metrics import Interval, LogValues
from megatron.training.side_files import SideFiles
from megatron.training.timers import Times

RUN_FILE = "run.jsonl"
TRACE_FILE = "trace.json"
_PACKAGES = ("torch", "triton", "megatron-core", "deep-offload", "numpy", "transformer-engine")
_VARIABLES = ("NCCL_", "OMP_", "CUDA_", "PYTORCH_", "TORCH_", "DEEP_OFFLOAD_", "SLURM_JOB_ID", "SLURM_NNODES")


class RunRecord:
    """The files of one run; on ranks that do not write, and without `--run-dir`, every call does nothing."""

    def __init__(self, config: TrainingConfig, is_writer: bool, side_files: SideFiles) -> None:
        """Raises ValueError where the directory cannot be written; later failures are left to `side_files`."""
        self._side_files = side_files
        self._folder = Path(config.logging.run_dir) if config.logging.run_dir and is_writer else None
        self._file = None if self._folder is None else _open(self._folder)
        self._started = time.time()
        self._saved: int | None = None
        self._placement: list[str] = []
        self._model_bytes = 0
        self._show_warning = warnings.showwarning
        if self._file is not None:
            warnings.showwarning = self._on_warning

    @property
    def is_open(self) -> bool:
        """Whether anything is written."""
        return self._file is not None

    def start(self, config: TrainingConfig, optimizer: DeepOffloadOptimizer, notes: list[str]) -> None:
        """What is about to run, on what, and what is expected of it."""
        if self._file is None:
            return
        self._model_bytes = model_bytes(run_shape(config), parallel_state.get_pipeline_model_parallel_rank()).total
        self._write(
            "start",
            command=shlex.join(sys.orig_argv),
            environment=_environment(),
            config=_plain(config),
            num_iterations=config.num_iterations,
            world_size=config.world_size,
            **self._placed(optimizer),
        )
        for note in notes:
            self._write("note", text=note)

    def _placed(self, optimizer: DeepOffloadOptimizer) -> dict[str, Any]:
        """How state is placed now, its bytes, and what is predicted for it.

        waits_in_passes: whether `wait_seconds` of steps are a part of their forward-backward time. planned_bytes: as
        state_bytes, what the placement counts; device_total: with weights, gradients, activations and the upcast
        buffer, the predicted peak of this rank's GPU.
        """
        self._placement = optimizer.describe()
        expected, (host, device) = optimizer.expected, optimizer.memory_bytes()
        planned_host, planned = optimizer.planned_bytes()
        return {
            "placement": self._placement,
            "predicted": None if expected is None else _prediction(expected),
            "waits_in_passes": optimizer.waits_in_passes,
            "state_bytes": {"host": host, "device": device},
            "planned_bytes": {
                "host": planned_host,
                "device": planned.resident + planned.slots,
                "device_total": self._model_bytes + planned.total,
            },
        }

    def step(self, values: LogValues, interval: Interval, times: Times, optimizer: DeepOffloadOptimizer) -> None:
        """What a log line says, and where the time went; call where the log line is printed."""
        if self._file is None:
            return
        if optimizer.describe() != self._placement:
            self._write("placement", iteration=values.iteration, **self._placed(optimizer))
        update = optimizer.last_update()
        self._write(
            "step",
            iteration=values.iteration,
            samples=values.consumed_samples,
            losses=interval.mean_losses(),
            learning_rate=values.learning_rate,
            grad_norm=values.grad_norm,
            loss_scale=values.loss_scale,
            skipped=interval.num_skipped,
            nan=interval.num_nan,
            seconds=values.seconds_per_iteration,
            tflops=values.tflops_per_gpu,
            wait_seconds=optimizer.wait_seconds,
            update=None if update is None else dataclasses.asdict(update),
            times={name: max(seconds) for name, seconds in times.items()},
            memory=_memory(),
        )

    def evaluation(self, iteration: int, split: str, losses: dict[str, float]) -> None:
        """The losses of an evaluation."""
        self._write("evaluation", iteration=iteration, split=split, losses=losses)

    def checkpoint(self, last_saved: int | None, seconds: float) -> None:
        """Note the newest complete checkpoint, once. seconds: how long the loop stood still for it."""
        if last_saved is not None and last_saved != self._saved:
            self._saved = last_saved
            self._write("checkpoint", iteration=last_saved, seconds=seconds)

    def end(self, optimizer: DeepOffloadOptimizer, stop_reason: str | None) -> None:
        """The last line, and the trace."""
        if self._folder is None or self._file is None:
            return
        with self._side_files.writing(self._folder / TRACE_FILE):
            write_trace(optimizer, self._folder / TRACE_FILE)
        seconds = time.time() - self._started
        self._write("end", stop_reason=stop_reason, seconds=seconds, traffic=optimizer.traffic(), memory=_memory())

    def close(self) -> None:
        """Close the file; what was written stays."""
        if self._file is not None:
            warnings.showwarning = self._show_warning
            with self._side_files.writing(Path(self._file.name)):  # it tries what could not be written once more
                self._file.close()
            self._file = None

    def _write(self, event: str, **values: Any) -> None:
        if self._file is not None:
            line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, default=str, allow_nan=True)
            with self._side_files.writing(Path(self._file.name)):
                self._file.write(line + "\n")
                self._file.flush()

    def _on_warning(self, message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        self._write("note", text=f"{category.__name__}: {message}")
        self._show_warning(message, category, filename, lineno, *rest)


def write_trace(optimizer: DeepOffloadOptimizer, path: Path) -> list[Timeline]:
    """Write the lanes of the kept steps, predicted beside measured, and return the steps; without one, no file.

    Not a collective: this rank's own lanes.
    """
    steps = optimizer.timelines()
    if steps:
        path.write_text(json.dumps(run_trace(steps, optimizer.expected), separators=(",", ":")) + "\n")
    return steps


def _prediction(expected: Expectation) -> dict[str, Any]:
    """Seconds by the profile; those of an iteration hold for the compute that is estimated at start."""
    compute = expected.compute
    return {
        "update_seconds": expected.update_seconds,
        "iteration_seconds": None if compute is None else expected.settled(compute).iteration_seconds,
        "binding_lane": expected.binding_lane,
        "profile": expected.profile.name,
        "profile_source": f"{expected.profile.source}, {expected.profile.date}",
    }


def _open(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / RUN_FILE).open("a")
    except OSError as error:
        raise ValueError(f"--run-dir {folder} cannot be written ({error.strerror}): give another directory") from error


def _environment() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = None
    if torch.cuda.is_initialized():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "linux": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "packages": packages,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "backend": dist.get_backend() if dist.is_initialized() else None,
    }


def _memory() -> dict[str, int]:
    memory = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_initialized():
        memory["device"] = torch.cuda.memory_allocated()
        memory["device_peak"] = torch.cuda.max_memory_allocated()
    return memory


def _plain(config: TrainingConfig) -> dict[str, Any]:
    """Every setting by section; what is not a number, text or list becomes text."""
    sections = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            sections[field.name] = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return json.loads(json.dumps(sections, default=str, allow_nan=True))
