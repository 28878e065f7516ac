"""Checkpoints of a run: when to save and what to restore. How is in checkpointing_save.py and checkpointing_load.py."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.training import checkpointing_foreign as foreign
from megatron.training import checkpointing_load as load
from megatron.training.checkpointing_async import AsyncSave, Retention, has_room_for_copy
from megatron.training.checkpointing_format import CheckpointReader
from megatron.training.checkpointing_rng import rng_entry, rng_key, set_rng
from megatron.training.checkpointing_save import (
    MODEL_METADATA,
    OUR_KEY,
    SaveItem,
    SaveResult,
    common_state,
    model_state,
    own_items,
    save_checkpoint,
)
from megatron.training.checkpointing_schedule import restore_schedule
from megatron.training.checkpointing_status import (
    Outcome,
    cost_lines,
    disk_bytes_per_second,
    memory_figures,
    write_status,
)
from megatron.training.config import CheckpointConfig, TrainingConfig
from megatron.training.data import valid_position
from megatron.training.exit_codes import DISAMBIGUATE, FINISHED, code_of
from megatron.training.rerun import Suspect, Verdict

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


class Checkpoints:
    """Saves and restores a trainer as the settings say. All calls are collective over all ranks."""

    def __init__(self, config: CheckpointConfig, report: Callable[[str], None], vocab_size: int | None = None) -> None:
        """report: prints a line; called on the first rank only. vocab_size: the tokenizer's, saved for digests."""
        self._config = config
        self._vocab_size = vocab_size
        self._report_line = report
        self._last_saved: int | None = None
        self._iteration = 0
        self._load_began = 0.0
        self._pending: AsyncSave | None = None
        self.last_error: str | None = None
        """Why the last save failed; None if it did not."""

    @property
    def last_saved(self) -> int | None:
        """Iteration of the last checkpoint that is complete, None before the first."""
        return self._last_saved

    @property
    def iteration(self) -> int:
        """The last iteration that is known to be done."""
        return self._iteration

    # -- saving -------------------------------------------------------------------------------------------------------

    def after_step(self, trainer: Trainer, stop_reason: str | None) -> None:
        """Save if it is time, or if the run ends now because of `stop_reason`."""
        config, iteration = self._config, trainer.state.iteration
        self._iteration = iteration
        if config.save is None or config.save_interval is None:
            return
        self._poll(trainer, block=False)
        if iteration % config.save_interval == 0 or stop_reason is not None:
            self._save(trainer)
        if stop_reason is not None:
            self._poll(trainer, block=True)
            self._end(trainer, "resumable", stop_reason)

    def after_verdict(self, trainer: Trainer, verdict: Verdict) -> None:
        """Save the state before a step that was not done, if the verdict says so; the run ends now."""
        if self._config.save is None:
            return
        if verdict.saves:
            self._save(trainer, again=trainer.rerun is not None and trainer.rerun.suspect is not None)
        self._poll(trainer, block=True)
        outcome: Outcome = "resumable" if verdict.code == DISAMBIGUATE else "failed"
        self._end(trainer, outcome, verdict.cause, verdict.code)

    def finish(self, trainer: Trainer) -> None:
        """Save the end of a complete run and wait for what is still being written."""
        if self._config.save is not None:
            if trainer.state.iteration > 0:
                self._save(trainer)
            self._poll(trainer, block=True)
            self._end(trainer, "finished", "the last iteration is done")

    def fail(self, error: BaseException) -> None:
        """On a rank that fails: say so in SAVE/status. Not collective; raises nothing."""
        if self._config.save is not None:
            with contextlib.suppress(OSError):
                lines = str(error).splitlines() or [""]
                cause = f"{type(error).__name__}: {lines[0]}"
                write_status(Path(self._config.save), "failed", cause, self._iteration, code_of(error))

    def _end(self, trainer: Trainer, outcome: Outcome, cause: str, code: int = FINISHED) -> None:
        """Write SAVE/status. Raises RuntimeError if the run's last state could not be saved."""
        if self.last_error is not None:
            raise RuntimeError(f"the last checkpoint could not be saved: {self.last_error}")
        if trainer.ranks.is_first and self._config.save is not None:
            write_status(Path(self._config.save), outcome, cause, trainer.state.iteration, code)

    def _save(self, trainer: Trainer, again: bool = False) -> None:
        """again: even if there is a checkpoint of this iteration, which lacks something."""
        config, iteration = self._config, trainer.state.iteration
        has_it = iteration in (self._last_saved, self._pending and self._pending.iteration)
        if config.save is None or (has_it and not again):
            return
        self._poll(trainer, block=True)  # one save at a time
        trainer.optimizer.synchronize()
        if config.async_save:
            self._start_async(trainer)
            return
        before = memory_figures()
        result = save_checkpoint(
            Path(config.save),
            iteration,
            lambda: self._items(trainer),
            lambda: self._common(trainer),
            keep_last=config.keep_last,
            retain_interval=config.save_retain_interval,
        )
        self._report_save(result)
        self._report(f"> memory before and after the save: {before} and {memory_figures()}")

    def _start_async(self, trainer: Trainer) -> None:
        config = self._config
        started = time.monotonic()
        items, params = list(self._items(trainer)), trainer.optimizer.param_state
        copy = has_room_for_copy(16 * sum(r.end - r.start for r in params.ranges()), trainer.ranks.local_world_size)
        retention = Retention(config.keep_last, config.save_retain_interval)
        self._pending = AsyncSave(
            Path(str(config.save)),
            trainer.state.iteration,
            items,
            self._common(trainer),
            retention,
            trainer.device,
            copy,
        )
        trainer.optimizer.before_update = self._pending.wait_for_reader
        how = "from a copy" if copy else "from the state itself, the next update waits for it (no room for a copy)"
        self._report(
            f"saving checkpoint of iteration {trainer.state.iteration} beside training, {how}: training stood still "
            f"for {time.monotonic() - started:.2f} s"
        )

    def _poll(self, trainer: Trainer, block: bool) -> None:
        """Finish the save that is under way, if it is done or `block` says to wait."""
        if self._pending is None:
            return
        result = self._pending.poll(block)
        if result is not None:
            self._pending = None
            trainer.optimizer.before_update = None
            self._report_save(result)

    def _items(self, trainer: Trainer) -> Iterator[SaveItem]:
        objects = [] if self._config.no_save_rng else [rng_entry()]
        state = model_state(trainer.chunks, MODEL_METADATA)
        yield from own_items(state, trainer.optimizer.param_state, not self._config.no_save_optim, objects)

    def _common(self, trainer: Trainer) -> dict[str, Any]:
        state = trainer.state
        progress = {
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_train_samples,
            "consumed_valid_samples": state.consumed_valid_samples,
        }
        ours = {
            "data": describe_data(trainer.config),
            "epochs": list(trainer.epochs),
            "vocab_size": self._vocab_size,
        }
        if trainer.rerun is not None and trainer.rerun.suspect is not None:
            ours["rerun"] = trainer.rerun.suspect.as_dict()
        with_optimizer = not self._config.no_save_optim
        return common_state(trainer.config, trainer.optimizer, trainer.scheduler, progress, ours, with_optimizer)

    def _report_save(self, result: SaveResult) -> None:
        self.last_error = result.error
        if result.error is None:
            self._last_saved = result.iteration
            self._report(
                f"saved checkpoint of iteration {result.iteration} to {self._config.save}: "
                f"{result.num_bytes / 2**30:.3f} GiB in {result.seconds:.2f} s, during which training stood still"
            )
            return
        self._report(
            f"ERROR: the checkpoint of iteration {result.iteration} was NOT saved to {self._config.save} "
            f"({result.error}); training goes on, older checkpoints are as they were"
        )

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, trainer: Trainer) -> None:
        """Restore weights, optimizer, scheduler and `trainer.state`, before any data is read.

        Raises ValueError, one sentence, for a checkpoint that is damaged, dangerous or does not fit.
        """
        self._restore(trainer)
        if self._config.save is not None:
            self._say_cost(trainer)

    def _say_cost(self, trainer: Trainer) -> None:
        """Print what saves will cost, and mark the run as running."""
        params = trainer.optimizer.param_state
        state_bytes = 0 if self._config.no_save_optim else 12
        own = sum((r.end - r.start) * (state_bytes + params.params[r.number].element_size()) for r in params.ranges())
        total = torch.tensor([own], dtype=torch.int64, device=trainer.device)
        dist.all_reduce(total)
        if not trainer.ranks.is_first:
            return
        root, num_bytes = Path(str(self._config.save)), int(total.item())
        try:
            speed = disk_bytes_per_second(root, num_bytes)
            handles = trainer.config.lifecycle.exit_signal_handler
            for line in cost_lines(root, num_bytes, speed, self._config.keep_last, handles):
                self._report_line(line)
            write_status(root, "running", "", trainer.state.iteration)
        except OSError as error:
            self._report_line(
                f"WARNING: nothing can be written to --save {root} now ({error.strerror}): saves may fail"
            )

    def _restore(self, trainer: Trainer) -> None:
        config = self._config
        place, finetune = None, config.finetune
        if config.load is not None:
            place = load.find(config.load, config.ckpt_step)
        if place is None and config.pretrained_checkpoint is not None:
            place, finetune = load.find(config.pretrained_checkpoint, None), True
        if place is None:
            self._nothing_found()
            return
        self._report(f"loading checkpoint {place.folder} ...")
        self._load_began = time.monotonic()
        finetune = finetune or place.iteration == "release"
        if load.agree(lambda: foreign.check_format(place.folder)) == "torch":
            files = load.agree(lambda: foreign.read_torch_files(place.folder))
            load.agree(lambda: foreign.load_torch_weights(files, trainer.chunks, trainer.optimizer.param_state))
            trainer.optimizer.resume(0, None)
            self._report(
                "> loaded weights from Megatron's old torch format, which has no other state that is used here"
            )
            self._restore_run(trainer, place, files, finetune, None)
            return
        if not load.verify(place.folder):
            self._report(f"{place.folder} has no checksums (another program wrote it): only sizes were compared")
        common = load.agree(lambda: load.read_common(place.folder))
        self._load(trainer, place, common, finetune)

    def _nothing_found(self) -> None:
        config = self._config
        if config.load is None and config.pretrained_checkpoint is None:
            return
        where = config.load if config.load is not None else config.pretrained_checkpoint
        if config.exit_on_missing_checkpoint:
            raise RuntimeError(f"--load {where} holds no checkpoint, and --exit-on-missing-checkpoint is given")
        self._report(f"WARNING: {where} holds no checkpoint: training starts from random weights")

    def _load(self, trainer: Trainer, place: load.Found, common: dict[str, Any], finetune: bool) -> None:
        config, params = self._config, trainer.optimizer.param_state
        reader = load.agree(lambda: CheckpointReader(place.folder))
        trainer.optimizer.synchronize()
        metadata = common.get("content_metadata") or MODEL_METADATA
        state = model_state(trainer.chunks, metadata)
        wants_state = not finetune and not config.no_load_optim
        what = "weights and optimizer"
        if wants_state and load.has_training_state(reader):
            load.agree(lambda: load.load_training_state(reader, state, params))
            groups = common["optimizer"]["optimizer"]["param_groups"]
            steps = [int(g["step"]) for g in groups if g.get("step") is not None]
            trainer.optimizer.resume(max(steps, default=0), common["optimizer"].get("grad_scaler"))
        elif wants_state and foreign.has_bucket_state(reader):
            load.agree(lambda: load.load_weights_alone(reader, state, params))  # what no optimizer trains
            trainer.optimizer.resume(*load.agree(lambda: foreign.load_bucket_state(reader, params)))
        else:
            load.agree(lambda: load.load_weights_alone(reader, state, params))
            trainer.optimizer.resume(0, None)
            what = "weights, the optimizer starts anew"
            wants_state = False
        if wants_state and config.save is not None and place.folder.parent.resolve() == Path(config.save).resolve():
            self._last_saved = int(place.iteration)  # a run that has nothing left to do need not save it again
        self._report(f"> loaded {what}, in {time.monotonic() - self._load_began:.2f} s")
        self._restore_run(trainer, place, common, finetune, reader)

    def _restore_run(
        self,
        trainer: Trainer,
        place: load.Found,
        common: dict[str, Any],
        finetune: bool,
        reader: CheckpointReader | None,
    ) -> None:
        """Iteration, samples, schedule and random numbers, unless the run starts at 0."""
        lines: list[str] = []
        if finetune:
            lines.append("iteration and samples start at 0")
        else:
            self._restore_progress(trainer, place, common, lines)
            self._iteration = trainer.state.iteration
            if not trainer.config.lifecycle.skip_train:  # which has no schedule
                saved = common.get("opt_param_scheduler", common.get("lr_scheduler"))  # Megatron's name of before
                consumed = trainer.state.consumed_train_samples
                lines += restore_schedule(trainer.scheduler, saved, self._config, consumed)
            if reader is not None and not self._config.no_load_rng:
                self._restore_rng(reader, lines)
        for line in lines:
            self._report(f"> {line}")
        trainer.optimizer.synchronize()

    def _restore_progress(self, trainer: Trainer, place: load.Found, common: dict[str, Any], lines: list[str]) -> None:
        state, args = trainer.state, common.get("args", Namespace())
        iteration = common.get("iteration", place.iteration)
        state.iteration = int(iteration)
        ours = common.get(OUR_KEY, {})
        default = trainer.config.samples_after(state.iteration)
        saved = {name: ours.get(name, getattr(args, name, None)) for name in _PROGRESS}
        consumed, valid = (saved[name] for name in _PROGRESS)
        state.consumed_train_samples = default if consumed is None else int(consumed)
        lines.append(f"going on after iteration {state.iteration}, {state.consumed_train_samples} samples")
        had = 0 if valid is None else int(valid)
        state.consumed_valid_samples = valid_position(trainer.config, state.iteration, had)
        if state.consumed_valid_samples != had and trainer.config.logging.eval_iters > 0:
            lines.append(f"validation starts at its first sample again, not after the {had} that were read")
        lines += changed_data(ours.get("data"), describe_data(trainer.config))
        trainer.epochs = tuple(ours.get("epochs", ()))
        if ours.get("rerun"):
            suspect = Suspect.of(ours["rerun"])
            what = f"was saved because of iteration {suspect.iteration}: {suspect.what}, on {suspect.names()}"
            if trainer.rerun is None:
                lines.append(f"WARNING: the checkpoint {what}; --rerun-mode validate_results would look into it")
            else:
                trainer.rerun.suspect = suspect
                lines.append(f"the checkpoint {what}; the step is computed on this machine now")

    def _restore_rng(self, reader: CheckpointReader, lines: list[str]) -> None:
        key = rng_key()
        has_key = key in reader.objects()
        if has_key:
            load.agree(lambda: set_rng(reader.read_object(key)))
        elif any(name.startswith("rng_state/") for name in reader.objects()):
            lines.append("random numbers start anew: they were saved with other tensor or pipeline parallel sizes")
        else:
            lines.append("random numbers start anew: the checkpoint has none")

    def _report(self, line: str) -> None:
        if dist.get_rank() == 0:
            self._report_line(line)


