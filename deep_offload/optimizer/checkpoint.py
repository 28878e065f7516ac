"""Optimizer state for megatron-core's distributed checkpoints, by parameter name: loads under any other layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER

CHECKPOINT_KEYS = {MASTER: "param", EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}
"""Our names of states, and those that megatron-core's fully reshardable distributed optimizer writes."""

SHARDING_TYPE = "fully_reshardable"


def sharded_param_state(
    model_sharded_state_dict: dict[str, Any],
    params: tuple[torch.nn.Parameter, ...],
    read: Callable[[int, str], torch.Tensor] | None,
) -> dict[int, dict[str, Any]]:
    """Sharded tensors `optimizer.state.{param,exp_avg,exp_avg_sq}.<model key>` of every parameter on this rank.

    model_sharded_state_dict: the model's, made with keep_vars so that its data are the parameters themselves.
    read(number, name): the fp32 state of a parameter in its shape; None when loading, which asks for empty tensors.
    """
    metadata = {
        id(entry.data): entry
        for entry in nested_values(model_sharded_state_dict)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[int, dict[str, Any]] = {}
    for number, param in enumerate(params):
        if id(param) not in metadata:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not in the model's sharded state dict: make it with "
                "sharded_state_dict() of the unwrapped model, which keeps parameters"
            )
        entry = metadata[id(param)]
        state[number] = {}
        for name, key in CHECKPOINT_KEYS.items():
            data = torch.empty(param.shape, dtype=torch.float32) if read is None else read(number, name)
            changes: dict[str, Any] = {"key": f"optimizer.state.{key}.{entry.key}", "data": data}
            if isinstance(entry, ShardedTensor):
                changes["dtype"] = torch.float32
            state[number][key] = replace(entry, **changes)
    return state
