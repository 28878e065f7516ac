"""Model chunks and settings to an optimizer: the one function that the training layer calls."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import get_tensor_model_parallel_world_size

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import is_share_free
from deep_offload.model.residency import is_automatic
from deep_offload.model.run import RunShape
from deep_offload.optimizer.build import build_engine
from deep_offload.optimizer.follow import PlacementFollower
from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.megatron_buffers import late_params, map_buffers
from deep_offload.optimizer.ranks import all_ranks, from_all_ranks
from deep_offload.optimizer.residency import ResidentGrowth, memory_reader
from deep_offload.plan.ops import Place
from deep_offload.runtime.limits import fair_cores, ranks_on_this_node

NoDecay = Callable[[str, torch.nn.Parameter], bool]


def has_no_weight_decay(name: str, param: torch.nn.Parameter) -> bool:
    """Megatron's default: biases and one-dimensional parameters (norms) are not decayed."""
    return name.endswith(".bias") or param.dim() == 1


def build_optimizer(
    model_chunks: Sequence[DistributedDataParallel],
    optimizer_config: OptimizerConfig,
    offload: OffloadConfig,
    *,
    no_weight_decay: NoDecay = has_no_weight_decay,
    decoupled_lr: float | None = None,
    decoupled_min_lr: float | None = None,
    log: Callable[[str], None] = print,
    estimated_bytes: int | None = None,
    run: RunShape | None = None,
    is_peak_early: bool = True,
) -> DeepOffloadOptimizer:
    """Adam over the chunks' DDP buffers, placed as `offload` says; without offload all state stays on the GPU.

    estimated_bytes: what training takes of the GPU beside weights, gradients and state; needed where the number of
    residents is left to us, else nothing is resident then. run: what is trained, to estimate the compute around the
    update. is_peak_early: the first steps take as much of the GPU as
    any later one, so that their peak may decide about further residents.
    Raises ValueError, one sentence, when the optimizer is not Adam or state does not fit.
    """
    if optimizer_config.optimizer != "adam":
        raise ValueError(
            f"--optimizer {optimizer_config.optimizer} is not supported, this engine updates with adam only"
        )
    groups = build_param_groups(model_chunks, optimizer_config, no_weight_decay, decoupled_lr, decoupled_min_lr)
    buffers = map_buffers(model_chunks)
    cores, ranks = _place_on_node()
    with torch.no_grad():
        engine, lines = build_engine(
            [b.shard for b in buffers.shards],
            offload,
            warn=warnings.warn,
            log=log,
            late_params=late_params(model_chunks, buffers),
            cores=cores,
            ranks=ranks,
            together=all_ranks(),
            estimated_bytes=estimated_bytes,
            may_move=True,
            run=run,
        )
    offloads = any(place is not Place.RESIDENT for place in engine.settings.placement)
    lines += hardware_queue_warning(engine.device.type, offloads, get_tensor_model_parallel_world_size())
    may_grow = is_automatic(offload) and estimated_bytes is not None and is_peak_early
    read = memory_reader(engine.device) if may_grow else None
    growth = None if read is None else ResidentGrowth(engine, read, log)
    verify = offload.offload_verify_interval
    follower = PlacementFollower(engine, log, may_move=is_share_free(offload))
    changes = verify, growth, follower
    return DeepOffloadOptimizer(optimizer_config, model_chunks, groups, buffers, engine, lines, *changes)


def _place_on_node() -> tuple[float, int]:
    """This rank's share of the node's cores, by what each rank of the node may run on, and the number of these ranks.

    A collective over all ranks: not every launcher says how many a node has.
    """
    mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
    here = [cores for host, cores in from_all_ranks(mine) if host == mine[0]]
    return fair_cores(mine[1], here), max(len(here), ranks_on_this_node())


def hardware_queue_warning(device_type: str, offloads: bool, num_tensor_ranks: int) -> list[str]:
    """What Megatron's scripts set for tensor parallelism, and what it costs where there is none: a line, or none."""
    is_narrow = device_type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if not (is_narrow and offloads and num_tensor_ranks == 1):
        return []
    return [
        "warning: CUDA_DEVICE_MAX_CONNECTIONS=1 leaves copies and compute one hardware queue, and an iteration of 3.48 "
        "B parameters took 1.08 times as long with it in a run on an H200 (docs/performance.md): unset it, only tensor "
        "parallelism uses it"
    ]


def build_param_groups(
    chunks: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    no_weight_decay: NoDecay,
    decoupled_lr: float | None,
    decoupled_min_lr: float | None,
) -> list[dict[str, Any]]:
    """Groups by weight decay and decoupled learning rate; the same groups in the same order on every rank, even if
    empty."""
    has_decoupled = decoupled_lr is not None
    keys = [
        (decay, decoupled) for decoupled in ((False, True) if has_decoupled else (False,)) for decay in (True, False)
    ]
    members: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {key: [] for key in keys}
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                is_decoupled = has_decoupled and bool(getattr(param, "is_embedding_or_output_parameter", False))
                members[not no_weight_decay(name, param), is_decoupled].append(param)
    groups = []
    for decay, is_decoupled in keys:
        max_lr = decoupled_lr if is_decoupled else config.lr
        min_lr = config.min_lr if not is_decoupled or decoupled_min_lr is None else decoupled_min_lr
        groups.append(
            {
                "params": members[decay, is_decoupled],
                "wd_mult": 1.0 if decay else 0.0,
                "lr_mult": 1.0,
                "is_expert_parallel": False,
                "is_decoupled_lr": is_decoupled,
                "default_config": not is_decoupled,
                "max_lr": max_lr,
                "min_lr": min_lr,
                "lr": max_lr,
                # the learning rate scheduler sets this at each step; without one, norms must still not be decayed
                "weight_decay": config.weight_decay * (1.0 if decay else 0.0),
            }
        )
    return groups
