"""--use-checkpoint-args: the model's shape and tokenizer from the arguments a checkpoint was written with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.flags_rules import Draft

# Taken unless given as a flag, as in Megatron: sizes that a checkpoint of another size could not fill.
_WHERE_NOT_GIVEN = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "tokenizer_type",
    "vocab_size",
    "unpadded_vocab_size",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
)

# Taken always, as in Megatron: another value would compute another function of the same weights.
_ALWAYS = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "squared_relu",
    "openai_gelu",
    "bias_gelu_fusion",
    "parallel_residual",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "apply_query_key_layer_scaling",
    "attention_dropout",
    "hidden_dropout",
    "window_size",
)

# Names that changed in Megatron: ours, then the other one.
_OTHER_NAMES = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}


def take_from_checkpoint(draft: Draft, saved: Mapping[str, object]) -> None:
    """Put the checkpoint's values into the draft, and a note about each that differs from a given flag."""
    names = list(_WHERE_NOT_GIVEN)
    if "--no-use-tokenizer-model-from-checkpoint-args" not in draft.mapped:
        names.append("tokenizer_model")
    for name in (*names, *_ALWAYS):
        value = saved.get(name, saved.get(_OTHER_NAMES.get(name, name)))
        if value is None or (name in names and name in draft.values):
            continue
        value = tuple(value) if isinstance(value, list) else value
        given = draft.values.get(name, value)
        if given != value:
            draft.notes.append(f"{draft.typed[name]}: {given} is replaced by the checkpoint's {value}")
        draft.values[name] = value
