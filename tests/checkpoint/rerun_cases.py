"""Runs in which a result is wrong, once or always, on a machine that can be told to be another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from megatron.training import rerun, train_step
from tests.checkpoint.cases import Run, losses


class BadLoss:
    """Multiplies losses of the last rank by `factor`: that of micro-batch number `call` and the `times` - 1 after it.

    The gradients follow from the loss, so a step that is computed again must drop what the first pass has flushed.
    """

    def __init__(self, call: int, factor: float, times: int = 1) -> None:
        self._calls, self._factor, self._range = 0, factor, range(call, call + times)
        self._sum = train_step.sum_losses

    def __call__(self, mask: Any, values: torch.Tensor) -> Any:
        self._calls += 1
        is_here = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        factor = self._factor if is_here and self._calls in self._range else 1.0
        total, tokens, report = self._sum(mask, values * factor)
        return total, tokens, report


def train(argv: Sequence[str], bad: tuple[float, ...] | None = None, host: str = "one", **patches: Any) -> dict:
    """Train to the end or to a verdict. bad: arguments of `BadLoss`; host: this machine's name; patches: of Rerun."""
    with (
        mock.patch.object(rerun, "place_of", lambda device: (host, "GPU 0")),
        mock.patch.object(rerun, "SPIKE_SAMPLES", 3),
        mock.patch.multiple(rerun.Rerun, **patches) if patches else mock.patch.object(rerun, "SPIKE_FACTOR", 10.0),
        mock.patch.object(train_step, "sum_losses", train_step.sum_losses if bad is None else BadLoss(*bad)),
    ):
        run = Run(argv)
        try:
            run.train()
            return {
                "lines": run.lines,
                "losses": losses(run.lines),
                "digest": run.optimizer.state_digest(),
                "iteration": run.trainer.state.iteration,
                "verdict": run.trainer.verdict,
            }
        finally:
            run.close()


def without_fresh_batches(data: list) -> None:
    """Break a re-run: it goes on with the next micro-batches."""
    for iterator in data:
        iterator.begin()
