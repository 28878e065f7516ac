"""Times of the parts of a step, under Megatron's names: `--timing-log-level`, `--timing-log-option`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config

_LEVELS = {
    "forward-backward": 1,
    "forward-compute": 2,
    "backward-compute": 2,
    "batch-generator": 2,
    "forward-recv": 2,
    "forward-send": 2,
    "backward-recv": 2,
    "backward-send": 2,
    "forward-send-forward-recv": 2,
    "forward-send-backward-recv": 2,
    "backward-send-forward-recv": 2,
    "backward-send-backward-recv": 2,
    "forward-backward-send-forward-backward-recv": 2,
    "all-grads-sync": 1,
    "non-tensor-parallel-grads-all-reduce": 1,
    "embedding-grads-all-reduce": 1,
    "optimizer": 1,
}
"""Timers that megatron-core's schedules and `train_step` start, in the order in which they are shown."""

Times = dict[str, list[float]]
"""Seconds a step for each timer, one number a rank."""


class StepTimers:
    """megatron-core's timers of one run. At level 0 nothing is timed, since every boundary makes the device wait.

    The optimizer's time is that of the main thread and the device; the CPU's share of an update goes on behind it and
    shows as `offload wait` of the next step.
    """

    def __init__(self, level: int, chunks: list[DistributedDataParallel], device: torch.device) -> None:
        self._device, self._chunks = device, chunks
        self._names = [name for name, needed in _LEVELS.items() if needed <= level]
        self._timers = Timers(level, "all") if level else None
        if self._timers is not None:
            for name in self._names:
                self._timers(name, log_level=_LEVELS[name])
        self._watch(self._timers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time nothing inside: an evaluation is no part of a step."""
        self._watch(None)
        yield
        self._watch(self._timers)

    def _watch(self, timers: Timers | None) -> None:
        for chunk in self._chunks:
            get_model_config(chunk).timers = timers

    def take(self, num_steps: int) -> Times:
        """Return the times since the last call and start anew; parts that no rank saw are left out. Collective."""
        if self._timers is None:
            return {}
        here = torch.tensor([self._timers(name).elapsed() for name in self._names], device=self._device)
        ranks = [torch.empty_like(here) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, here)
        by_name = torch.stack(ranks, dim=1).tolist()
        return {
            name: [seconds / num_steps for seconds in times] for name, times in zip(self._names, by_name) if any(times)
        }


@contextmanager
def timed(model: DistributedDataParallel, name: str) -> Iterator[None]:
    """Time what is inside, where the model's run times that part."""
    timers: Any = get_model_config(model).timers
    timer = timers(name, log_level=_LEVELS[name]) if timers is not None else None
    if timer is not None:
        timer.start()
    yield
    if timer is not None:
        timer.stop()


def timer_lines(times: Times, option: Literal["max", "minmax", "all"]) -> list[str]:
    """Return Megatron's lines: milliseconds of a step as maximum, minimum and maximum, or one line a rank."""
    if not times:
        return []
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, seconds in times.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value * 1e3:.2f}" for rank, value in enumerate(seconds) if value > 0]
        return lines
    is_max = option == "max"
    lines = ["max time across ranks (ms):" if is_max else "(min, max) time across ranks (ms):"]
    for name, seconds in times.items():
        seen = [value * 1e3 for value in seconds if value > 0]
        text = f"{max(seen):.2f}" if is_max else f"({min(seen):.2f}, {max(seen):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
    return lines
