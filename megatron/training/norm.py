"""The norm of the local layers: LayerNorm or RMSNorm from torch that also works under sequence parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.Module):
    """Normalize the last dimension, [..., hidden_size]; kind, epsilon and zero-centered weights come from the config.

    Parameters: `weight` [hidden_size] and, for LayerNorm, `bias` [hidden_size]. With zero-centered weights the
    parameter is the difference from 1. Under sequence parallelism each tensor-parallel rank sees a part of the
    sequence: the parameters carry `sequence_parallel`, by which megatron-core sums their gradients over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"--normalization is {config.normalization}, allowed are LayerNorm and RMSNorm")
        self.shape = (hidden_size,)
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros(hidden_size) if self.zero_centered else torch.ones(hidden_size)
        self.weight = torch.nn.Parameter(start)
        has_bias = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if has_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized input, same shape and type."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
