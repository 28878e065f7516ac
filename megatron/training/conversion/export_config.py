"""A config.json for a model that was born here, in the spelling that transformers 4 and 5 both read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.training.config import ModelConfig
from megatron.training.conversion.architectures import architecture_of
from megatron.training.conversion.hf_config import HFConfig
from megatron.training.conversion.model_args import differences


def describe_model(model: ModelConfig, rows: int | None, where: Path) -> tuple[HFConfig, str]:
    """Return the config and its text. rows: of the vocabulary without padding, None if the checkpoint does not know.

    Raises ValueError where no known architecture computes the same function.
    """
    if rows is None:
        raise ValueError(f"{where} keeps no size of its vocabulary: name the folder of its original with --hf")
    raw = _neox(model) if model.parallel_residual or model.normalization == "LayerNorm" else _llama_like(model)
    raw.update(
        vocab_size=rows,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings,
        initializer_range=model.init_method_std,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        attention_dropout=0.0,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = HFConfig(raw, raw, f"the config for {where}")
    known = architecture_of(config.architecture, str(where))
    different = differences(model, known.model(config))
    if model.position_embedding_type != "rope" or different:
        what = "; ".join(different) or f"position_embedding_type {model.position_embedding_type} and rope"
        raise ValueError(
            f"{where} is a model that no known architecture computes, the nearest, {known.name}, differs in {what}: it "
            "cannot be exported"
        )
    return config, json.dumps(raw, indent=2) + "\n"


def _llama_like(model: ModelConfig) -> dict[str, Any]:
    kind, name = "llama", "LlamaForCausalLM"
    extra: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
    if model.qk_layernorm:
        kind, name, extra = "qwen3", "Qwen3ForCausalLM", {"attention_bias": False}
    elif model.add_qkv_bias:
        kind, name, extra = "qwen2", "Qwen2ForCausalLM", {}
    elif model.window_size is not None:
        kind, name, extra = "mistral", "MistralForCausalLM", {}
    if model.window_size is not None:
        extra["sliding_window"] = model.window_size[0] + 1
        if kind != "mistral":
            extra.update(use_sliding_window=True, max_window_layers=0)
    rope: dict[str, Any] = {"rope_theta": float(model.rotary_base)}
    if model.use_rope_scaling:
        rope["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        }
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_act": "silu",
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "rms_norm_eps": model.norm_epsilon,
        **rope,
        **extra,
    }


def _neox(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu_fast" if model.openai_gelu else "gelu",
        "layer_norm_eps": model.norm_epsilon,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
        "hidden_dropout": 0.0,
    }
