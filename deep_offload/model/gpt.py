"""The parameters of a dense GPT as megatron-core's local layers register them, from plain numbers. Standard library."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""Sizes of a shape that have a flag of the same name; each is at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """Sizes of the model. Raises ValueError, one sentence, for a model that cannot exist.

    padded_vocab_size: rows of the embedding; positions: rows of a learned position table, 0 with rotary or no
    positions; num_query_groups: key and value heads.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    swiglu: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    tie_embeddings: bool = True
    positions: int = 0

    def __post_init__(self) -> None:
        for name in (*SIZES, "padded_vocab_size"):
            _require_positive("--" + name.replace("_", "-"), getattr(self, name))
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not a multiple of --num-query-groups "
                f"{self.num_query_groups}: change one of them"
            )
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"--normalization {self.normalization!r} is unknown, allowed are LayerNorm and RMSNorm")

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        one_layer = replace(self, num_layers=1)
        layer = sum(p.numel for p in _layer_params(self, ParallelShape(), 0))
        return sum(p.numel for p in chunk_params(one_layer, ParallelShape())) + (self.num_layers - 1) * layer

    @property
    def matmul_params(self) -> int:
        """Parameters that every token is multiplied with: all matrices, the output layer once."""
        layer = sum(p.numel for p in _layer_params(self, ParallelShape(), 0) if len(p.shape) == 2)
        return self.num_layers * layer + self.padded_vocab_size * self.hidden_size

    def training_flops(self, num_tokens: int, seq_length: int) -> float:
        """FLOPs of forward and backward, without recomputation: 6 per token and weight, plus causal attention."""
        attention = 6 * self.num_layers * self.num_attention_heads * self.kv_channels * seq_length
        return num_tokens * (6.0 * self.matmul_params + attention)

    def repeated_flops(self, modules: Collection[str], num_tokens: int, seq_length: int) -> float:
        """FLOPs of computing these parts of every layer once more (core_attn, mlp; others have no matrices)."""
        mlp = 2.0 * (3 if self.swiglu else 2) * self.hidden_size * self.ffn_hidden_size if "mlp" in modules else 0.0
        attention = 2.0 * self.num_attention_heads * self.kv_channels * seq_length if "core_attn" in modules else 0.0
        return num_tokens * self.num_layers * (mlp + attention)


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, it must be a whole number of at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelShape:
    """How ranks share the model: tensor x pipeline x data ranks; virtual: chunks of one pipeline rank.

    first_layers, last_layers: layers of the first and last pipeline rank, None: as many as the others.
    counts_embedding, counts_loss: the embedding, or output layer and loss, count as a layer when layers are split.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    sequence_parallel: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            _require_positive(f"--{name}-model-parallel-size", getattr(self, name))
        for name in ("virtual", "data"):
            _require_positive(f"{name}-parallel size", getattr(self, name))

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def num_layers(self, total: int, pipeline_rank: int, virtual_stage: int = 0) -> int:
        """Layers of one chunk of a model of `total` layers. Raises ValueError when they do not split evenly."""
        is_first, is_last = pipeline_rank == 0, pipeline_rank == self.pipeline - 1
        special = [layers for layers in (self.first_layers, self.last_layers) if layers is not None]
        if special and is_first and self.first_layers is not None:
            rank_layers = self.first_layers
        elif special and is_last and self.last_layers is not None:
            rank_layers = self.last_layers
        else:
            left = total - sum(special) + self.counts_embedding + self.counts_loss
            rank_layers = self._even(left, self.pipeline - len(special), total)
        chunk = self._even(rank_layers, self.virtual, total)
        if self.counts_embedding and is_first and virtual_stage == 0:
            chunk -= 1
        if self.counts_loss and is_last and virtual_stage == self.virtual - 1:
            chunk -= 1
        return chunk

    def _even(self, layers: int, parts: int, total: int) -> int:
        if parts < 1 or layers < 0 or layers % parts:
            raise ValueError(
                f"{total} layers cannot be cut evenly over {self.pipeline} pipeline ranks of {self.virtual} chunks: "
                "change --num-layers or --pipeline-model-parallel-size"
            )
        return layers // parts

    def check(self, shape: GPTShape) -> None:
        """Raise ValueError unless the model can be cut this way."""
        for rank in range(self.pipeline):
            self.num_layers(shape.num_layers, rank)
        for what, size in (
            ("query groups", shape.num_query_groups),
            ("feed-forward channels", shape.ffn_hidden_size),
            ("vocabulary rows", shape.padded_vocab_size),
        ):
            if size % self.tensor:
                raise ValueError(
                    f"{size} {what} cannot be split over {self.tensor} tensor-parallel ranks: change "
                    "--tensor-model-parallel-size"
                )


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a model chunk on one tensor-parallel rank, named as `GPTModel.named_parameters` does.

    is_shared_embedding: one of the two copies of a tied embedding on different pipeline stages.
    """

    name: str
    shape: tuple[int, ...]
    is_shared_embedding: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def chunk_params(
    shape: GPTShape, parallel: ParallelShape, pipeline_rank: int = 0, virtual_stage: int = 0
) -> tuple[Param, ...]:
    """Parameters of one model chunk in the order in which megatron-core registers them."""
    parallel.check(shape)
    is_first = pipeline_rank == 0 and virtual_stage == 0
    is_last = pipeline_rank == parallel.pipeline - 1 and virtual_stage == parallel.virtual - 1
    is_split = shape.tie_embeddings and parallel.pipeline > 1
    vocab = (shape.padded_vocab_size // parallel.tensor, shape.hidden_size)
    params: list[Param] = []
    if is_first:
        params.append(Param("embedding.word_embeddings.weight", vocab, is_split and not is_last))
        if shape.positions:
            params.append(Param("embedding.position_embeddings.weight", (shape.positions, shape.hidden_size)))
    for layer in range(parallel.num_layers(shape.num_layers, pipeline_rank, virtual_stage)):
        params += _layer_params(shape, parallel, layer)
    if is_last:
        params += _norm(shape, "decoder.final_layernorm", shape.hidden_size)
        if not shape.tie_embeddings or not is_first:
            params.append(Param("output_layer.weight", vocab, is_split))
    return tuple(params)


def _layer_params(shape: GPTShape, parallel: ParallelShape, layer: int) -> Iterator[Param]:
    hidden, tp = shape.hidden_size, parallel.tensor
    queries = shape.num_attention_heads * shape.kv_channels // tp
    qkv = queries + 2 * shape.num_query_groups * shape.kv_channels // tp
    ffn = shape.ffn_hidden_size // tp
    prefix = f"decoder.layers.{layer}."
    yield from _norm(shape, prefix + "input_layernorm", hidden)
    # A row-parallel layer adds its bias after the sum over ranks, so every rank has all of it.
    yield from _linear(prefix + "self_attention.linear_proj", (hidden, queries), shape.add_bias_linear)
    has_qkv_bias = shape.add_bias_linear or shape.add_qkv_bias
    yield from _linear(prefix + "self_attention.linear_qkv", (qkv, hidden), has_qkv_bias)
    if shape.qk_layernorm:
        yield from _norm(shape, prefix + "self_attention.q_layernorm", shape.kv_channels)
        yield from _norm(shape, prefix + "self_attention.k_layernorm", shape.kv_channels)
    yield from _norm(shape, prefix + "pre_mlp_layernorm", hidden)
    yield from _linear(prefix + "mlp.linear_fc1", (ffn * (2 if shape.swiglu else 1), hidden), shape.add_bias_linear)
    yield from _linear(prefix + "mlp.linear_fc2", (hidden, ffn), shape.add_bias_linear)


def _linear(name: str, weight: tuple[int, int], has_bias: bool) -> Iterator[Param]:
    yield Param(name + ".weight", weight)
    if has_bias:
        yield Param(name + ".bias", weight[:1])


def _norm(shape: GPTShape, name: str, size: int) -> Iterator[Param]:
    yield Param(name + ".weight", (size,))
    if shape.normalization == "LayerNorm":
        yield Param(name + ".bias", (size,))


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, groups: int = 4, vocab: int = 50304, *, tied: bool = False
) -> GPTShape:
    return GPTShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        padded_vocab_size=vocab,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        tie_embeddings=tied,
    )