_PROGRESS = ("consumed_train_samples", "consumed_valid_samples")


# Settings beside the data's names; checkpoints of before lack them, and then nothing is known to have changed.
_ORDER = ("seed", "seq_length", "dataloader_type", "sft")


def describe_data(config: TrainingConfig) -> dict[str, Any]:
    """Return what decides which sample comes when, to be compared at a resume."""
    names = (
        "data_path",
        "data_args_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "split",
        "mock_data",
    )
    data = config.data
    values = {name: getattr(data, name, None) for name in names}
    named = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v}
    order = (config.lifecycle.seed, config.model.seq_length, data.dataloader_type, data.sft)
    return named | dict(zip(_ORDER, order))


def changed_data(saved: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """Return a line for each setting of the data that differs from the checkpoint's."""
    if saved is None:
        return []
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        if name in _ORDER and name not in saved:
            continue
        if saved.get(name) != now.get(name):
            flag = "--" + name.replace("_", "-")
            lines.append(
                f"WARNING: {flag} was {_words(saved.get(name))} and is {_words(now.get(name))}: samples that were "
                "seen may come again and others never"
            )
    return lines


def _words(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "given" if value else "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def saved_settings(config: CheckpointConfig) -> dict[str, object]:
    """Return the arguments of the checkpoint that `config` names, for --use-checkpoint-args; no process group needed.

    Raises ValueError, one sentence, where there is none.
    """
    from megatron.training.checkpointing_layout import find_checkpoint

    place = find_checkpoint(Path(config.load or ""), config.ckpt_step)
    if place is None:
        raise ValueError(f"--use-checkpoint-args: --load {config.load} holds no checkpoint: name another directory")
    args = load.read_common(place[0]).get("args")
    if args is None:
        raise ValueError(f"--use-checkpoint-args: {place[0]} has no arguments in it: give the model's shape as flags")
    return dict(vars(args)) if isinstance(args, Namespace) else dict(args)
