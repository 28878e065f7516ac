"""How much state stays on the GPU where nobody says how much: first by estimate, then by the measured peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import FEW_SLOTS, Choice, choose_placement
from deep_offload.model.cost import StateFormat
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import device_state_bytes, slot_bytes
from deep_offload.model.run import ModelBytes
from deep_offload.plan.layout import ShardLayout
from deep_offload.plan.ops import Place, Placement
from deep_offload.plan.placement import with_residents

GPU_MEMORY_SHARE = 0.95
"""Part of a GPU's memory that a run may plan with: the rest is the CUDA context and what allocators lose."""

ESTIMATE_MARGIN = 1.1
"""What is estimated, and not counted, may turn out to be larger by this factor."""


def is_automatic(config: OffloadConfig) -> bool:
    """Whether the number of residents is for us to find: offload with neither a fraction nor a device budget given."""
    is_open = config.offload_resident_fraction == "auto" and config.offload_device_budget_gib is None
    return config.interleaved_offload and is_open


def working_bytes(model: ModelBytes) -> int:
    """The estimated part of a rank's GPU bytes: activations, and logits or the largest temporary tensors."""
    return model.activations + model.largest


def state_budget_bytes(free_bytes: int, total_bytes: int, estimated_bytes: int | None) -> int:
    """GPU bytes that state may take where no budget is given.

    free_bytes: not taken by weights, gradients or others; total_bytes: of the GPU; estimated_bytes: as `working_bytes`
    counts them, None: unknown, then there is no budget.
    """
    if estimated_bytes is None:
        return 0
    reserve = (1 - GPU_MEMORY_SHARE) * total_bytes
    return max(0, int(free_bytes - reserve - ESTIMATE_MARGIN * estimated_bytes))


def choose_with_residents(
    layout: ShardLayout,
    config: OffloadConfig,
    profile: HardwareProfile,
    state_budget: int,
    *,
    device_budget_bytes: int | None,
    spare_device_bytes: int | None = None,
    **rest: Any,
) -> Choice:
    """`choose_placement`, which also takes `rest`, with as many residents as fit where the number `is_automatic`.

    state_budget: bytes for residents and slots, 0: nothing is resident. device_budget_bytes: what holds for
    slots where nothing is resident, and for all where the number is given. spare_device_bytes: as `choose_placement`
    takes it; None: the state's budget, if there is one.
    """
    if not is_automatic(config):
        spare = spare_device_bytes if spare_device_bytes is not None else state_budget or None
        rest |= {"device_budget_bytes": device_budget_bytes, "spare_device_bytes": spare}
        return choose_placement(layout, config, profile, **rest)
    if state_budget:
        try:
            choice = choose_placement(layout, config, profile, device_budget_bytes=state_budget, **rest)
            if choice.resident_fraction > 0:
                return choice
        except ValueError:
            pass  # not even slots fit what the estimate leaves, and it may be too large; other faults come up again
    # Residents may follow: they are worth more than slots beyond the fewest.
    slots = FEW_SLOTS if config.offload_num_slots == "auto" else config.offload_num_slots
    nothing = replace(config, offload_resident_fraction=0.0, offload_num_slots=slots)
    return choose_placement(layout, nothing, profile, device_budget_bytes=device_budget_bytes, **rest)


def num_residents_that_fit(
    layout: ShardLayout, placement: Placement, state: StateFormat, num_slots: int, headroom_bytes: int
) -> int:
    """How many of the first subgroups may stay when so many more bytes of the GPU may be taken; never fewer than now.

    Slots that no streamed subgroup needs any more, and the upcast buffer, make room.
    """
    before = device_state_bytes(layout, placement, state, num_slots)
    slot = slot_bytes((s for s, place in zip(layout.subgroups, placement) if place is Place.GPU), state)
    present = sum(place is Place.RESIDENT for place in placement)
    for count in range(len(placement), present, -1):
        grown = with_residents(placement, count)
        after = device_state_bytes(layout, grown, state, num_slots)
        num_used = min(num_slots, sum(place is Place.GPU for place in grown))
        if after.resident + num_used * slot + after.upcast - before.total <= headroom_bytes:
            return count
    return present