NAMED_SHAPES: dict[str, GPTShape] = {
    # The published shapes of the method; nominal names overstate some sizes.
    "7b": _llama(32, 4096, 32, 11008),
    "8.3b": _llama(72, 3072, 32, 11008),
    "10b": _llama(50, 4096, 32, 12400),
    "13b": _llama(40, 5120, 40, 13824),
    "20b": _llama(40, 5120, 64, 20480),
    # Shapes of widely used open models.
    "1b": _llama(16, 2048, 32, 8192, 8, 128256, tied=True),
    "3b": _llama(28, 3072, 24, 8192, 8, 128256, tied=True),
    "8b": _llama(32, 4096, 32, 14336, 8, 128256),
    "70b": _llama(80, 8192, 64, 28672, 8, 128256),
}
"""Shapes by the names that `python -m deep_offload plan --model` knows."""


def named_shape(name: str) -> GPTShape:
    """A known shape. Raises ValueError that lists the names."""
    shape = NAMED_SHAPES.get(name.lower())
    if shape is None:
        raise ValueError(
            f"model {name!r} is unknown, known are {', '.join(NAMED_SHAPES)}, or give --num-layers and so on"
        )
    return shape


def padded_to(shape: GPTShape, tensor: int, multiple: int = 128) -> GPTShape:
    """The shape with its vocabulary padded to a multiple of `multiple` rows per tensor-parallel rank."""
    rows = multiple * tensor
    return replace(shape, padded_vocab_size=-(-shape.padded_vocab_size // rows) * rows)
