"""What each rank of a pool does: build its part of a converted model, load it, and return logits and gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model

from deep_offload.optimizer.megatron_names import full_tensor, named_params
from megatron.training.config import ParallelConfig
from megatron.training.conversion.exporter import OurModel
from megatron.training.conversion.model_args import training_config
from megatron.training.conversion.parity import load_weights
from megatron.training.model import build_model
from megatron.training.train_step import sum_losses
from tests.rank_pool import use_layout


def logits_and_gradients(folder, tokens, tensor, pipeline):
    """Return (logits [batch, seq, rows] or None, gradients by our names in the whole model's shapes) on this rank.

    The loss is the mean over all next tokens. Ranks of the last stage have logits; padding is left out of both.
    """
    use_layout(tensor, pipeline)
    ours = OurModel(folder)
    parallel = ParallelConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    config = training_config(ours.model, ours.vocab_rows, parallel=parallel)
    chunks = build_model(config, torch.device("cpu"))
    load_weights(unwrap_model(chunks[0]), ours.folder)
    logits = _run(chunks, tokens, forward_only=True)
    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
    chunks[0].zero_grad_buffer()
    _run(chunks, tokens, forward_only=False)
    gradients = {}
    for named in named_params(chunks):
        full = full_tensor(named, named.param.main_grad, ours.vocab_rows)
        if not named.is_tied_copy:
            gradients[named.name] = full.clone()
    return _whole_vocabulary(logits, ours.vocab_rows), gradients


def _run(chunks, tokens, forward_only):
    def loss(output, non_loss_data=False):
        if non_loss_data:
            return output
        return sum_losses(torch.ones_like(output), output)

    def forward(data, model):
        batch = tokens if forward_only else tokens[:, :-1]
        positions = torch.arange(batch.size(1)).expand_as(batch)
        is_last = parallel_state.is_pipeline_last_stage()
        labels = tokens[:, 1:] if is_last and not forward_only else None
        return model(batch, positions, None, labels=labels), loss

    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=chunks[0],
        num_microbatches=1,
        seq_length=tokens.size(1) - (not forward_only),
        micro_batch_size=tokens.size(0),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results[0] if results else None


def _whole_vocabulary(logits, rows):
    if logits is None:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :rows]
