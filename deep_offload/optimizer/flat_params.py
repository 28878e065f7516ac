"""Separate parameters re-homed into flat buffers, one pair (weights, gradients) for each type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from deep_offload.optimizer.shards import Segment, Shard

PARAM_ALIGNMENT = 64
"""Parameters start at multiples of this many elements, so that kernels load whole vectors."""


@dataclass(frozen=True, slots=True)
class FlatParams:
    """shards: one for each type of parameter. where[p] = (shard, start) of parameter p; grad_views[p]: its gradient.

    is_sharded[p]: this rank holds a part of it (FSDP2); group: whose ranks hold the other parts, None without any.
    """

    shards: tuple[Shard, ...]
    where: tuple[tuple[int, int], ...]
    grad_views: tuple[torch.Tensor, ...]
    is_sharded: tuple[bool, ...]
    group: dist.ProcessGroup | None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter or gradient on this rank: itself, or a sharded one's own tensor (no copy)."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flatten_params(params: Sequence[torch.nn.Parameter]) -> FlatParams:
    """Move the parameters into flat buffers; each `p.data` becomes a view there. Shapes and values stay.

    The storage of sharded parameters belongs to FSDP: it stays where it is, and the flat buffer holds a copy.
    Parameters are laid out in backward order, so that gradients become final from the start of the buffer on.
    """
    shards: list[Shard] = []
    where: dict[int, tuple[int, int]] = {}
    grad_views: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for p in params):
        members = [number for number, p in enumerate(params) if p.dtype == dtype][::-1]
        starts, total = _starts([local(params[number]).numel() for number in members])
        weights = torch.zeros(total, dtype=dtype, device=params[0].device)
        grads = torch.zeros_like(weights)
        segments = []
        for number, start in zip(members, starts, strict=True):
            param = local(params[number])
            end = start + param.numel()
            view = weights[start:end].view(param.shape)
            view.copy_(param.detach())
            if param is params[number]:
                param.data = view
            where[number] = (len(shards), start)
            # .data gives the view a version counter of its own: edits by the user then show in it, ours do not
            grad_views[number] = grads[start:end].view(param.shape).data
            if end > start:
                segments.append(Segment(start, end, number))
        shards.append(Shard(weights, grads, tuple(segments)))
    order = range(len(params))
    return FlatParams(
        tuple(shards),
        tuple(where[n] for n in order),
        tuple(grad_views[n] for n in order),
        tuple(isinstance(p, DTensor) for p in params),
        _group(params),
    )


def _group(params: Sequence[torch.nn.Parameter]) -> dist.ProcessGroup | None:
    """The group over which parameters are sharded. Raises ValueError unless it is one, each sharded along one axis."""
    meshes = []
    for p in params:
        if not isinstance(p, DTensor):
            continue
        if p.device_mesh.ndim != 1 or not isinstance(p.placements[0], ShardPlacement):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is placed as {p.placements} on a mesh of "
                f"{p.device_mesh.ndim} dimensions, only parameters sharded over a mesh of one dimension are updated: "
                "call fully_shard with such a mesh"
            )
        if p.device_mesh not in meshes:
            meshes.append(p.device_mesh)
    if len(meshes) > 1:
        raise ValueError(f"parameters are sharded over {len(meshes)} meshes, use one for all")
    return meshes[0].get_group() if meshes else None


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    starts, position = [], 0
    for size in sizes:
        starts.append(position)
        position += -(-size // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
    return starts, position
