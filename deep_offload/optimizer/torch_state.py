"""State dicts for `InterleavedAdamW`: whether one can be loaded, and whether weights are still those it came with."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch

from deep_offload.optimizer.flat_params import local
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER

_PIECE_NUMEL = 1 << 24

NOT_TAKEN_OVER = frozenset(
    ("params", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
)
"""Keys of a saved group that stay out: its numbering, and options of torch's Adam that have no meaning here."""


def check_loadable(
    state_dict: dict[str, Any], groups: Sequence[dict[str, Any]], trained: Collection[torch.nn.Parameter]
) -> None:
    """Raises ValueError, one sentence, unless the state is that of AdamW over these parameters on this rank.

    trained: those of the groups that have state.
    """
    saved_groups = state_dict["param_groups"]
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"the state has groups of {[len(g['params']) for g in saved_groups]} parameters, this optimizer's hold "
            f"{[len(g['params']) for g in groups]}: build it over the same parameters"
        )
    for group, saved_group in zip(groups, saved_groups, strict=True):
        _check_options(saved_group)
        for p, number in zip(group["params"], saved_group["params"], strict=True):
            if p in trained and number in state_dict["state"]:
                _check_param(number, state_dict["state"][number], local(p).shape)


def _check_options(group: dict[str, Any]) -> None:
    unknown = [name for name in ("amsgrad", "maximize") if group.get(name)]
    if unknown:
        raise ValueError(f"the state was made with {unknown[0]}=True, which is not computed here: train without it")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ValueError(
            f"the state is of Adam with weight_decay {group['weight_decay']} added to gradients, here it is decoupled "
            "as in AdamW: set the group's weight_decay to 0 or its decoupled_weight_decay to True"
        )


def _check_param(number: int, saved: dict[str, Any], shape: torch.Size) -> None:
    missing = [name for name in ("step", EXP_AVG, EXP_AVG_SQ) if name not in saved]
    if missing:
        raise ValueError(
            f"the state of parameter {number} lacks {', '.join(missing)}: give that of InterleavedAdamW or of "
            "torch.optim.AdamW"
        )
    for name in (MASTER, EXP_AVG, EXP_AVG_SQ):
        if name in saved and local(saved[name]).shape != shape:
            raise ValueError(
                f"{name} of parameter {number} has shape {tuple(local(saved[name]).shape)} in the state and "
                f"{tuple(shape)} on this rank: load the state of the same model, saved by as many ranks"
            )


def fingerprint(values: torch.Tensor) -> bytes:
    """A digest of the bits, by which a change is seen."""
    found, bits = hashlib.blake2b(digest_size=16), values.detach().reshape(-1).view(torch.uint8)
    for piece in bits.split(_PIECE_NUMEL):
        found.update(piece.cpu().numpy())
    return found.digest()
