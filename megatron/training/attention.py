"""Attention of the local layers over torch's scaled_dot_product_attention.

megatron-core's own DotProductAttention keeps [seq, seq] probabilities for the backward pass: at sequence 2048 and
32 heads 768 MiB a layer. The fused kernels keep the inputs, the output and one number per row. Windows and documents on
long sequences go through flex_attention (flex.py), which skips what is hidden; elsewhere through a mask.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.flex_attention import BlockMask

from megatron.training import flex


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
        """Attend. attention_mask: bool [batch or 1, 1, seq, seq], True hides a position; None is plain causal.

        Each row sees an unbroken run of positions that ends at itself.
        """
        assert attention_bias is None and packed_seq_params is None
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [batch, heads, seq, width]
        # A window that shows the whole sequence needs no mask, and the fastest kernels know none.
        cuts = self.window is not None and 0 <= self.window[0] < query.size(0) - 1
        window = self.window if cuts else None
        dropout = self.dropout if self.training else 0.0
        out = None
        if (window is not None or attention_mask is not None) and flex.is_usable(q, dropout):
            out = flex.attend(q, k, v, _blocks(query.size(0), window, attention_mask, query.device), self.scale)
        if out is None:
            out = self._attend_with_mask(q, k, v, window, attention_mask, dropout)
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _attend_with_mask(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: tuple[int, int] | None,
        attention_mask: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        visible = None if attention_mask is None else ~attention_mask
        if window is not None:
            near = _window(q.size(2), window, q.device)
            visible = near if visible is None else visible & near
        grouped = q.size(1) != k.size(1)
        if grouped and q.is_cuda and (visible is not None or q.dtype == torch.float32):
            # The only fused CUDA kernel for masks and fp32 knows no groups; torch would fall back to [seq, seq] scores.
            repeat = q.size(1) // k.size(1)
            k, v, grouped = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1), False
        # Heads differ between tensor-parallel ranks, so must their dropout; under sequence parallelism the whole
        # block already runs inside the fork.
        forks = dropout > 0.0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, v, visible, dropout, is_causal=visible is None, scale=self.scale, enable_gqa=grouped
            )


def _blocks(
    seq_length: int, window: tuple[int, int] | None, attention_mask: torch.Tensor | None, device: torch.device
) -> BlockMask:
    back = None if window is None else window[0]
    if attention_mask is not None:
        return flex.document_blocks.get(attention_mask, back)
    assert back is not None
    return flex.window_blocks(seq_length, back, device)


def causal_mask(seq_length: int, device: torch.device) -> torch.Tensor:
    """Return bool [seq, seq], True where a column lies after its row."""
    return torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu(1)


def _window(seq_length: int, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return bool [seq, seq], True at most window[0] tokens back and never ahead."""
    visible = ~causal_mask(seq_length, device)
    if window[0] >= 0:
        visible = visible.triu(-window[0])
    return visible
