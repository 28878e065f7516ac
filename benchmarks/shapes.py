"""The models that the benchmarks train. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

_PLAIN = "--position-embedding-type none --untie-embeddings-and-output-weights"
_PUBLISHED = (
    "--position-embedding-type rope --group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT. flags: what else pretrain_gpt.py must be told; a plain shape can be built by `peer_model` as well."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    flags: str = _PLAIN

    @property
    def is_plain(self) -> bool:
        """Whether it is the peers' model: LayerNorm, biases, tanh GELU, no positions."""
        return self.flags == _PLAIN

    def command(self) -> str:
        """Return the words of pretrain_gpt.py's command line that make this model."""
        # The tokenizer without a vocabulary adds one entry of its own.
        return (
            f"--num-layers {self.num_layers} --hidden-size {self.hidden_size} --num-attention-heads {self.num_heads} "
            f"--ffn-hidden-size {self.ffn_hidden_size} --seq-length {self.seq_length} "
            f"--max-position-embeddings {self.seq_length} --tokenizer-type NullTokenizer "
            f"--vocab-size {self.vocab_size - 1} {self.flags}"
        )


SHAPES = {
    "3.5b": Shape(16, 4096, 16384, 32, 32000, 2048),
    "1.1b": Shape(4, 4096, 16384, 32, 32000, 2048),
    "paper-7b": Shape(32, 4096, 11008, 32, 50304, 2048, _PUBLISHED),
    "paper-8.3b": Shape(72, 3072, 11008, 32, 50304, 2048, _PUBLISHED),
    "tiny": Shape(2, 64, 256, 4, 512, 32),
}
"""paper-*: the published method's own models, called by their nominal sizes; really 5.95 B and 9.14 B parameters."""
