"""What a run leaves behind when it meets a number that is not finite, runs out of GPU memory, or fails.

One directory: the last log lines, the first bad parameter, the samples, memory, settings, and the command that replays
the step from the last checkpoint.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deep_offload.model.residency import is_automatic
from deep_offload.optimizer.megatron_names import named_params
from deep_offload.optimizer.ranks import from_all_ranks
from megatron.training.checkpointing_layout import read_tracker
from megatron.training.checkpointing_save import saved_arguments
from megatron.training.config import TrainingConfig
from megatron.training.host_memory import read_host_memory
from megatron.training.side_files import not_written

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

NUM_LINES = 20


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose loss or gradient is not finite: samples [first, end) of the training order."""

    iteration: int
    first_sample: int
    end_sample: int
    losses: dict[str, float]
    grad_norm: float


class PostMortem:
    """Collects log lines, and writes at most one directory for each cause."""

    def __init__(self, config: TrainingConfig, rank: int, argv: Sequence[str] | None = None) -> None:
        """argv: of the program, for the replay command (default: this process's)."""
        self._config = config
        self._rank = rank
        self._argv = list(sys.argv if argv is None else argv)
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._written: set[str] = set()
        self._planned_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def keep(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """Return `report` with every line kept for the directory."""

        def report_and_keep(line: str) -> None:
            self._lines.append(line)
            report(line)

        return report_and_keep

    def plan(self, read: Callable[[], tuple[int, int]]) -> None:
        """Remember how to read the (host, device) bytes of optimizer state, which may change while a run goes on."""
        self._planned_bytes = read

    def after_step(
        self,
        trainer: Trainer,
        losses: dict[str, float],
        grad_norm: float,
        batch_size: int,
        cause: str | None = None,
    ) -> str | None:
        """Write once if the step was not finite, unless a dynamic loss scale looks for its value; collective then.

        cause: what is known of it (default: that the gradient is not finite). The gradients of the step must still be
        in DDP's buffers. Returns on the first rank where the directory is, or why it could not be written.
        """
        precision = self._config.precision
        is_overflow = precision.fp16 and precision.loss_scale is None
        if math.isfinite(grad_norm) or is_overflow or "not finite" in self._written:
            return None
        bad = BadStep(
            trainer.state.iteration + 1,
            trainer.state.consumed_train_samples,
            trainer.state.consumed_train_samples + batch_size,
            losses,
            grad_norm,
        )
        everywhere = from_all_ranks((first_bad_parameter(trainer), losses, list(self._lines)))
        found = [(rank, name) for rank, (name, _, _) in enumerate(everywhere) if name is not None]
        known = next((values for _, values, _ in reversed(everywhere) if values), losses)
        self._written.add("not finite")
        if self._rank != 0:
            return None
        self._lines.extend(everywhere[-1][2] if len(everywhere) > 1 else [])  # the last rank prints the log
        if cause is None:
            cause = f"the gradient of iteration {bad.iteration} is not finite ({grad_norm}); the update was skipped"
        lines = [
            f"cause: {cause}",
            f"losses: {known}",
            "first bad parameter: "
            + (f"{found[0][1]} (rank {found[0][0]})" if found else "none: only sums are not finite"),
            f"samples: {bad.first_sample} to {bad.end_sample - 1} of the training order",
        ]
        folder = self._folder(f"nonfinite_iteration{bad.iteration}")
        try:
            self._write(folder, bad.iteration, lines)
        except OSError as error:
            return not_written(folder, error)
        return f"see {folder}"

    def on_error(self, error: BaseException, iteration: int) -> Path | None:
        """Write what is known when an error ends the run; not collective, never raises."""
        if isinstance(error, SystemExit | KeyboardInterrupt) or (
            isinstance(error, ValueError) and iteration == 0  # a sentence for the user about settings
        ):
            return None
        kind = "out of GPU memory" if isinstance(error, torch.cuda.OutOfMemoryError) else type(error).__name__
        lines = [f"cause: {kind} in iteration {iteration + 1}: {error}"]
        advice = self.advice(error)
        if advice is not None:
            lines.append(f"advice: {advice}")
        folder = self._folder(f"error_rank{self._rank}")
        try:
            self._write(folder, iteration + 1, lines)
        except OSError:
            return None
        return folder

    def advice(self, error: BaseException) -> str | None:
        """Return what to change after an error that settings can prevent, None for others."""
        if not isinstance(error, torch.cuda.OutOfMemoryError):
            return None
        device = self._planned_bytes()[1] / 2**30
        model = "lower --micro-batch-size, or add --recompute-granularity full --recompute-method uniform"
        if not self._config.offload.interleaved_offload:
            return (
                f"GPU memory ran out, {device:.2f} GiB of it are optimizer state: add --interleaved-offload, and "
                f"--offload-device-budget-gib for what may stay, or {model}"
            )
        if is_automatic(self._config.offload):
            return (
                f"GPU memory ran out, {device:.2f} GiB of it are optimizer state and staging slots, what seemed to "
                f"fit: give --offload-device-budget-gib with less than that, or {model}"
            )
        return (
            f"GPU memory ran out, {device:.2f} GiB of it are optimizer state and staging slots: lower "
            f"--offload-device-budget-gib (or --offload-resident-fraction and --offload-num-slots) by what is missing, "
            f"or {model}"
        )

    def _folder(self, name: str) -> Path:
        save = self._config.checkpoint.save
        return Path(save or ".") / f"postmortem_{time.strftime('%Y%m%d_%H%M%S')}_{name}"

    def _write(self, folder: Path, iteration: int, lines: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = [*lines, *self._memory_lines(), f"replay: {self.replay_command(iteration)}"]
        (folder / "report.txt").write_text("\n".join(text) + "\n")
        (folder / "log.txt").write_text("\n".join(self._lines) + "\n")
        (folder / "settings.json").write_text(
            json.dumps(saved_arguments(self._config), indent=1, sort_keys=True) + "\n"
        )

    def _memory_lines(self) -> list[str]:
        memory = read_host_memory()
        limit = "none" if memory.limit is None else f"{memory.limit / 2**30:.3f} GiB"
        host, device = (value / 2**30 for value in self._planned_bytes())
        lines = [
            f"host memory: {memory.resident / 2**30:.3f} GiB resident, peak {memory.peak / 2**30:.3f}, limit {limit}",
            f"planned optimizer state: {host:.3f} GiB host, {device:.3f} GiB device",
        ]
        if torch.cuda.is_initialized():
            allocated, peak, reserved = (
                read() / 2**30
                for read in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved)
            )
            lines.append(f"GPU memory: {allocated:.3f} GiB allocated, peak {peak:.3f}, reserved {reserved:.3f}")
        return lines

    def replay_command(self, iteration: int) -> str:
        """Return the command that loads the newest checkpoint and stops after `iteration`, saving nothing."""
        words = _without(self._argv, {"--save", "--load", "--ckpt-step", "--exit-interval", "--save-interval"})
        save = self._config.checkpoint.save
        tracked = read_tracker(Path(save)) if save else None
        if tracked is not None:
            words += ["--load", str(save), "--ckpt-step", str(tracked)]
        return "python " + shlex.join([*words, "--exit-interval", str(iteration), "--log-interval", "1"])


def _without(words: Sequence[str], flags: set[str]) -> list[str]:
    out, skips = [], False
    for word in words:
        if word.startswith("--"):
            skips = word.partition("=")[0] in flags
        if not skips:
            out.append(word)
    return out


def first_bad_parameter(trainer: Trainer) -> str | None:
    """Return the first parameter, in forward order, whose gradient on this rank is not finite."""
    for named in named_params(trainer.chunks):
        gradient = getattr(named.param, "main_grad", None)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            return named.name
    return None
