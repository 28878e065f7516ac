"""verify: a converted model computes what transformers computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.training.conversion import cli
from megatron.training.conversion.parity import BOUND, Parity, compare, sample_tokens
from megatron.training.conversion.verify import verify_checkpoint
from tests.conversion import tiny_models

# Each dtype of a source at least twice.
DTYPES = {
    "llama2": torch.float16,
    "llama3": torch.float32,
    "llama_tied": torch.bfloat16,
    "mistral": torch.bfloat16,
    "qwen2": torch.bfloat16,
    "qwen3": torch.float32,
    "neox": torch.float16,
    "neox_exact": torch.float32,
}


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_logits_and_tensors_are_the_sources(converted, name):
    """Every tensor is the source's bit for bit, and fp32 logits are well within the bound."""
    model = converted(name, DTYPES[name])
    verified = verify_checkpoint(model.hf, model.ours, seq_length=tiny_models.SEQ_LENGTH)
    assert verified.different == ()
    assert verified.parity.error <= BOUND / 5
    assert verified.is_good
    assert abs(verified.parity.loss - verified.parity.reference_loss) < 1e-4


def test_other_weights_are_refused(converted, capsys):
    """verify exits with 1 for a checkpoint of other weights, and says which tensors differ."""
    one, other = converted("llama2", torch.float16), converted("llama2", torch.float32)
    assert cli.main(["verify", "--hf", str(one.hf), "--load", str(one.ours)]) == 0
    assert "verified" in capsys.readouterr().out
    assert cli.main(["verify", "--hf", str(one.hf), "--load", str(other.ours)]) == 1
    printed = capsys.readouterr().out
    assert "NOT THE SAME MODEL" in printed and "embedding.word_embeddings.weight" in printed


def test_rounded_source_is_seen(converted):
    """Weights rounded to 16 bits are another model: the bound is below what rounding does."""
    full, rounded = converted("llama3", torch.float32), converted("llama3", torch.bfloat16)
    verified = verify_checkpoint(full.hf, rounded.ours, seq_length=tiny_models.SEQ_LENGTH)
    assert verified.parity.error > 10 * BOUND


def test_nan_is_not_parity():
    """A NaN in the logits is no agreement."""
    tokens = torch.randint(0, 7, (1, 5))
    logits = torch.randn(1, 5, 7)
    good = compare(logits, logits.clone(), tokens)
    assert good.is_good and good.agreement == 1.0
    broken = logits.clone()
    broken[0, 0, 0] = torch.nan
    assert not compare(logits, broken, tokens).is_good
    assert not Parity(error=float("nan"), agreement=1.0, reference_loss=1.0, loss=1.0).is_good


def test_sample_reaches_beyond_the_window(converted):
    """The tokens that logits are compared on are more than a window shows."""
    from megatron.training.conversion.exporter import OurModel
    from megatron.training.conversion.model_args import training_config

    ours = OurModel(converted("mistral", torch.bfloat16).ours)
    model = dataclasses.replace(ours.model, window_size=(299, 0), max_position_embeddings=4096)
    assert sample_tokens(training_config(model, 101), 101).shape == (1, 364)


@pytest.mark.parametrize("length", [5, 20, 21, 60])
def test_window_of_every_length(converted, length):
    """Sequences shorter than, as long as and longer than the window give transformers' logits."""
    model = converted("mistral", DTYPES["mistral"])
    assert verify_checkpoint(model.hf, model.ours, seq_length=length).parity.error <= BOUND
