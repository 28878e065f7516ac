"""The training loop: steps, log lines, evaluations, and the seam for checkpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from deep_offload.optimizer.small_copies import read
from megatron.training.config import TrainingConfig
from megatron.training.data import DataSource, TrainingData, changed_epochs
from megatron.training.evaluation import evaluate, evaluation_lines, settled_parameters
from megatron.training.flops import flops_per_step
from megatron.training.host_memory import describe, read_host_memory
from megatron.training.launch import Ranks
from megatron.training.lifecycle import GarbageCollection, Profiling, StopWatch
from megatron.training.metrics import Interval, LogValues, datetime_line, log_line
from megatron.training.model import parameters_norm
from megatron.training.postmortem import PostMortem
from megatron.training.progress import ProgressLine, progress_file
from megatron.training.rerun import Rerun, Verdict
from megatron.training.run_record import RunRecord
from megatron.training.schedule import learning_rates
from megatron.training.side_files import SideFiles
from megatron.training.tensorboard import ScalarWriter
from megatron.training.timers import StepTimers, timer_lines
from megatron.training.train_step import ForwardStep, MicroBatches, StepResult, train_step


@dataclass(slots=True)
class TrainState:
    """How far a run has come: with weights, optimizer, learning rate and random numbers all that a resume needs."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


class Checkpointing(Protocol):
    """Where the loop hands itself over to be saved and restored. All calls are collective over all ranks."""

    @property
    def last_saved(self) -> int | None:
        """Iteration of the last checkpoint that is complete, None before the first."""
        ...

    def load(self, trainer: Trainer) -> None:
        """Restore weights, optimizer, scheduler and `trainer.state`, before any data is read."""
        ...

    def after_step(self, trainer: Trainer, stop_reason: str | None) -> None:
        """Save if it is time, or if the run ends now because of `stop_reason`."""
        ...

    def after_verdict(self, trainer: Trainer, verdict: Verdict) -> None:
        """Save the state before a step that was not done, if the verdict says so; the run ends now."""
        ...

    def finish(self, trainer: Trainer) -> None:
        """Save the end of a complete run and wait for what is still being written."""
        ...


