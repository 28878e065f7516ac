"""Residents whose number nobody gave: what the GPU has free, and who else may stay after the first measured peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deep_offload.model.choose import Choice, assumed_compute
from deep_offload.model.cost import op_seconds
from deep_offload.model.memory import format_bytes
from deep_offload.model.residency import GPU_MEMORY_SHARE, num_residents_that_fit
from deep_offload.model.trace import Expectation
from deep_offload.optimizer.engine import OffloadEngine
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Place, Placement

NUM_STEPS = 3
"""Steps of a start whose peak counts: the first ones also hold what libraries allocate once."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One reading of a GPU. free, total: of the device; reserved, allocated, peak: of this process's allocator.

    peak: the most that was allocated at once since it was last reset.
    """

    free: int
    total: int
    reserved: int
    allocated: int
    peak: int

    @property
    def available(self) -> int:
        """Bytes that this process may still allocate: free ones, and those that its allocator keeps for itself."""
        return self.free + self.reserved - self.allocated

    @property
    def headroom(self) -> int:
        """Bytes that stay free even at the peak, but for the part of the GPU that no run plans with."""
        others = self.total - self.free - self.reserved
        return int(GPU_MEMORY_SHARE * self.total) - others - self.peak


MemoryReader = Callable[[], GpuMemory]


def memory_reader(device: torch.device) -> MemoryReader | None:
    """What reads the memory of a GPU; None for other devices, whose memory is the host's."""
    if device.type != "cuda":
        return None

    def read() -> GpuMemory:
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return GpuMemory(free, total, reserved, allocated, torch.cuda.max_memory_allocated(device))

    return read


def start_with_room(
    choice: Choice,
    choose: Callable[[int], Choice],
    start: Callable[[Choice], OffloadEngine],
    log: Callable[[str], None],
) -> tuple[OffloadEngine, Choice]:
    """Start an engine whose residents nobody asked for; where they find no room, choose and start with half of them.

    choose: takes bytes that state may take; start: raises torch.OutOfMemoryError, and then holds nothing any more.
    """
    wanted = device = choice.device_bytes
    while (engine := _started(choice, start)) is None:
        # The allocator may still hold what was given back, in pieces that are too small.
        torch.cuda.empty_cache()
        choice = choose(device.total - -(-device.resident // 2))
        device = choice.device_bytes
    if device != wanted:
        log(
            f"{format_bytes(wanted.resident)} of optimizer state were to stay on the GPU, but it has no memory for "
            f"them: {format_bytes(device.resident)} stay"
        )
    return engine, choice


def _started(choice: Choice, start: Callable[[Choice], OffloadEngine]) -> OffloadEngine | None:
    try:
        return start(choice)
    except torch.OutOfMemoryError:
        if not choice.device_bytes.resident:
            raise
        return None  # leaving the handler drops the traceback, whose frames hold what was allocated


class ResidentGrowth:
    """Lets as many further subgroups stay on the GPU, once, as the measured peak of the first steps leaves room for.

    Between iterations: `if is_due: synchronize, then grow`. Each rank decides for itself: no bit depends on it.
    """

    def __init__(self, engine: OffloadEngine, read: MemoryReader, log: Callable[[str], None]) -> None:
        self._engine = engine
        self._read = read
        self._log = log
        self._steps_left = NUM_STEPS
        self._is_open = True

    def count_step(self) -> None:
        """A step has ended, updated or skipped."""
        self._steps_left -= 1

    @property
    def is_due(self) -> bool:
        """Whether the next `grow` decides."""
        return self._is_open and self._steps_left <= 0

    def grow(self) -> list[str]:
        """Decide and do it; returns the lines that describe the new placement, none if all stays as it is."""
        self._is_open = False
        engine, expected, placement = self._engine, self._engine.expected, self._engine.settings.placement
        if expected is None or all(place is Place.RESIDENT for place in placement):
            return []
        memory = self._read()
        num_slots = engine.settings.num_slots
        present = sum(place is Place.RESIDENT for place in placement)
        fitting = num_residents_that_fit(engine.layout, placement, expected.state, num_slots, memory.headroom)
        if fitting == present:
            return []
        more = f"{fitting - present} more of {len(placement)} subgroups"
        try:
            engine.keep_resident(fitting)
        except torch.OutOfMemoryError:
            self._log(f"{more} were to stay on the GPU, but it has no memory for them: the placement stays as it is")
            return []
        engine.expected = expectation(expected, engine)
        line = (
            f"placement changed after {NUM_STEPS} steps: {more} stay on the GPU, {fitting} in all, because "
            f"{format_bytes(memory.headroom)} of its memory were free at the peak; predicted update: "
            f"{engine.expected.update_seconds * 1e3:.1f} ms, bound by {engine.expected.binding_lane}"
        )
        self._log(line)
        return [placement_line(engine.layout, engine.settings.placement), line]


def expectation(before: Expectation, engine: OffloadEngine) -> Expectation:
    """The same rates, for the engine's placement as it is now."""
    new = replace(before, plan=engine.plan)
    compute = before.compute or assumed_compute(new.layout, op_seconds(new.layout, new.state, new.profile))
    timeline = new.timeline(compute)
    return replace(new, update_seconds=timeline.in_place_seconds, binding_lane=new.share_of_bound(timeline)[1])


def placement_line(layout: ShardLayout, placement: Placement) -> str:
    """How many subgroups are where."""
    counts = {place: sum(p is place for p in placement) for place in Place}
    return (
        f"optimizer state: {layout.numel:,} parameters in {len(layout.subgroups)} subgroups of up to "
        f"{layout.max_subgroup_numel:,}: {counts[Place.RESIDENT]} resident on the GPU, {counts[Place.GPU]} streamed to "
        f"it, {counts[Place.CPU]} updated by the CPU"
    )
