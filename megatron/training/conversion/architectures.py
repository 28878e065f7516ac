"""The registry: which HuggingFace architectures are known, what their settings mean, and where their tensors go."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.training.config import ModelConfig
from megatron.training.conversion.hf_config import HFConfig
from megatron.training.conversion.weights import Heads, Part, Rule, pack, unpack

_LONGEST_SAMPLE = 4096
_QKV, _PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
_FC1, _FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

Pack = Callable[[Rule, Sequence[torch.Tensor], Heads], torch.Tensor]
Unpack = Callable[[Rule, torch.Tensor, Heads], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture. read: fields of ModelConfig; rules: all tensors, for a model and its vocabulary rows.

    ignored: tensors of the source that carry no weights, such as old rotary buffers.
    """

    name: str
    model_type: str
    read: Callable[[HFConfig], dict[str, Any]]
    rules: Callable[[ModelConfig, int], tuple[Rule, ...]]
    ignored: re.Pattern[str] = field(default=re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$"))
    pack: Pack = pack
    unpack: Unpack = unpack

    def model(self, config: HFConfig) -> ModelConfig:
        """Return our settings of the model. Raises ValueError, one sentence, for what is not built here."""
        values = self.read(config)
        longest = values["max_position_embeddings"]
        return ModelConfig(seq_length=min(longest, _LONGEST_SAMPLE), **values)


def heads_of(model: ModelConfig) -> Heads:
    """Return the attention heads of a layer."""
    return Heads(num_heads=model.num_attention_heads, num_groups=model.num_query_groups, width=model.kv_channels)


def architecture_of(name: str, where: str) -> Architecture:
    """Return a known architecture. Raises ValueError, one sentence that says what is missing."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    missing = _MISSING.get(name)
    reason = f", which needs {missing}" if missing else ""
    raise ValueError(
        f"{where} is a {name}{reason}: it is not built here, known architectures are {', '.join(ARCHITECTURES)}"
    )


def _common(config: HFConfig) -> dict[str, Any]:
    rope = config.rope(default_percent=0.25 if config.architecture == "GPTNeoXForCausalLM" else 1.0)
    heads, hidden = int(config.get("num_attention_heads")), int(config.get("hidden_size"))
    values: dict[str, Any] = {
        "num_layers": int(config.get("num_hidden_layers")),
        "hidden_size": hidden,
        "ffn_hidden_size": int(config.get("intermediate_size")),
        "num_attention_heads": heads,
        "kv_channels": int(config.get("head_dim", hidden // heads)),
        "max_position_embeddings": int(config.get("max_position_embeddings")),
        "position_embedding_type": "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.percent,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": float(config.get("attention_dropout", 0.0)),
        "hidden_dropout": float(config.get("hidden_dropout", 0.0)),
        "init_method_std": float(config.get("initializer_range", 0.02)),
    }
    if rope.kind == "llama3":
        values.update(
            use_rope_scaling=True,
            rope_scaling_factor=float(rope.scaling["factor"]),
            rope_scaling_low_freq_factor=float(rope.scaling["low_freq_factor"]),
            rope_scaling_high_freq_factor=float(rope.scaling["high_freq_factor"]),
            rope_scaling_original_max_position_embeddings=int(rope.scaling["original_max_position_embeddings"]),
        )
    elif rope.kind == "linear" and float(rope.scaling["factor"]).is_integer():
        values["rotary_seq_len_interpolation_factor"] = int(rope.scaling["factor"])
    elif rope.kind != "default":
        raise ValueError(
            f"{config.where} scales its rotary positions by {rope.kind!r}: it is not built here, known are default, "
            "linear with a whole factor, and llama3"
        )
    return values


def _llama_like(config: HFConfig) -> dict[str, Any]:
    config.require_default("hidden_act", "silu")
    config.require_default("mlp_bias", False)
    values = _common(config)
    heads, groups = values["num_attention_heads"], int(config.get("num_key_value_heads", values["num_attention_heads"]))
    window = config.window()
    return {
        **values,
        "normalization": "RMSNorm",
        "norm_epsilon": float(config.get("rms_norm_eps")),
        "swiglu": True,
        "add_bias_linear": False,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        # HuggingFace counts the token itself, megatron-core the tokens before it.
        "window_size": None if window is None else (window - 1, 0),
    }


def _llama(config: HFConfig) -> dict[str, Any]:
    config.require_default("attention_bias", False)
    return _llama_like(config)


def _qwen2(config: HFConfig) -> dict[str, Any]:
    return {**_llama_like(config), "add_qkv_bias": True}


def _qwen3(config: HFConfig) -> dict[str, Any]:
    config.require_default("attention_bias", False)
    return {**_llama_like(config), "qk_layernorm": True}


_EXACT_GELU, _TANH_GELU = ("gelu", "gelu_python"), ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")


def _neox(config: HFConfig) -> dict[str, Any]:
    config.require_default("attention_bias", True)
    activation = config.get("hidden_act")
    if activation not in (*_EXACT_GELU, *_TANH_GELU):
        known = ", ".join((*_EXACT_GELU, *_TANH_GELU))
        raise ValueError(f"{config.where} has the activation {activation!r}: it is not built here, known are {known}")
    return {
        **_common(config),
        "normalization": "LayerNorm",
        "norm_epsilon": float(config.get("layer_norm_eps")),
        "openai_gelu": activation in _TANH_GELU,
        "bias_gelu_fusion": activation in _TANH_GELU,
        "parallel_residual": bool(config.get("use_parallel_residual", True)),
    }


def _vocabulary(model: ModelConfig, rows: int, embedding: str, output: str) -> tuple[Rule, ...]:
    shape = (rows, model.hidden_size)
    rules = [Rule(key=EMBEDDING, kind="vocabulary", parts=(Part(embedding, shape),))]
    if model.untie_embeddings_and_output_weights:
        rules.append(Rule(key=OUTPUT, kind="vocabulary", parts=(Part(output, shape),)))
    return tuple(rules)


def _llama_rules(model: ModelConfig, rows: int) -> tuple[Rule, ...]:
    hidden, ffn, heads = model.hidden_size, model.ffn_hidden_size, heads_of(model)
    three = (("q", heads.query_rows), ("k", heads.group_rows), ("v", heads.group_rows))
    qkv = {
        kind: tuple(Part(f"self_attn.{name}_proj.{kind}", (count, *tail)) for name, count in three)
        for kind, tail in (("weight", (hidden,)), ("bias", ()))
    }
    layer: list[tuple[str, str, tuple[Part, ...]]] = [
        (f"{_QKV}.layer_norm_weight", "copy", (Part("input_layernorm.weight", (hidden,)),)),
        (f"{_QKV}.weight", "qkv", qkv["weight"]),
    ]
    if model.add_qkv_bias:
        layer.append((f"{_QKV}.bias", "qkv", qkv["bias"]))
    if model.qk_layernorm:
        for name in ("q", "k"):
            part = Part(f"self_attn.{name}_norm.weight", (heads.width,))
            layer.append((f"self_attention.{name}_layernorm.weight", "copy", (part,)))
    gated = tuple(Part(f"mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
    layer += [
        (f"{_PROJ}.weight", "copy", (Part("self_attn.o_proj.weight", (hidden, heads.query_rows)),)),
        (f"{_FC1}.layer_norm_weight", "copy", (Part("post_attention_layernorm.weight", (hidden,)),)),
        (f"{_FC1}.weight", "gated", gated),
        (f"{_FC2}.weight", "copy", (Part("mlp.down_proj.weight", (hidden, ffn)),)),
    ]
    final = Rule(key="decoder.final_layernorm.weight", kind="copy", parts=(Part("model.norm.weight", (hidden,)),))
    ends = _vocabulary(model, rows, "model.embed_tokens.weight", "lm_head.weight")
    return (ends[0], *_in_layers(layer, model.num_layers, "model.layers"), final, *ends[1:])


def _neox_rules(model: ModelConfig, rows: int) -> tuple[Rule, ...]:
    hidden, ffn, heads = model.hidden_size, model.ffn_hidden_size, heads_of(model)
    layer: list[tuple[str, str, tuple[Part, ...]]] = []
    for kind, ours in (("weight", "layer_norm_weight"), ("bias", "layer_norm_bias")):
        layer.append((f"{_QKV}.{ours}", "copy", (Part(f"input_layernorm.{kind}", (hidden,)),)))
        layer.append((f"{_FC1}.{ours}", "copy", (Part(f"post_attention_layernorm.{kind}", (hidden,)),)))
    linear = (
        # Rows are [head][query, key, value], which is megatron-core's order where every head is a group.
        (_QKV, "attention.query_key_value", 3 * heads.query_rows, hidden),
        (_PROJ, "attention.dense", hidden, heads.query_rows),
        (_FC1, "mlp.dense_h_to_4h", ffn, hidden),
        (_FC2, "mlp.dense_4h_to_h", hidden, ffn),
    )
    for ours, theirs, out, into in linear:
        layer.append((f"{ours}.weight", "copy", (Part(f"{theirs}.weight", (out, into)),)))
        layer.append((f"{ours}.bias", "copy", (Part(f"{theirs}.bias", (out,)),)))
    final = tuple(
        Rule(
            key=f"decoder.final_layernorm.{k}", kind="copy", parts=(Part(f"gpt_neox.final_layer_norm.{k}", (hidden,)),)
        )
        for k in ("weight", "bias")
    )
    ends = _vocabulary(model, rows, "gpt_neox.embed_in.weight", "embed_out.weight")
    return (ends[0], *_in_layers(layer, model.num_layers, "gpt_neox.layers"), *final, *ends[1:])


def _in_layers(layer: Sequence[tuple[str, Any, tuple[Part, ...]]], num_layers: int, prefix: str) -> list[Rule]:
    return [
        Rule(
            key=f"decoder.layers.{key}",
            kind=kind,
            parts=tuple(Part(f"{prefix}.{number}.{part.name}", part.shape) for part in parts),
            layer=number,
        )
        for number in range(num_layers)
        for key, kind, parts in layer
    ]


_NEOX_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.\w+)$")

ARCHITECTURES: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture(name="LlamaForCausalLM", model_type="llama", read=_llama, rules=_llama_rules),
        Architecture(name="MistralForCausalLM", model_type="mistral", read=_llama, rules=_llama_rules),
        Architecture(name="Qwen2ForCausalLM", model_type="qwen2", read=_qwen2, rules=_llama_rules),
        Architecture(name="Qwen3ForCausalLM", model_type="qwen3", read=_qwen3, rules=_llama_rules),
        Architecture(
            name="GPTNeoXForCausalLM", model_type="gpt_neox", read=_neox, rules=_neox_rules, ignored=_NEOX_BUFFERS
        ),
    )
}

_MISSING = {
    "MixtralForCausalLM": "experts",
    "Qwen2MoeForCausalLM": "experts",
    "Qwen3MoeForCausalLM": "experts",
    "DeepseekV3ForCausalLM": "experts and latent attention",
    "GPT2LMHeadModel": "learned positions and transposed weights",
    "FalconForCausalLM": "a single norm before attention and MLP",
    "GemmaForCausalLM": "gated GELU and scaled embeddings",
    "Gemma2ForCausalLM": "gated GELU, soft-capped scores and norms after each block",
    "Gemma3ForCausalLM": "gated GELU, norms after each block and windows on some layers",
    "Phi3ForCausalLM": "its fused projections",
    "PhiForCausalLM": "a single norm before attention and MLP",
    "OPTForCausalLM": "learned positions with an offset",
    "BloomForCausalLM": "ALiBi positions",
    "MptForCausalLM": "ALiBi positions",
    "GPTJForCausalLM": "a single norm before attention and MLP",
    "CohereForCausalLM": "scaled logits and a single norm before attention and MLP",
    "Olmo2ForCausalLM": "norms after each block",
    "Llama4ForCausalLM": "experts and layers without positions",
}
