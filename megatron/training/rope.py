"""Rotary frequencies of Llama 3.1 and later: all four values of its scaling, of which megatron-core takes one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """factor: how much longer the longest wavelengths become. The other three say which those are, in tokens.

    Wavelengths below original_max_positions / high_freq_factor stay, those above original_max_positions /
    low_freq_factor are multiplied by the factor, and between the two the frequency is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def apply(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Return the scaled frequencies, radians per token, for unscaled fp32 ones of any shape."""
        turns = self.original_max_positions * inv_freq / (2 * math.pi)  # over the original context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - share) * inv_freq / self.factor + share * inv_freq
        scaled = torch.where(turns < self.low_freq_factor, inv_freq / self.factor, blended)
        return torch.where(turns > self.high_freq_factor, inv_freq, scaled)


def scale_rotary(rotary: RotaryEmbedding, scaling: Llama3Scaling) -> None:
    """Scale an embedding that was built without scaling, once, before its first use."""
    rotary.inv_freq = scaling.apply(rotary.inv_freq)
