"""Attention of the local layers over torch's scaled_dot_product_attention.

megatron-core's own DotProductAttention keeps [seq, seq] probabilities for the backward pass: at sequence 2048 and
32 heads 768 MiB a layer. The fused kernels keep the inputs, the output and one number per row.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SDPAttention(MegatronModule):
    """`core_attention` of the local layer spec: causal, grouped heads without a copy, an optional window.

    Inputs: query [seq, batch, heads, width], key and value [seq, batch, groups, width], of this tensor-parallel rank.
    Returns [seq, batch, heads x width].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: object,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism is refused by the arguments"
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.window = config.window_size
        # Scores are scaled by 1 / layer number and multiplied by it again in the fp32 softmax: nothing remains of
        # apply_query_key_layer_scaling here, because the fused kernels keep scores in fp32.

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> torch.Tensor:
        """Attend. attention_mask: bool [batch or 1, 1, seq, seq], True hides a position; None is plain causal."""
        assert attention_bias is None and packed_seq_params is None
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [batch, heads, seq, width]
        visible = None if attention_mask is None else ~attention_mask
        # A window that shows the whole sequence needs no mask, and the fastest kernels know none.
        if self.window is not None and 0 <= self.window[0] < query.size(0) - 1:
            near = _window(query.size(0), self.window, query.device)
            visible = near if visible is None else visible & near
        grouped = q.size(1) != k.size(1)
        if grouped and query.is_cuda and (visible is not None or query.dtype == torch.float32):
            # The only fused CUDA kernel for masks and fp32 knows no groups; torch would fall back to [seq, seq] scores.
            repeat = q.size(1) // k.size(1)
            k, v, grouped = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1), False
        dropout = self.dropout if self.training else 0.0
        # Heads differ between tensor-parallel ranks, so must their dropout; under sequence parallelism the whole
        # block already runs inside the fork.
        forks = dropout > 0.0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, visible, dropout, is_causal=visible is None, scale=self.scale, enable_gqa=grouped
            )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def causal_mask(seq_length: int, device: torch.device) -> torch.Tensor:
    """Return bool [seq, seq], True where a column lies after its row."""
    return torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu(1)


def _window(seq_length: int, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return bool [seq, seq], True at most window[0] tokens back and never ahead."""
    visible = ~causal_mask(seq_length, device)
    if window[0] >= 0:
        visible = visible.triu(-window[0])
    return visible
