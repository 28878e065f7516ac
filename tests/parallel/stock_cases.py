"""In a rank: megatron-core's own DistributedOptimizer with torch's Adam beside ours, or in its place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.plan.storage import EXP_AVG, EXP_AVG_SQ, MASTER
from megatron.training import training
from megatron.training.model import build_model
from tests.parallel.oracle_cases import _pieces, read_piece
from tests.parallel.parallel_cases import Outcome, run_all

_EPS = 2.0**-23
BETAS, ADAM_EPS = (0.9, 0.95), 1e-8


@contextlib.contextmanager
def as_if_on_cuda() -> Iterator[None]:
    """Tensor.type() says "torch.cuda.*": without a GPU the stock optimizer refuses parameters by their type's name."""
    original = torch.Tensor.type

    def type_name(self, *arguments, **options):
        result = original(self, *arguments, **options)
        is_name = isinstance(result, str) and not arguments and not options
        return result.replace("torch.", "torch.cuda.", 1) if is_name and "cuda" not in result else result

    with mock.patch.object(torch.Tensor, "type", type_name):
        yield


def stock_optimizer(config: Any, chunks: list[Any]) -> Any:
    """megatron-core's optimizer over DDP chunks, its state made (zero)."""
    with as_if_on_cuda():
        peer = get_megatron_optimizer(training.optimizer_config(config), chunks, use_gloo_process_groups=False)
        peer = getattr(peer, "chained_optimizers", [peer])[0]
        if hasattr(peer, "_init_optimizer_states_with_dummy_values"):
            # Adam with zero gradients, decay and all: masters must not move.
            for group in peer.optimizer.param_groups:
                group["lr"] = 0.0
            peer._init_optimizer_states_with_dummy_values()
            for state in peer.optimizer.state.values():
                state["step"].zero_()
    return peer


class Twin:
    """A second model that never computes: it takes our gradients and state before each step, and the stock step."""

    def __init__(self, config: Any, ours: DeepOffloadOptimizer) -> None:
        self.ours = ours
        self.chunks = build_model(config, torch.device("cpu"))
        self.peer = stock_optimizer(config, self.chunks)
        shadows = [p for chunk in self.chunks for p in chunk.parameters()]
        originals = [p for chunk in ours._chunks for p in chunk.parameters()]
        number = ours._buffers.number_of()
        self.numbers = {shadow: number[p] for shadow, p in zip(shadows, originals, strict=True)}
        self.worst = 0.0
        self.rows: list[tuple[bool, bool, float, float, float, float]] = []
        """(our, their) update done, norms, loss scales after."""

    def mains(self) -> Iterator[tuple[torch.Tensor, int]]:
        """(stock fp32 master of a slice, number of its parameter)."""
        peer = self.peer
        for models, mains in (
            (peer.model_float16_groups, peer.shard_fp32_from_float16_groups),
            (peer.model_fp32_groups, peer.shard_fp32_groups),
        ):
            for model_group, main_group in zip(models, mains):
                for model, main in zip(model_group, main_group):
                    yield main, self.numbers[model]

    def take_over(self) -> None:
        """Copy gradients, state, learning rates and step count from ours."""
        ours = self.ours
        ours.synchronize()
        for mine, theirs in zip(ours._chunks, self.chunks, strict=True):
            for a, b in zip(mine.buffers, theirs.buffers, strict=True):
                b.grad_data.copy_(a.grad_data)
        pieces = {number: piece for number, index, piece in _pieces(ours)}
        self.before: dict[int, dict[str, torch.Tensor]] = {}
        for main, number in self.mains():
            piece = pieces[number]
            state = {name: t.detach().clone() for name, t in read_piece(ours, piece).items()}
            grad = ours._buffers.params[number].main_grad.flatten()
            state["grad"] = grad[piece.param_start : piece.param_start + piece.numel].float().clone()
            self.before[number] = state
            main.data.copy_(state[MASTER])
            held = self.peer.optimizer.state[main]
            held["exp_avg"].copy_(state[EXP_AVG])
            held["exp_avg_sq"].copy_(state[EXP_AVG_SQ])
            held["step"].fill_(ours.num_steps)
        rates = {group["wd_mult"]: group for group in ours.param_groups}
        for group in self.peer.optimizer.param_groups:
            group["lr"] = rates[group["wd_mult"]]["lr"]
            group["weight_decay"] = rates[group["wd_mult"]]["weight_decay"]

    def compare(self, updated: bool, norm: float, scale: float) -> None:
        """Take the stock step and hold its masters against ours, element by element."""
        with as_if_on_cuda():
            done, their_norm, _zeros = self.peer.step()
        their_norm = math.inf if their_norm is None else float(their_norm)
        self.rows.append(
            (updated, done, norm, their_norm, float(self.ours.get_loss_scale()), float(self.peer.get_loss_scale()))
        )
        if not (updated and done):
            return
        self.ours.synchronize()
        pieces = {number: piece for number, index, piece in _pieces(self.ours)}
        group_of, groups = self.ours._group_of, self.ours.param_groups
        factor = min(1.0, 0.5 / (norm + 1e-6)) / scale
        for main, number in self.mains():
            got = read_piece(self.ours, pieces[number])[MASTER]
            allowed = self._bound(self.before[number], groups[group_of[number]]["lr"], factor)
            self.worst = max(self.worst, float(((got.double() - main.double()).abs() / allowed).max()))

    def _bound(self, state: dict[str, torch.Tensor], lr: float, factor: float) -> torch.Tensor:
        """What rounding may make of one step: 2 ulp of the master, 8 ulp of the terms of the update."""
        step = self.ours.num_steps
        grad = state["grad"].double() * factor
        terms = BETAS[0] * state[EXP_AVG].double().abs() + (1 - BETAS[0]) * grad.abs()
        second = BETAS[1] * state[EXP_AVG_SQ].double() + (1 - BETAS[1]) * grad.square()
        denominator = (second / (1 - BETAS[1] ** step)).sqrt() + ADAM_EPS
        update = lr / (1 - BETAS[0] ** step) * terms / denominator
        return _EPS * (2 * state[MASTER].double().abs() + 8 * update) + 1e-30


