"""Why and when a run ends early, when garbage is collected, and which steps are profiled."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from megatron.training.config import LifecycleConfig
from megatron.training.votes import highest

STARTED = time.monotonic()
"""When this process began, but for its imports: --exit-duration-in-mins counts building and loading, too."""


def end_process_after(seconds: float) -> threading.Timer:
    """End the process with code 1 if it is still there after `seconds`; the timer returned can be cancelled.

    For the way out of a failed run, which may wait for ranks and events that never come. torchrun then ends the others.
    """
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()
    return timer


class StopWatch:
    """Tells all ranks at the same iteration that the run should end, and why."""

    def __init__(self, config: LifecycleConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._signal_seen = 0
        self._previous: dict[int, Any] = {}
        if config.exit_signal_handler:
            # SIGUSR1 too: SLURM sends it ahead of a time limit (--signal=USR1@600).
            for number in {signal.Signals[config.exit_signal], signal.SIGUSR1}:
                self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal_seen = number

    def reason(self, iteration: int) -> str | None:
        """Return why the run should end after `iteration`, None to go on. Collective where ranks may disagree."""
        config = self._config
        if config.exit_signal_handler and (number := highest(self._signal_seen, self._device)):
            return f"{signal.Signals(number).name} was received"
        if config.exit_duration_in_mins is not None:
            minutes = (time.monotonic() - STARTED) / 60.0
            if highest(int(minutes > config.exit_duration_in_mins), self._device):
                return f"--exit-duration-in-mins {config.exit_duration_in_mins} is over"
        if config.exit_interval is not None and iteration % config.exit_interval == 0:
            return f"iteration {iteration} is a multiple of --exit-interval {config.exit_interval}"
        return None

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


class GarbageCollection:
    """Keeps Python's garbage collection from stopping steps: a full one takes 0.2 s over all that a run begins with.

    With --manual-gc Python collects at fixed steps only, so that ranks do not wait for each other's pauses.
    """

    def __init__(self, config: LifecycleConfig) -> None:
        self._interval = config.manual_gc_interval if config.manual_gc else 0
        self._around_evaluations = config.manual_gc and config.manual_gc_eval
        self._turned_off = config.manual_gc
        self._has_frozen = False
        if config.manual_gc:
            gc.disable()

    def before_training(self) -> None:
        """Leave what there is now, which stays, out of all collections to come."""
        gc.collect()
        gc.freeze()
        self._has_frozen = True

    def after_step(self, iteration: int) -> None:
        """Collect if it is time."""
        if self._interval and iteration % self._interval == 0:
            gc.collect()

    def around_evaluation(self) -> None:
        """Collect before and after an evaluation, which leaves the most behind."""
        if self._around_evaluations:
            gc.collect()

    def close(self) -> None:
        """Give collection back to Python."""
        if self._has_frozen:
            gc.unfreeze()
        if self._turned_off:
            gc.enable()


class Profiling:
    """A PyTorch profile of the steps [profile_step_start, profile_step_end), as a Chrome trace in `folder`."""

    def __init__(self, config: LifecycleConfig, rank: int, folder: str) -> None:
        self._is_on = config.profile and rank in config.profile_ranks
        self._start, self._end = config.profile_step_start, config.profile_step_end
        self._path = os.path.join(folder, f"profile_rank{rank}_steps{self._start}-{self._end}.json")
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, iteration: int) -> None:
        """Start before step `iteration` (the first is 1) where it is the first to profile."""
        if self._is_on and iteration == self._start:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """Stop after the last step to profile."""
        if self._profiler is not None and iteration >= self._end - 1:
            self.close()

    def close(self) -> None:
        """Write the trace of what was profiled."""
        if self._profiler is not None:
            self._profiler.stop()
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._profiler.export_chrome_trace(self._path)
            self._profiler = None
