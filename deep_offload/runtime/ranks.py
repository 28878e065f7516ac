"""What ranks tell each other, as Python objects."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def from_all_ranks(mine: T) -> list[T]:
    """What each rank gives here, by rank. A collective over all of them; without torch.distributed one is alone."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
