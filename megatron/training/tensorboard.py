"""Scalars for TensorBoard and Weights & Biases, under Megatron's names."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from megatron.training.config import LoggingConfig, TrainingConfig
from megatron.training.evaluation import perplexity
from megatron.training.metrics import flat_settings
from megatron.training.timers import Times
from megatron.training.train_step import Losses


class ScalarWriter:
    """Writes scalars of the rank that prints the log; without a directory and a project it does nothing."""

    def __init__(self, config: TrainingConfig, is_writer: bool) -> None:
        self._logging = config.logging
        self._world_size = config.world_size
        self._board = _open_tensorboard(config.logging) if is_writer and config.logging.tensorboard_dir else None
        self._wandb = _open_wandb(config) if is_writer and config.logging.wandb_project else None

    @property
    def is_open(self) -> bool:
        """Whether anything is written."""
        return self._board is not None or self._wandb is not None

    def is_due(self, iteration: int) -> bool:
        """Whether a step's scalars are written at this iteration."""
        return self.is_open and iteration % self._logging.tensorboard_log_interval == 0

    def step(self, iteration: int, samples: int, scalars: dict[str, float]) -> None:
        """Write the scalars of a step, again against consumed samples under `NAME vs samples`."""
        for name, value in scalars.items():
            if name == "loss-scale" and not self._logging.log_loss_scale_to_tensorboard:
                continue
            self._add(name, value, iteration)
            self._add_samples(name, value, samples)
        if self._logging.log_world_size_to_tensorboard:
            self._add("world-size", self._world_size, iteration)
            self._add_samples("world-size", self._world_size, samples)
        if self._wandb is not None:
            self._wandb.log({"samples vs steps": samples}, iteration)

    def timing(self, iteration: int, samples: int, seconds: float, tflops: float | None) -> None:
        """Write what the log line says about speed: `iteration-time` and `throughput`."""
        values = {"iteration-time": seconds}
        if tflops is not None:
            values["throughput"] = tflops
        for name, value in values.items():
            self._add(name, value, iteration)
            self._add_samples(name, value, samples)

    def timers(self, iteration: int, times: Times) -> None:
        """Write the slowest rank's seconds of each part of a step as `NAME-time`, with --log-timers-to-tensorboard."""
        if not self._logging.log_timers_to_tensorboard:
            return
        for name, seconds in times.items():
            self._add(f"{name}-time", max(seconds), iteration)

    def memory(self, iteration: int) -> None:
        """Write the GPU memory of this rank, in bytes."""
        if not (self.is_open and self._logging.log_memory_to_tensorboard and torch.cuda.is_initialized()):
            return
        self._add("mem-reserved-bytes", torch.cuda.memory_reserved(), iteration)
        self._add("mem-allocated-bytes", torch.cuda.memory_allocated(), iteration)
        self._add("mem-max-allocated-bytes", torch.cuda.max_memory_allocated(), iteration)

    def validation(self, iteration: int, samples: int, losses: Losses, split: str = "validation") -> None:
        """Write the losses of an evaluation, and their perplexity where asked for."""
        for name, loss in losses.items():
            self._add(f"{name} {split}", loss, iteration)
            self._add_samples(f"{name} {split}", loss, samples)
            if self._logging.log_validation_ppl_to_tensorboard:
                self._add(f"{name} {split} ppl", perplexity(loss), iteration)
                self._add_samples(f"{name} {split} ppl", perplexity(loss), samples)

    def close(self) -> None:
        """Write what is held back."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _add(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({name: value}, step)

    def _add_samples(self, name: str, value: float, samples: int) -> None:
        if self._board is not None:
            self._board.add_scalar(f"{name} vs samples", value, samples)


def _open_tensorboard(logging: LoggingConfig) -> Any:
    try:
        board = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ValueError(
            f"--tensorboard-dir {logging.tensorboard_dir} needs the package tensorboard, which is not installed: "
            "pip install tensorboard, or drop the flag"
        ) from None
    return board.SummaryWriter(log_dir=logging.tensorboard_dir, max_queue=logging.tensorboard_queue_size)


def _open_wandb(config: TrainingConfig) -> Any:
    logging = config.logging
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise ValueError(
            f"--wandb-project {logging.wandb_project} needs the package wandb, which is not installed: "
            "pip install wandb, or drop the flag"
        ) from None
    folder = logging.wandb_save_dir or os.path.join(config.checkpoint.save or ".", "wandb")
    os.makedirs(folder, exist_ok=True)
    wandb.init(
        project=logging.wandb_project,
        name=logging.wandb_exp_name,
        entity=logging.wandb_entity or None,
        dir=folder,
        config=flat_settings(config),
    )
    return wandb