def beside_stock(command_lines: list[str], cache: str, overflow_at: int = 0) -> list[Outcome]:
    """Open loop: notes are [worst difference by bound, rows]. overflow_at: step with an inf on the last rank."""
    return run_all(command_lines, cache, lambda outcome: _twin_runs(outcome, overflow_at))


@contextlib.contextmanager
def _twin_runs(outcome: Outcome, overflow_at: int) -> Iterator[None]:
    build, step, twins = training._build_optimizer, DeepOffloadOptimizer.step, []

    def build_both(config, chunks, report_first):
        ours = build(config, chunks, report_first)
        twins.append(Twin(config, ours))
        return ours

    def both(self):
        twin = twins[0]
        if len(twin.rows) + 1 == overflow_at and dist.get_rank() == dist.get_world_size() - 1:
            shard = self._buffers.shards[0].shard
            shard.grad[shard.segments[0].start] = math.inf
        scale = float(self.get_loss_scale())
        twin.take_over()
        updated, norm, zeros = step(self)
        twin.compare(updated, norm, scale)
        outcome.notes = [twin.worst, twin.rows]
        return updated, norm, zeros

    with (
        mock.patch.object(training, "_build_optimizer", build_both),
        mock.patch.object(DeepOffloadOptimizer, "step", both),
    ):
        yield


class StockInOurPlace:
    """The stock optimizer with the calls that the loop makes of ours."""

    is_stub_optimizer = False

    def __init__(self, peer: Any) -> None:
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peer, name)

    def begin_step(self) -> None:
        self._peer.zero_grad()
        for chunk in self._peer.model_chunks:
            chunk.zero_grad_buffer()

    def step(self) -> tuple[bool, float, int | None]:
        with as_if_on_cuda():
            done, norm, zeros = self._peer.step()
        return done, math.inf if norm is None else norm, zeros

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass

    def keep_timelines(self, num_steps: int) -> None:
        pass

    def last_step_fields(self) -> list[tuple[str, str]]:
        return []

    def last_update(self) -> None:
        return None

    def timelines(self) -> list[Any]:
        return []

    def traffic(self) -> dict[str, int]:
        return {}

    def memory_bytes(self) -> tuple[int, int]:
        return 0, 0

    def state_digest(self, vocab_size: int | None = None) -> str:
        return "none"


def instead_of_ours(command_lines: list[str], cache: str) -> list[Outcome]:
    """Closed loop: `pretrain` with the stock optimizer."""

    def build(config, chunks, _report_first):
        return StockInOurPlace(stock_optimizer(config, chunks))

    with mock.patch.object(training, "_build_optimizer", build):
        return run_all(command_lines, cache)
