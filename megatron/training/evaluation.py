"""Loss on held-out data, without touching gradients or optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.small_copies import to_host
from megatron.training.train_step import ForwardStep, Losses, MicroBatches, add_reports, mean_losses, run_schedule


def evaluate(
    forward: ForwardStep,
    data: list[Any],
    chunks: list[DistributedDataParallel],
    optimizer: DeepOffloadOptimizer,
    batches: MicroBatches,
    num_iterations: int,
) -> Losses:
    """Return the mean losses over `num_iterations` global batches, weighted by tokens; empty off the last stage."""
    sums: dict[str, torch.Tensor] = {}
    with settled_parameters(chunks, optimizer), torch.no_grad():
        for _ in range(num_iterations):
            for name, total in add_reports(run_schedule(forward, data, chunks, batches, forward_only=True)).items():
                sums[name] = sums[name] + total if name in sums else total
    return mean_losses(sums, to_host(list(sums.values())))


@contextmanager
def settled_parameters(chunks: list[DistributedDataParallel], optimizer: DeepOffloadOptimizer) -> Iterator[None]:
    """Inside, all parameters are final on all ranks, dropout is off and no forward pass starts a gather."""
    optimizer.synchronize()
    gathering = [chunk for chunk in chunks if chunk.use_forward_hook]
    for chunk in gathering:
        chunk.disable_forward_pre_hook(param_sync=True)
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()
        for chunk in gathering:
            chunk.enable_forward_pre_hook()


def evaluation_lines(prefix: str, losses: Losses) -> list[str]:
    """Return Megatron's framed lines, such as ` validation loss at iteration 10 | lm loss value: 1.0E+00 | ...`."""
    text = f" validation loss at {prefix} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    frame = "-" * (len(text) + 1)
    return [frame, text, frame]


def perplexity(loss: float) -> float:
    """Return exp(loss), capped at exp(20) as in Megatron."""
    return math.exp(min(20.0, loss)) if not math.isnan(loss) else math.nan
