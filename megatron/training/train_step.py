"""One training step: micro-batches through the pipeline schedule, then the optimizer and the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.small_copies import Arriving, to_host
from megatron.training.batch import Batch, BatchShape, next_batch
from megatron.training.timers import timed

LOSS_NAME = "lm loss"
Losses = dict[str, float]
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports. `losses` is empty on ranks that are not on the last pipeline stage.

    grad_norm: before clipping; num_zeros: gradient elements that are 0, None unless asked for.
    """

    losses: Losses
    is_skipped: bool
    grad_norm: float
    num_zeros: int | None


class ForwardStep:
    """What megatron-core's schedules call for each micro-batch: read it, run the chunk, return the loss function."""

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device

    def __call__(
        self, data: Iterator[dict[str, torch.Tensor]] | None, model: DistributedDataParallel
    ) -> tuple[torch.Tensor, LossFunction]:
        """Return the chunk's output (losses fp32 [batch, seq] on the last stage) and how to reduce it."""
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        with timed(model, "batch-generator"):
            batch = next_batch(data, self.shape, self.device) if self.shape.is_needed(is_first, is_last) else Batch()
        labels = batch.labels if is_last else None
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=labels)
        return output, partial(sum_losses, batch.loss_mask)


def sum_losses(
    loss_mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the masked sum, the number of tokens in it, and both again [2] for the log.

    megatron-core divides the sum by the tokens of the micro-batch, or by those of the global batch with
    --calculate-per-token-loss.
    """
    assert loss_mask is not None, "the last stage reads the loss mask"
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum()
    report = torch.stack([total.detach(), num_tokens])
    return total, num_tokens.to(torch.int), {LOSS_NAME: report}


def connect(chunks: list[DistributedDataParallel], optimizer: DeepOffloadOptimizer) -> None:
    """Tell megatron-core's schedules how losses are scaled, when gradients synchronize and what finalizes them."""
    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    # Always, not only with --overlap-grad-reduce: the optimizer flushes gradients in the last micro-batch, which it
    # knows by this context having ended.
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """How the schedules cut a batch on this rank."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int


def run_schedule(
    forward: ForwardStep,
    data: list[Any],
    chunks: list[DistributedDataParallel],
    batches: MicroBatches,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    """Run all micro-batches of one global batch; returns the reports of `sum_losses` (last pipeline stage only)."""
    schedule = get_forward_backward_func()
    return schedule(
        forward_step_func=forward,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=batches.num_microbatches,
        seq_length=batches.seq_length,
        micro_batch_size=batches.micro_batch_size,
        forward_only=forward_only,
    )


def add_reports(reports: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return for each loss its sum and its tokens [2] over all micro-batches and data-parallel ranks, on the device."""
    if not reports:
        return {}
    totals = {}
    for name in reports[0]:
        total = torch.stack([report[name] for report in reports]).sum(dim=0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        totals[name] = total
    return totals


def mean(total: float, num_tokens: float) -> float:
    """Return the mean loss; 0 where every token was masked."""
    return total / num_tokens if num_tokens else 0.0


def mean_losses(names: Iterable[str], totals: Arriving) -> Losses:
    """Return the mean losses of totals [2] on their way from the device, in the order of `names`."""
    return {name: mean(*total.tolist()) for name, total in zip(names, totals.wait())}


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a forward and backward pass left behind, beside the gradients in DDP's buffers.

    reports: of `sum_losses`, on this rank; totals: of all micro-batches and data-parallel ranks, on the device.
    """

    reports: list[dict[str, torch.Tensor]]
    totals: dict[str, torch.Tensor]


def compute_gradients(
    forward: ForwardStep,
    data: list[Any],
    chunks: list[DistributedDataParallel],
    optimizer: DeepOffloadOptimizer,
    batches: MicroBatches,
) -> Gradients:
    """Do the first half of a step: final gradients in DDP's buffers, nothing updated."""
    optimizer.begin_step()  # it may still be reading gradients and writing parameters of the step before
    reports = run_schedule(forward, data, chunks, batches, forward_only=False)
    return Gradients(reports, add_reports(reports))


def apply_gradients(
    chunks: list[DistributedDataParallel], optimizer: DeepOffloadOptimizer, gradients: Gradients
) -> StepResult:
    """Do the second half of a step. One whose gradients are not finite is skipped."""
    # Losses travel to the host before the update is queued, or reading them would wait for the update.
    totals = to_host(list(gradients.totals.values()))
    with timed(chunks[0], "optimizer"):
        succeeded, grad_norm, num_zeros = optimizer.step()
    return StepResult(mean_losses(gradients.totals, totals), not succeeded, float(grad_norm), num_zeros)


def train_step(
    forward: ForwardStep,
    data: list[Any],
    chunks: list[DistributedDataParallel],
    optimizer: DeepOffloadOptimizer,
    batches: MicroBatches,
) -> StepResult:
    """Do one update. The learning rate is left to the caller, who advances it when the step was not skipped."""
    return apply_gradients(chunks, optimizer, compute_gradients(forward, data, chunks, optimizer, batches))
