"""In a rank: an oracle follows the real loop from clones of DDP's final gradients, one parameter's piece at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from tests.parallel.parallel_cases import Outcome, run_all

_PATH = Path(__file__).resolve().parents[1] / "optimizer" / "oracle.py"
_SPEC = importlib.util.spec_from_file_location("oracle", _PATH)
oracle = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(oracle)


class Follower:
    """The oracle's copy of this rank's state: one OracleParam for each piece of a parameter that lies here."""

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self.params: dict[tuple[int, int], Any] = {}
        self.grads: dict[tuple[int, int], torch.Tensor] = {}
        self.scale = 1.0
        self.norms: list[tuple[float, float]] = []
        self.num_clipped = 0

    def before(self, optimizer: DeepOffloadOptimizer) -> None:
        """Clone gradients, and at the first step weights."""
        self.scale = float(optimizer.get_loss_scale())
        squares = torch.zeros(1, dtype=torch.float64)
        for number, index, piece in _pieces(optimizer):
            param = optimizer._buffers.params[number]
            flat = slice(piece.param_start, piece.param_start + piece.numel)
            grad = param.main_grad.detach().flatten()[flat].clone()
            self.grads[number, index] = grad
            if (number, index) not in self.params:
                self.params[number, index] = oracle.OracleParam(param.detach().flatten()[flat].clone())
            if _counts(param):
                squares += grad.double().square().sum()
        dist.all_reduce(squares)
        self.own_norm = math.sqrt(squares.item()) / self.scale if torch.isfinite(squares) else math.inf

    def after(self, optimizer: DeepOffloadOptimizer, updated: bool, norm: float) -> None:
        """Update as the optimizer did: from the norm that it reported, which is compared with the oracle's own."""
        self.norms.append((self.own_norm, norm))
        if not updated:
            return
        clip = min(1.0, self.clip / (norm + 1e-6)) if self.clip > 0 else 1.0
        self.num_clipped += clip < 1.0
        for (number, index), param in self.params.items():
            group = optimizer.param_groups[optimizer._group_of[number]]
            param.update(
                self.grads[number, index],
                lr=group["lr"],
                betas=(0.9, 0.95),
                eps=1e-8,
                weight_decay=group["weight_decay"],
                scale=clip / self.scale,
            )

    def differences(self, optimizer: DeepOffloadOptimizer) -> list[str]:
        """What is not bitwise the oracle's: state of each piece, and the weights that the model computes with."""
        out = []
        for number, index, piece in _pieces(optimizer):
            want = self.params[number, index]
            got = read_piece(optimizer, piece)
            param = optimizer._buffers.params[number].detach().flatten()
            got["weight"] = param[piece.param_start : piece.param_start + piece.numel]
            for name, tensor in got.items():
                expected = want.weight() if name == "weight" else getattr(want, name)
                if not torch.equal(bits(tensor), bits(expected)):
                    out.append(f"{name} of parameter {number}, piece {index}")
        return out


def read_piece(optimizer: DeepOffloadOptimizer, piece: Any) -> dict[str, torch.Tensor]:
    """fp32 state of a piece, gathered from the subgroups that hold it."""
    engine, end = optimizer._engine, piece.shard_start + piece.numel
    parts: dict[str, list[torch.Tensor]] = {}
    for s in sorted(engine.subgroups_of(piece.shard, piece.shard_start, end), key=lambda s: s.start):
        low, high = max(s.start, piece.shard_start) - s.start, min(s.start + s.numel, end) - s.start
        for name, tensor in engine.read_state(s.index, low, high).items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def _pieces(optimizer: DeepOffloadOptimizer) -> list[tuple[int, int, Any]]:
    return [(n, i, piece) for n, pieces in enumerate(optimizer._buffers.pieces) for i, piece in enumerate(pieces)]


def _counts(param: torch.nn.Parameter) -> bool:
    is_copy = not getattr(param, "tensor_model_parallel", False) and parallel_state.get_tensor_model_parallel_rank() > 0
    return param_is_not_shared(param) and not is_copy


def follow(command_lines: list[str], cache: str, clip: float = 0.5) -> list[Outcome]:
    """Train each line with the oracle beside it; notes are [differences, norms (own, reported), steps clipped].

    clip: what --clip-grad says; 0 does not clip.
    """
    return run_all(command_lines, cache, lambda outcome: _followed(outcome, clip))


@contextlib.contextmanager
def _followed(outcome: Outcome, clip: float):
    follower = Follower(clip)
    step, close = DeepOffloadOptimizer.step, DeepOffloadOptimizer.close

    def watched_step(self):
        follower.before(self)
        result = step(self)
        follower.after(self, result[0], result[1])
        return result

    def watched_close(self):
        self.synchronize()
        outcome.notes = [follower.differences(self), follower.norms, follower.num_clipped]
        close(self)

    with (
        mock.patch.object(DeepOffloadOptimizer, "step", watched_step),
        mock.patch.object(DeepOffloadOptimizer, "close", watched_close),
    ):
        yield


def with_overflow(command_lines: list[str], cache: str, at: int, bad_rank: int) -> list[Outcome]:
    """Put an inf into one rank's gradients before step `at` (from 1); notes are the digests around each step."""
    return run_all(command_lines, cache, lambda outcome: _overflowing(outcome, at, bad_rank))


@contextlib.contextmanager
def _overflowing(outcome: Outcome, at: int, bad_rank: int):
    step = DeepOffloadOptimizer.step
    calls = []

    def watched(self):
        calls.append(None)
        if len(calls) == at and dist.get_rank() == bad_rank:
            # An element that a parameter owns: padding is not looked at.
            shard = self._buffers.shards[0].shard
            shard.grad[shard.segments[0].start] = math.inf
        self._passes.end_of_backward()
        before = self.state_digest()
        result = step(self)
        outcome.notes.append((result[0], before, self.state_digest()))
        return result

    with mock.patch.object(DeepOffloadOptimizer, "step", watched):
        yield
