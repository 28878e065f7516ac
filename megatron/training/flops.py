"""Floating point operations of a step, for TFLOP/s per GPU. Standard library only."""

from __future__ import annotations

from megatron.training.config import ModelConfig


def flops_per_step(model: ModelConfig, padded_vocab_size: int, num_samples: int) -> float:
    """Return the operations of forward and backward on `num_samples` samples, recomputation not counted.

    A matrix product of m x k and k x n counts 2mkn; the backward pass costs two products for each one of the forward
    pass. Attention counts the half of the scores that is not masked, as Megatron does.
    """
    seq, hidden = model.seq_length, model.hidden_size
    queries = model.num_attention_heads * model.kv_channels
    keys_and_values = 2 * model.num_query_groups * model.kv_channels
    projections = hidden * (queries + keys_and_values) + queries * hidden
    scores_and_values = 2 * queries * seq / 2
    mlp = (3 if model.swiglu else 2) * hidden * model.ffn_hidden_size
    logits = hidden * padded_vocab_size
    multiply_adds_per_token = model.num_layers * (projections + scores_and_values + mlp) + logits
    return 3.0 * 2.0 * multiply_adds_per_token * seq * num_samples
