"""A HuggingFace folder of a given size with random weights, written as a stream: to try conversion and training out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.training.conversion.architectures import architecture_of
from megatron.training.conversion.folder import whole_or_nothing
from megatron.training.conversion.hf_config import HFConfig
from megatron.training.conversion.progress import ByteProgress
from megatron.training.conversion.safetensors_file import (
    DEFAULT_SHARD_BYTES,
    Entry,
    file_names,
    split_into_files,
    write_file,
    write_index,
)

# hidden, MLP, layers, query heads, key and value heads, vocabulary, longest position: Llama-2's sizes.
SHAPES = {
    "tiny": (64, 176, 4, 4, 2, 320, 256),
    "1b": (2048, 5632, 22, 32, 4, 32000, 2048),
    "7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "13b": (5120, 13824, 40, 40, 40, 32000, 4096),
}
_STD = 0.02
_PIECE = 1 << 22


def llama_config(shape: str, dtype: str) -> dict[str, Any]:
    """Return a config.json."""
    hidden, ffn, layers, heads, groups, vocabulary, positions = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": _STD,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "torch_dtype": dtype,
    }


def write_random_model(out: Path, shape: str, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> int:
    """Write config, tokenizer of bytes, and weights; returns the bytes of the weights. Memory: one tensor."""
    raw = llama_config(shape, str(dtype).removeprefix("torch."))
    known = architecture_of("LlamaForCausalLM", str(out))
    rules = known.rules(known.model(HFConfig(raw, raw, str(out))), raw["vocab_size"])
    entries = [Entry(part.name, part.shape, dtype) for rule in rules for part in rule.parts]
    shapes = {entry.name: entry.shape for entry in entries}
    generator = torch.Generator().manual_seed(seed)
    num_bytes = sum(entry.num_bytes for entry in entries)
    progress = ByteProgress("writing", num_bytes)
    # One piece of noise serves all matrices, each from its own place: drawing billions of numbers takes minutes.
    noise = torch.randn(_PIECE, generator=generator).mul_(_STD).to(dtype)

    def read(name: str) -> torch.Tensor:
        if len(shapes[name]) == 1:
            tensor = torch.ones(shapes[name], dtype=dtype)
        else:
            count = torch.Size(shapes[name]).numel()
            start = int(torch.randint(0, _PIECE, (1,), generator=generator))
            repeats = -(-(start + count) // _PIECE)
            tensor = noise.repeat(repeats)[start : start + count].view(shapes[name])
        progress.add(tensor.numel() * tensor.element_size())
        return tensor

    files = split_into_files(entries, DEFAULT_SHARD_BYTES)
    names = file_names(len(files))
    with whole_or_nothing(out) as partial:
        for name, part in zip(names, files):
            write_file(partial / name, part, read)
        if len(files) > 1:
            write_index(partial, dict(zip(names, files)))
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        _write_tokenizer(partial)
    return num_bytes


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids are bytes, and one that ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 written, 2 for a place that cannot be written."""
    parser = argparse.ArgumentParser(prog="random_model.py", description="A Llama with random weights.")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="size (default tiny)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args(argv)
    try:
        num_bytes = write_random_model(options.out, options.shape, getattr(torch, options.dtype))
    except ValueError as error:
        print(f"random_model.py: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {num_bytes / 2**30:.2f} GiB of weights to {options.out}")
    return 0
