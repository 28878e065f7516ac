"""Machines on paper whose updates are simulated, so that an engine without a GPU follows what they measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from deep_offload.model.choose import Compute
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.machines import BUILT_IN_PROFILES
from deep_offload.optimizer import build, follow
from deep_offload.optimizer.engine import OffloadEngine

MACHINE = replace(BUILT_IN_PROFILES["h200"], fingerprint="a machine on paper", op_overhead_seconds=1e-9)
"""Without overheads, so that tiny subgroups have the proportions of large ones."""


def wrong(truth: HardwareProfile, cpu: float = 1.0, up: float = 1.0, down: float = 1.0) -> HardwareProfile:
    """The same machine, its lanes said to be so many times as fast."""
    values = {}
    for factor, prefix in ((cpu, "cpu_adam_"), (up, "h2d_"), (down, "d2h_")):
        for name in HardwareProfile.__slots__:
            if name.startswith(prefix):
                values[name] = factor * getattr(truth, name)
    return replace(truth, **values)


@contextlib.contextmanager
def paper_machine(truth: HardwareProfile, believed: HardwareProfile, *others: HardwareProfile) -> Iterator[None]:
    """Runs inside are placed by `believed`, and each update that ends is measured as `truth` would have run it.

    others: what other ranks' updates are measured as, in turn.
    """
    finished = OffloadEngine.finished_timeline

    def measured(self: OffloadEngine) -> Any:
        if finished(self) is None or self.expected is None:
            return None
        machines = truth, *others
        return replace(self.expected, profile=machines[dist.get_rank() % len(machines)]).timeline(Compute(0.0, 1e-9))

    with (
        mock.patch.object(build, "profile_for_run", lambda *_unused, **_named: believed),
        mock.patch.object(OffloadEngine, "finished_timeline", measured),
        mock.patch.object(follow, "SHORTEST_SECONDS", 0.0),
    ):
        yield


FEW_CPU = wrong(MACHINE, cpu=0.5, up=1.3, down=1.3)
"""A belief by which too little is left to the CPU."""


@contextlib.contextmanager
def one_rank_moves(_outcome: Any) -> Iterator[None]:
    """The first rank's updates contradict its rates, so that its share changes; the others' are as predicted."""
    # Two ranks, each with the bandwidth of host memory that a single one has, or they would stream everything.
    bandwidth = 2 * MACHINE.host_dram_bytes_per_s
    truth, believed = (replace(machine, host_dram_bytes_per_s=bandwidth) for machine in (MACHINE, FEW_CPU))
    with paper_machine(truth, believed, believed):
        yield
