"""Separate parameters re-homed into flat buffers, one pair (weights, gradients) for each type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deep_offload.optimizer.engine import Segment, Shard

PARAM_ALIGNMENT = 64
"""Parameters start at multiples of this many elements, so that kernels load whole vectors."""


@dataclass(frozen=True, slots=True)
class FlatParams:
    """shards: one for each type of parameter. where[p] = (shard, start) of parameter p; grad_views[p]: its gradient."""

    shards: tuple[Shard, ...]
    where: tuple[tuple[int, int], ...]
    grad_views: tuple[torch.Tensor, ...]


def flatten_params(params: Sequence[torch.nn.Parameter]) -> FlatParams:
    """Move the parameters into flat buffers; each `p.data` becomes a view there. Shapes and values stay.

    Parameters are laid out in backward order, so that gradients become final from the start of the buffer on.
    """
    shards: list[Shard] = []
    where: dict[int, tuple[int, int]] = {}
    grad_views: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for p in params):
        members = [number for number, p in enumerate(params) if p.dtype == dtype][::-1]
        starts, total = _starts([params[number].numel() for number in members])
        weights = torch.zeros(total, dtype=dtype, device=params[0].device)
        grads = torch.zeros_like(weights)
        segments = []
        for number, start in zip(members, starts, strict=True):
            param = params[number]
            end = start + param.numel()
            view = weights[start:end].view(param.shape)
            view.copy_(param.detach())
            param.data = view
            where[number] = (len(shards), start)
            # .data gives the view a version counter of its own: edits by the user then show in it, ours do not
            grad_views[number] = grads[start:end].view(param.shape).data
            if end > start:
                segments.append(Segment(start, end, number))
        shards.append(Shard(weights, grads, tuple(segments)))
    order = range(len(params))
    return FlatParams(tuple(shards), tuple(where[n] for n in order), tuple(grad_views[n] for n in order))


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, position = [], 0
    for size in sizes:
        starts.append(position)
        position += -(-size // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
    return starts, position