class Trainer:
    """One run on this rank. It owns what is declared here; `state` is the part that changes and is saved."""

    # settings
    config: TrainingConfig
    ranks: Ranks
    device: torch.device

    # what is trained, and on what
    chunks: list[DistributedDataParallel]
    optimizer: DeepOffloadOptimizer
    scheduler: OptimizerParamScheduler
    data: TrainingData

    # progress
    state: TrainState
    stop_reason: str | None
    epochs: tuple[int, ...]
    """Passes over each training source (see DataReport): a loaded checkpoint's until `use`, then this run's."""

    def __init__(
        self,
        config: TrainingConfig,
        ranks: Ranks,
        device: torch.device,
        chunks: list[DistributedDataParallel],
        optimizer: DeepOffloadOptimizer,
        scheduler: OptimizerParamScheduler,
        checkpointing: Checkpointing | None,
        report: Callable[[str], None],
        postmortem: PostMortem | None = None,
    ) -> None:
        """report: prints a line on every rank it is called on. postmortem: is told of steps that are not finite."""
        self.config, self.ranks, self.device = config, ranks, device
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.state, self.stop_reason, self.epochs = TrainState(), None, ()
        self._checkpointing = checkpointing
        self._postmortem = postmortem
        # What goes to a terminal beside log lines: drawn by the rank that prints those.
        self._bottom = ProgressLine(
            sys.stdout, os.environ if ranks.is_last else {"TERM": "dumb"}, config.num_iterations
        )
        self._print = report
        mode, saves = config.lifecycle.rerun_mode, config.checkpoint.save is not None
        checks = config.optim.check_for_nan_in_loss_and_grad, config.lifecycle.check_for_spiky_loss
        self.rerun = None if mode == "disabled" else Rerun(mode, *checks, saves, self._report)
        self._valid: list[Any] | None = None
        self._writer = ScalarWriter(config, ranks.is_last)
        side_files = SideFiles(self._report)
        self._record = RunRecord(config, ranks.is_last, side_files)
        if config.logging.run_dir or config.offload.offload_trace:
            optimizer.keep_timelines(config.offload.offload_trace_steps)
        self._stop_watch = StopWatch(config.lifecycle, device)
        self._timers = StepTimers(config.logging.timing_log_level, chunks, device)
        self._garbage = GarbageCollection(config.lifecycle)
        self._profiling = Profiling(config.lifecycle, ranks.rank, config.logging.tensorboard_dir or ".")
        if checkpointing is not None:
            checkpointing.load(self)
        wanted = config.logging.log_progress and ranks.is_first
        self._progress = progress_file(config.checkpoint.save, wanted, ranks.world_size, side_files)
        self._noted = checkpointing.last_saved if checkpointing is not None else None  # what was loaded is no news

    def use(self, data: TrainingData, source: DataSource) -> None:
        """Take the data, which is built after a checkpoint has said where to go on."""
        for line in changed_epochs(self.epochs, source):
            self._say_first(f"> {line}")
        self.data, self.epochs = data, source.report.epochs
        self._forward = ForwardStep(data.shape, self.device)
        self._evaluates = source.num_samples[1] > 0
        self._tests = source.num_samples[2] > 0
        self._record.start(self.config, self.optimizer, [*self.config.notes, *source.notes])

    # -- the loop -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run until the last iteration or until something asks to stop (see `stop_reason`)."""
        state, total = self.state, self.config.num_iterations
        iterators = self.data.train_iterators(state.consumed_train_samples)
        if self.rerun is not None:
            iterators = self.rerun.iterators(iterators)
        self._garbage.before_training()
        interval = Interval()
        if self._progress is not None:
            self._progress.started(self._flops(state.consumed_train_samples))
        if self.config.logging.eval_at_start and state.iteration == 0 and self._evaluates:
            interval.leave_out(self.evaluate_and_report(f"iteration {state.iteration}"))
        while state.iteration < total and self.stop_reason is None:
            batch_size = self.config.batch_size_at(state.consumed_train_samples)
            result = self._step(iterators, batch_size)
            if self.verdict is not None:
                self._end_by(self.verdict)
                break
            state.iteration += 1
            state.consumed_train_samples += batch_size
            if result is not None:
                if not result.is_skipped:
                    self.scheduler.step(increment=batch_size)
                interval.add(result)
                interval = self._log(result, interval, batch_size)
                self._bottom.show(state.iteration, next(iter(result.losses.values()), None))
            self._garbage.after_step(state.iteration)
            if self._evaluates and state.iteration % self.config.logging.eval_interval == 0:
                interval.leave_out(self.evaluate_and_report(f"iteration {state.iteration}"))
            self.stop_reason = self._stop_watch.reason(state.iteration)
            if self._checkpointing is not None:
                started = time.monotonic()
                self._checkpointing.after_step(self, self.stop_reason)
                self._note_checkpoint()
                interval.leave_out(time.monotonic() - started)
                self._record.checkpoint(self._checkpointing.last_saved, time.monotonic() - started)
        self._bottom.erase()

    def _step(self, iterators: list[Any], batch_size: int) -> StepResult | None:
        """Do the next step; None if --iterations-to-skip names it, whose samples are read and thrown away."""
        number, lifecycle = self.state.iteration + 1, self.config.lifecycle
        batches = self._micro_batches(batch_size)
        if number in lifecycle.iterations_to_skip:
            for iterator in iterators:
                for _ in range(batches.num_microbatches if iterator is not None else 0):
                    next(iterator)
            self._say_first(f"iteration {number} is skipped, as --iterations-to-skip says")
            return None
        self._empty_cache(2)
        self._profiling.before_step(number)
        parts = self._forward, iterators, self.chunks, self.optimizer, batches
        result = train_step(*parts) if self.rerun is None else self.rerun.step(number, *parts)
        if self._postmortem is not None:
            cause = None if self.verdict is None else self.verdict.cause
            said = self._postmortem.after_step(self, result.losses, result.grad_norm, batch_size, cause)
            if said is not None:
                self._say_first(f"WARNING: iteration {number} was not finite: {said}")
        self._profiling.after_step(number)
        self._empty_cache(1)
        return result

    @property
    def verdict(self) -> Verdict | None:
        """Why the run ends before its next step, where results cannot be right; None while it goes on."""
        return None if self.rerun is None else self.rerun.verdict

    def _end_by(self, verdict: Verdict) -> None:
        self.stop_reason = verdict.cause
        if self._checkpointing is not None:
            self._checkpointing.after_verdict(self, verdict)
            self._note_checkpoint()

    def _micro_batches(self, batch_size: int) -> MicroBatches:
        size = self.config.batch.micro_batch_size
        return MicroBatches(batch_size // (size * self.config.data_parallel_size), size, self.config.model.seq_length)

    def _empty_cache(self, level: int) -> None:
        if self.device.type == "cuda" and self.config.lifecycle.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()

    # -- log ----------------------------------------------------------------------------------------------------

    def _log(self, result: StepResult, interval: Interval, batch_size: int) -> Interval:
        """Print the line and write the scalars that are due; returns the interval to go on with."""
        iteration, logging = self.state.iteration, self.config.logging
        is_due = iteration % logging.log_interval == 0 or iteration == 1
        draws = bool(logging.tensorboard_dir or logging.wandb_project)
        is_drawn = draws and iteration % logging.tensorboard_log_interval == 0
        norm = self._parameters_norm() if logging.log_params_norm and (is_due or is_drawn) else None
        if self.ranks.is_last:
            self._draw(result, batch_size, norm)
        if not is_due:
            return interval
        seconds = interval.seconds_per_iteration()
        times = self._timers.take(interval.num_iterations)
        tflops = self._tflops(batch_size, seconds) if logging.log_throughput else None
        if self.ranks.is_last:
            rate, decoupled = learning_rates(self.optimizer)
            values = LogValues(
                iteration=iteration,
                num_iterations=self.config.num_iterations,
                consumed_samples=self.state.consumed_train_samples,
                seconds_per_iteration=seconds,
                tflops_per_gpu=tflops,
                learning_rate=rate,
                decoupled_learning_rate=decoupled,
                batch_size=batch_size,
                loss_scale=self._loss_scale(),
                grad_norm=result.grad_norm,
                num_zeros=result.num_zeros,
                params_norm=norm,
                extra=[*self.optimizer.last_step_fields(), ("host memory (GiB)", describe(read_host_memory()))],
            )
            self._report(log_line(values, interval, datetime.now()))
            for line in timer_lines(times, logging.timing_log_option):
                self._report(line)
            self._record.step(values, interval, times, self.optimizer)
            self._writer.timing(iteration, self.state.consumed_train_samples, seconds, tflops)
            self._writer.timers(iteration, times)
        if iteration == 1:
            self._say_memory()
        return Interval()

    def _draw(self, result: StepResult, batch_size: int, norm: float | None) -> None:
        iteration, samples = self.state.iteration, self.state.consumed_train_samples
        if not self._writer.is_due(iteration):
            return
        rate, decoupled = learning_rates(self.optimizer)
        scalars: dict[str, float] = {"learning-rate": rate}
        if decoupled is not None:
            scalars["decoupled-learning-rate"] = decoupled
        scalars["batch-size"] = batch_size
        scalars.update(result.losses)
        scalars["loss-scale"] = self._loss_scale()
        scalars["grad-norm"] = result.grad_norm
        for name, value in (("num-zeros", result.num_zeros), ("params-norm", norm)):
            if value is not None:
                scalars[name] = value
        memory = read_host_memory()
        scalars["host-used-bytes"] = memory.used
        if memory.limit is not None:
            scalars["host-limit-bytes"] = memory.limit
        self._writer.step(iteration, samples, scalars)
        self._writer.memory(iteration)

    def _loss_scale(self) -> float:
        # Without one there is no reason to wait for the device to read a 1.
        has_scale = self.config.precision.fp16 or self.config.precision.loss_scale is not None
        return read(self.optimizer.get_loss_scale()) if has_scale else 1.0

    def _parameters_norm(self) -> float:
        with settled_parameters(self.chunks, self.optimizer):
            return parameters_norm(self.chunks)

    def _tflops(self, batch_size: int, seconds: float) -> float:
        return self._flops(batch_size) / (seconds * 1e12 * self.config.world_size)

    def _flops(self, num_samples: int) -> float:
        padded = self.config.data.padded_vocab_size
        assert padded is not None, "the vocabulary is known before the model is built"
        return flops_per_step(self.config.model, padded, num_samples)

    def _report(self, line: str) -> None:
        self._bottom.erase()
        self._print(line)

    def _note_checkpoint(self) -> None:
        """Write progress.txt if a checkpoint was completed since the last call."""
        saved = self._checkpointing.last_saved if self._checkpointing is not None else None
        if self._progress is None or saved is None or saved == self._noted:
            return
        self._noted = saved
        samples = self.config.samples_after(saved)
        self._progress.saved(saved, self._flops(samples), samples * self.config.model.seq_length)

    def _say_memory(self) -> None:
        if self.device.type != "cuda":
            return
        names = ("allocated", "max allocated", "reserved", "max reserved")
        reads = (
            torch.cuda.memory_allocated,
            torch.cuda.max_memory_allocated,
            torch.cuda.memory_reserved,
            torch.cuda.max_memory_reserved,
        )
        text = " | ".join(f"{name}: {read() / 2**20:.1f}" for name, read in zip(names, reads))
        self._say_first(f"[Rank {self.ranks.rank}] (after 1 iterations) memory (MB) | {text}")

    # -- evaluation ---------------------------------------------------------------------------------------------

    def evaluate_and_report(self, prefix: str) -> float:
        """Evaluate on the next validation batches, print and draw the losses; returns the seconds it took."""
        if self._valid is None:
            self._valid = self.data.valid_iterators(self.state.consumed_valid_samples)
        seconds = self._evaluate(self._valid, prefix, "validation")
        self.state.consumed_valid_samples += self.config.logging.eval_iters * self.config.batch.global_batch_size
        return seconds

    def _evaluate(self, iterators: list[Any], prefix: str, split: str) -> float:
        started = time.monotonic()
        self._garbage.around_evaluation()
        batches = self._micro_batches(self.config.batch.global_batch_size)
        iterations = self.config.logging.eval_iters
        with self._timers.paused():
            losses = evaluate(self._forward, iterators, self.chunks, self.optimizer, batches, iterations)
        self._garbage.around_evaluation()
        if self.ranks.is_last:
            for line in evaluation_lines(prefix, losses):
                self._report(line)
            self._record.evaluation(self.state.iteration, split, losses)
            self._writer.validation(self.state.iteration, self.state.consumed_train_samples, losses, split)
        return time.monotonic() - started

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last iteration: the last evaluations; after an early stop: say why."""
        iteration = self.state.iteration
        if self.stop_reason is not None:
            self._say_first(f"training stops after iteration {iteration}: {self.stop_reason}")
            return
        self._say_first(datetime_line("after training is done"))
        if self._evaluates:
            self.evaluate_and_report(f"iteration {iteration} on validation set")
        if self._checkpointing is not None:
            self._checkpointing.finish(self)
            self._note_checkpoint()
            self._record.checkpoint(self._checkpointing.last_saved, 0.0)
        if self._tests:
            self._evaluate(self.data.test_iterators(), f"iteration {iteration} on test set", "test")

    def end_record(self) -> None:
        """Write the last line and the trace of --run-dir; synchronizes where there is one."""
        self._record.end(self.optimizer, self.stop_reason)

    def close(self) -> None:
        """Release what is not the optimizer's: writers, signal watch, loaders."""
        self._garbage.close()
        self._profiling.close()
        self._stop_watch.close()
        self._writer.close()
        self._record.close()
        self._valid = None

    def _say_first(self, line: str) -> None:
        if self.ranks.is_first:
            self._report(line)
