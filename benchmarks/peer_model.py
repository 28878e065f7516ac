"""A GPT in plain torch, for systems that bring no model of their own; same shape as pretrain_gpt.py's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.shapes import Shape


class Layer(nn.Module):
    """Pre-norm transformer layer with biases and tanh GELU; [batch, seq, hidden] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, shape.ffn_hidden_size)
        self.mlp_out = nn.Linear(shape.ffn_hidden_size, hidden)

    def forward(self, stream: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(stream)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(attended.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.mlp_in(self.mlp_norm(stream)), approximate="tanh")
        return stream + self.mlp_out(wide)


class PlainGPT(nn.Module):
    """Token ids [batch, seq] to the mean loss of the next token (fp32 scalar). Backward recomputes every layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.LayerNorm(shape.hidden_size)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = checkpoint(layer, stream, use_reentrant=False)
        logits = self.output(self.final_norm(stream))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_plain(shape: Shape, device: torch.device, dtype: torch.dtype) -> PlainGPT:
    """Return the model on `device` in `dtype`, the same weights at every call. Raises ValueError for other shapes."""
    if not shape.is_plain:
        raise ValueError("the plain model has LayerNorm, biases and no positions: choose a shape that is plain")
    torch.manual_seed(1234)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return PlainGPT(shape)
    finally:
        torch.set_default_dtype(default)
