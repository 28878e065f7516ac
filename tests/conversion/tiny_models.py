"""Tiny HuggingFace models in which every mistake of a converter shows: all weights random, none at its default."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

_SHAPE = dict(
    vocab_size=101,  # divisible by no tensor-parallel size
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.25, high_freq_factor=5.0, original_max_position_embeddings=64
)

# Name: (model type, settings). The sequence is longer than the knee of the scaling and than the window.
MODELS = {
    "llama2": ("llama", dict(_SHAPE, rms_norm_eps=1e-5)),
    "llama3": ("llama", dict(_SHAPE, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=_LLAMA3)),
    "llama_tied": ("llama", dict(_SHAPE, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(_SHAPE, rms_norm_eps=1e-5, head_dim=24, sliding_window=20)),
    "qwen2": ("qwen2", dict(_SHAPE, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(_SHAPE, rms_norm_eps=1e-6, head_dim=32, tie_word_embeddings=True)),
    "neox": ("gpt_neox", dict(_SHAPE, hidden_act="gelu_fast", layer_norm_eps=1e-5)),
    "neox_exact": ("gpt_neox", dict(_SHAPE, hidden_act="gelu", layer_norm_eps=1e-6, use_parallel_residual=False)),
}
SEQ_LENGTH = 96


def build(name: str, groups: int = 2, **changes: object) -> torch.nn.Module:
    """Return a model of `MODELS` with random weights in fp32. groups: key and value heads, except for GPT-NeoX."""
    kind, settings = MODELS[name]
    settings = {**settings, "num_key_value_heads": groups, **changes}
    if kind == "gpt_neox":
        settings.pop("num_key_value_heads")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    randomize(model)
    return model.eval()


def randomize(model: torch.nn.Module, seed: int = 1) -> None:
    """Norm weights 1 + N/2, biases N/2, matrices N/sqrt(fan in): the default start hides wrong norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                is_norm_weight = "norm" in name and name.endswith("weight")
                parameter.copy_(float(is_norm_weight) + 0.5 * noise)


def save(model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Write a model, its generation config and a tokenizer; returns the folder."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a word tokenizer of 90 ids, fewer than the rows of the models, and a chat template."""
    words = ["<unk>", "</s>", "<s>", *(f"w{i}" for i in range(87))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> assistant {% endif %}"
    )
