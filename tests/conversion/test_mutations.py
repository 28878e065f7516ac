"""Each mistake that converters make, put into the registry: import and verify then agree, and only logits can tell."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors import safe_open

from megatron.training.conversion.architectures import ARCHITECTURES, OUTPUT, architecture_of
from megatron.training.conversion.hf_config import architecture_name, read_raw_config
from megatron.training.conversion.importer import import_checkpoint
from megatron.training.conversion.parity import BOUND
from megatron.training.conversion.verify import verify_checkpoint
from megatron.training.conversion.weights import pack, unpack_qkv
from tests.conversion import tiny_models


def in_config(**changes):
    """A mistake in reading the config."""
    return lambda known: dataclasses.replace(known, read=lambda config: {**known.read(config), **changes})


def in_tensors(matches, change):
    """A mistake in making a tensor: change(packed, rule, parts, heads) where `matches` is in the key."""

    def mutate(known):
        def wrong(rule, parts, heads):
            packed = pack(rule, parts, heads)
            return change(packed, rule, parts, heads) if matches in rule.key else packed

        return dataclasses.replace(known, pack=wrong)

    return mutate


def swapped_rules(one, other):
    """Two tensors of each layer are taken for each other."""

    def mutate(known):
        def rules(model, rows):
            places = {(rule.layer, rule.key): rule.parts for rule in known.rules(model, rows)}
            swapped = []
            for rule in known.rules(model, rows):
                partner = rule.key.replace(one, other) if one in rule.key else rule.key.replace(other, one)
                swapped.append(dataclasses.replace(rule, parts=places[rule.layer, partner]))
            return tuple(swapped)

        return dataclasses.replace(known, rules=rules)

    return mutate


def plain_concatenation(packed, rule, parts, heads):
    return torch.cat(list(parts))


def interleaved(packed, rule, parts, heads):
    """Rotary halves are put where pairs belong, in query and key."""

    def permute(rows):
        split = rows.reshape(-1, heads.width // 2, 2, *rows.shape[1:])
        return split.transpose(1, 2).reshape(rows.shape)

    return pack(rule, [permute(parts[0]), permute(parts[1]), parts[2]], heads)


def gathered_plainly(packed, rule, parts, heads):
    """The halves that two tensor-parallel ranks hold, one after the other."""
    gate, up = parts[0].chunk(2), parts[1].chunk(2)
    return torch.cat([gate[0], up[0], gate[1], up[1]])


def head_by_head(packed, rule, parts, heads):
    """GPT-NeoX's rows taken for [query, key, value][head]."""
    rows = packed.reshape(3, heads.num_heads, heads.width, *packed.shape[1:])
    return rows.transpose(0, 1).reshape(packed.shape)


def key_for_value(packed, rule, parts, heads):
    query, key, value = unpack_qkv(packed, heads)
    return pack(rule, [query, value, key], heads)


MUTATIONS = {
    "qkv packed plainly": ("llama2", in_tensors("linear_qkv.weight", plain_concatenation)),
    "key and value swapped": ("llama2", in_tensors("linear_qkv.weight", key_for_value)),
    "gate and up swapped": ("llama2", in_tensors("fc1.weight", lambda w, rule, parts, heads: torch.cat(parts[::-1]))),
    "rotary interleaved": ("llama2", in_tensors("linear_qkv.weight", interleaved)),
    "fc1 gathered plainly": ("llama2", in_tensors("fc1.weight", gathered_plainly)),
    "norms swapped": ("llama2", swapped_rules("self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm")),
    "epsilon 1e-6": ("llama2", in_config(norm_epsilon=1e-6)),
    "rounded to bf16": ("llama2", in_tensors("", lambda w, rule, parts, heads: w.bfloat16().float())),
    "rope base 1e4": ("llama3", in_config(rotary_base=10000)),
    "rope scaling missing": ("llama3", in_config(use_rope_scaling=False)),
    "low frequency factor lost": ("llama3", in_config(rope_scaling_low_freq_factor=1.0)),
    "high frequency factor lost": ("llama3", in_config(rope_scaling_high_freq_factor=4.0)),
    "original length lost": ("llama3", in_config(rope_scaling_original_max_position_embeddings=8192)),
    "scaling factor lost": ("llama3", in_config(rope_scaling_factor=4.0)),
    "window missing": ("mistral", in_config(window_size=None)),
    "window one too wide": ("mistral", in_config(window_size=(20, 0))),
    "qkv bias dropped": ("qwen2", in_tensors("linear_qkv.bias", lambda b, rule, parts, heads: torch.zeros_like(b))),
    "qkv bias packed plainly": ("qwen2", in_tensors("linear_qkv.bias", plain_concatenation)),
    "q and k norms dropped": (
        "qwen3",
        in_tensors("_layernorm.weight", lambda w, rule, parts, heads: torch.ones_like(w)),
    ),
    "q and k norms swapped": ("qwen3", swapped_rules("q_layernorm", "k_layernorm")),
    "serial residual": ("neox", in_config(parallel_residual=False)),
    "all of the head rotated": ("neox", in_config(rotary_percent=1.0)),
    "exact GELU": ("neox", in_config(openai_gelu=False)),
    "tanh GELU": ("neox_exact", in_config(openai_gelu=True)),
    "qkv not by head": ("neox", in_tensors("linear_qkv.weight", head_by_head)),
    "output bias dropped": ("neox", in_tensors("linear_proj.bias", lambda b, rule, parts, heads: torch.zeros_like(b))),
}


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_mistake_is_caught(converted, tmp_path, mistake):
    """The logits of a wrongly converted model are out of verify's bound."""
    name, mutate = MUTATIONS[mistake]
    hf = converted(name).hf
    known = architecture_of(architecture_name(read_raw_config(hf), ""), "")
    wrong = mutate(known)
    import_checkpoint(hf, tmp_path / "ours", architecture=wrong)
    verified = verify_checkpoint(hf, tmp_path / "ours", seq_length=tiny_models.SEQ_LENGTH, architecture=wrong)
    assert verified.different == (), "the mistake is in both sides, so tensors cannot tell"
    assert verified.parity.error > 2 * BOUND
    assert not verified.is_good


def test_tied_by_mistake_is_caught(converted, tmp_path):
    """An output layer that is taken from the embedding does not go unseen."""
    hf = converted("llama2").hf
    embedding = read_tensor(hf, "model.embed_tokens.weight")
    wrong = in_tensors(OUTPUT, lambda w, rule, parts, heads: embedding)(ARCHITECTURES["LlamaForCausalLM"])
    import_checkpoint(hf, tmp_path / "ours", architecture=wrong)
    verified = verify_checkpoint(hf, tmp_path / "ours", seq_length=tiny_models.SEQ_LENGTH, architecture=wrong)
    assert verified.parity.error > 5 * BOUND


def test_unchanged_registry_passes(converted, tmp_path):
    """The harness itself finds no fault where none was made."""
    hf = converted("llama3").hf
    same = in_tensors("", lambda w, rule, parts, heads: w)(ARCHITECTURES["LlamaForCausalLM"])
    import_checkpoint(hf, tmp_path / "ours", architecture=same)
    assert verify_checkpoint(hf, tmp_path / "ours", seq_length=tiny_models.SEQ_LENGTH, architecture=same).is_good


def read_tensor(folder, name):
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if name in file.keys():
                return file.get_tensor(name)
    raise AssertionError(name)
