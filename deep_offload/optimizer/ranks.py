"""What ranks tell each other as Python objects, and how they measure at the same time."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from deep_offload.runtime.measure import ALONE, Together

T = TypeVar("T")


def from_all_ranks(mine: T) -> list[T]:
    """What each rank gives here, by rank. A collective over all of them; without torch.distributed one is alone."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def all_ranks() -> Together:
    """All ranks of the job: those of a node share its memory, and one that measured alone would find it idle."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return Together(lambda mine: any(from_all_ranks(mine)), dist.barrier)
