"""Logits of the two sides on the same tokens, in fp32, and how far apart they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron.training.config import TrainingConfig
from megatron.training.initialize import initialize, shut_down
from megatron.training.launch import Ranks
from megatron.training.model import build_chunk, transformer_config

BOUND = 1e-4
"""Largest error allowed, in standard deviations of the logits: rounding stays far below, every known mistake above."""

_SEED = 20
_SHORTEST, _LONGEST = 256, 1024
_BEYOND_WINDOW = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """How two sets of logits compare. error: largest difference over the standard deviation of the reference.

    agreement: share of positions with the same most likely token; losses: mean next-token losses of both.
    """

    error: float
    agreement: float
    reference_loss: float
    loss: float

    @property
    def is_good(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= BOUND


def compare(reference: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> Parity:
    """Compare logits [batch, seq, vocabulary] of tokens [batch, seq]."""
    assert reference.shape == logits.shape, (reference.shape, logits.shape)
    error = (reference - logits).abs().max() / reference.std()
    agreement = (reference.argmax(-1) == logits.argmax(-1)).float().mean()
    return Parity(
        error=float(error),
        agreement=float(agreement),
        reference_loss=next_token_loss(reference, tokens),
        loss=next_token_loss(logits, tokens),
    )


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the mean loss of each token given those before it."""
    flat = logits[:, :-1].flatten(0, 1).float()
    return float(torch.nn.functional.cross_entropy(flat, tokens[:, 1:].flatten()))


def sample_tokens(config: TrainingConfig, vocab_rows: int, seq_length: int | None = None) -> torch.Tensor:
    """Return random tokens [1, seq], by default longer than the attention window where that is affordable."""
    model = config.model
    if seq_length is None:
        window = model.window_size[0] + 1 if model.window_size is not None else 0
        wanted = min(max(_SHORTEST, window + _BEYOND_WINDOW), _LONGEST)
        seq_length = min(wanted, model.max_position_embeddings)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, vocab_rows, (1, seq_length), generator=generator)


def reference_model(folder: Path) -> Any:
    """Return transformers' own model of a folder in fp32, ready to evaluate; its config says what it computes."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()


def reference_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits [batch, seq, vocabulary] in fp32."""
    with torch.no_grad():
        return reference_model(folder)(tokens).logits


@contextmanager
def single_process(config: TrainingConfig) -> Iterator[torch.device]:
    """Inside, this process is the only rank of a CPU job."""
    assert config.world_size == 1
    device = initialize(config, Ranks(0, 1, 0, 1, "127.0.0.1", 0, "single"), print)
    try:
        yield device
    finally:
        shut_down()


def load_chunk(config: TrainingConfig, folder: Path, device: torch.device) -> torch.nn.Module:
    """Return the whole model in fp32 with a checkpoint's weights; inside `single_process`."""
    transformer = transformer_config(config, device)
    # All weights come from the file, and drawing billions of random numbers takes minutes.
    transformer.perform_initialization = False
    chunk = build_chunk(config, transformer, device)
    load_weights(chunk, folder)
    return chunk.eval()


def load_weights(chunk: torch.nn.Module, folder: Path) -> None:
    """Fill a chunk's parameters from a checkpoint's tensors, each rank with its part."""
    state = chunk.sharded_state_dict()
    # What is left out are objects without content, which other layer implementations keep beside weights.
    weights = {key: value for key, value in state.items() if isinstance(value, ShardedTensor | ShardedTensorFactory)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # megatron-core's way to call torch
        dist_checkpointing.load(weights, str(folder))


def model_logits(chunk: torch.nn.Module, tokens: torch.Tensor, vocab_rows: int) -> torch.Tensor:
    """Return a chunk's logits [batch, seq, vocab_rows], padding of the vocabulary left out."""
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with torch.no_grad():
        return chunk(tokens, positions, None)[..., :vocab_rows].float()
