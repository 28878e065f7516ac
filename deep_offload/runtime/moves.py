"""State that changes its form in host memory because its subgroup moves between CPU and GPU; no bit of it changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_offload.kernels import reference
from deep_offload.plan.layout import MasterStorage
from deep_offload.plan.storage import MASTER
from deep_offload.runtime import convert
from deep_offload.runtime.state import HostState, StatePlan


def move_state(host: HostState, before: StatePlan, after: StatePlan, weights: Sequence[torch.Tensor]) -> None:
    """Keep every subgroup's state as its place in `after` does, which `host` must hold (`HostState.holds`).

    weights[i]: the parameters of subgroup i, [numel], rounded from its master. No lane may be at work.
    Raises torch.OutOfMemoryError, with nothing changed.
    """
    storages = {s.index: (before.storage(s), after.storage(s)) for s in before.layout.subgroups}
    changed = {i: pair for i, pair in storages.items() if pair[0] is not pair[1]}
    _rehearse([weights[i] for i in changed])
    for i, (old, new) in changed.items():
        match old, new:
            case MasterStorage.FULL, MasterStorage.SPLIT:
                _split(host.owned(i, MASTER), weights[i])
            case MasterStorage.SPLIT, MasterStorage.FULL:
                _join(host.owned(i, MASTER), weights[i])
            case MasterStorage.WEIGHT, MasterStorage.FULL:
                host.owned(i, MASTER).copy_(weights[i])
            case MasterStorage.FULL, MasterStorage.WEIGHT:
                pass  # the parameter is this master already
            case _:
                raise AssertionError(f"subgroup {i} cannot move from {old} to {new}")
    host.use(after)


def _split(master: torch.Tensor, weight: torch.Tensor) -> None:
    """The low halves to the start of a full master's bytes."""
    convert.split_into(master.view(torch.int16), master, weight.device)


def _join(master: torch.Tensor, weight: torch.Tensor) -> None:
    """The inverse of `_split`: from the end on, where the low halves of what is left lie in front."""
    low = master.view(torch.int16)
    for start, end in reversed(convert.pieces(master.numel(), convert.PIECE_NUMEL)):
        master[start:end].copy_(reference.merge_master(weight[start:end], low[start:end].to(weight.device)))


def _rehearse(weights: Sequence[torch.Tensor]) -> None:
    """Take the memory of one piece for a moment: what has no room fails before anything is changed."""
    if not weights:
        return
    largest = max(weights, key=lambda weight: weight.numel())[: convert.PIECE_NUMEL]
    low = reference.split_master(largest.float())[1]
    reference.merge_master(largest.to(torch.bfloat16), low)
