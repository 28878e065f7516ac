"""In a rank: models changed before DDP wraps them (frozen parts, fp32 norms), with what their placement looks like."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from megatron.training import model
from tests.parallel.oracle_cases import _followed
from tests.parallel.parallel_cases import Outcome, run_all


class Fp32Norm(torch.nn.Module):
    """RMSNorm with an fp32 weight that computes in fp32 and answers in its input's type."""

    def __init__(self, like: torch.nn.Module) -> None:
        super().__init__()
        weight = like.weight.detach().float()
        self.weight = torch.nn.Parameter(weight + 0.001 * torch.arange(weight.numel()))  # not 16-bit numbers
        for name in ("sequence_parallel", "tensor_model_parallel"):
            if hasattr(like.weight, name):
                setattr(self.weight, name, getattr(like.weight, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-5).to(x.dtype)


def with_fp32_norms(chunk: torch.nn.Module) -> None:
    """Layers' second norms become fp32 inside a 16-bit model."""
    for layer in [m for m in chunk.modules() if hasattr(m, "pre_mlp_layernorm")]:
        layer.pre_mlp_layernorm = Fp32Norm(layer.pre_mlp_layernorm)


def with_frozen_attention(chunk: torch.nn.Module) -> None:
    """Attention and embeddings do not train."""
    for name, param in chunk.named_parameters():
        if "self_attention" in name or "word_embeddings" in name:
            param.requires_grad_(False)


def only_last_norm(chunk: torch.nn.Module) -> None:
    """48 elements train: fewer than a bucket's padding, so that ranks have empty shards."""
    for name, param in chunk.named_parameters():
        param.requires_grad_("final_layernorm" in name)


EDITS = {f.__name__: f for f in (with_fp32_norms, with_frozen_attention, only_last_norm)}


def edited(command_lines: list[str], cache: str, edit: str) -> list[Outcome]:
    """Train edited models with the oracle beside them; notes are [differences, elements here by type]."""
    return run_all(command_lines, cache, lambda outcome: _edited(outcome, edit))


@contextlib.contextmanager
def _edited(outcome: Outcome, edit: str) -> Iterator[None]:
    build, close = model.build_chunk, DeepOffloadOptimizer.close

    def build_and_edit(*arguments, **options):
        chunk = build(*arguments, **options)
        EDITS[edit](chunk)
        return chunk

    def look(self):
        if outcome.notes:
            numel: dict[str, int] = {}
            for shard in self._buffers.shards:
                for s in shard.shard.segments:
                    kind = str(shard.shard.param.dtype).removeprefix("torch.")
                    numel[kind] = numel.get(kind, 0) + s.end - s.start
            outcome.notes = [outcome.notes[0], numel]
        close(self)

    with (
        mock.patch.object(model, "build_chunk", build_and_edit),
        mock.patch.object(DeepOffloadOptimizer, "close", look),
        _followed(outcome, 0.5),
    ):
        yield


def decoupled(command_lines: list[str], cache: str) -> list[Outcome]:
    """Train with the oracle; notes are [differences, elements with the decoupled rate, rates (plain, decoupled)]."""
    return run_all(command_lines, cache, _decoupled)


@contextlib.contextmanager
def _decoupled(outcome: Outcome) -> Iterator[None]:
    close = DeepOffloadOptimizer.close

    def look(self):
        if outcome.notes:
            groups = [g for g in self.param_groups if g["is_decoupled_lr"]]
            plain = next(g["max_lr"] for g in self.param_groups if not g["is_decoupled_lr"])
            count = sum(p.numel() for g in groups for p in g["params"])
            outcome.notes = [outcome.notes[0], count, (plain, groups[0]["max_lr"])]
        close(self)

    with mock.patch.object(DeepOffloadOptimizer, "close", look), _followed(outcome, 0.5):
        yield
