"""The GPT-NeoX block: attention and MLP read the same input, and both are added to it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer


class ParallelResidualLayer(TransformerLayer):
    """x + attention(norm1(x)) + mlp(norm2(x)), where megatron-core's layer gives the MLP the sum with the attention.

    Same submodules and names as its base class, so checkpoints and optimizers see no difference.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the block's output [seq, batch, hidden] and the context, which a decoder has not."""
        kwargs.pop("dynamic_inference_decode_only", None)
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        with_attention, context = self._forward_attention(*args, **kwargs)
        normed = self._forward_pre_mlp_layernorm(hidden_states)
        if self.recompute_mlp:
            output_with_bias = tensor_parallel.checkpoint(self.mlp, False, normed)
        else:
            output_with_bias = self.mlp(normed)
        return self._forward_post_mlp(output_with_bias, with_attention), context
