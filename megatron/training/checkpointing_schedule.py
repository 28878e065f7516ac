"""The learning rate's and weight decay's schedule after a load: the run's own formula, or the checkpoint's."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.config import CheckpointConfig

_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters (or -samples, -fraction)",
    "lr_decay_steps": "--lr-decay-iters (or --train-iters)",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay (or --weight-decay)",
    "end_wd": "--end-weight-decay (or --weight-decay)",
    "wd_incr_steps": "--train-iters",
    "wd_incr_style": "--weight-decay-incr-style",
}
_OLD_NAMES = {"start_lr": "max_lr", "warmup_iter": "lr_warmup_steps", "warmup_steps": "lr_warmup_steps"}
_OLD_NAMES |= {"end_iter": "lr_decay_steps", "decay_steps": "lr_decay_steps", "decay_style": "lr_decay_style"}
_OLD_NAMES |= {"num_iters": "num_steps"}


def restore_schedule(
    scheduler: OptimizerParamScheduler, saved: dict[str, Any] | None, config: CheckpointConfig, consumed_samples: int
) -> list[str]:
    """Go on where the checkpoint's schedule stood; collective only in that all ranks do the same. Returns warnings.

    consumed_samples: of the training so far, where a run stands whose checkpoint has no schedule (saved is None).
    A formula that differs needs --override-opt_param-scheduler (this run's counts) or
    --use-checkpoint-opt_param-scheduler (the checkpoint's counts); else ValueError names the first difference.
    Rates and decay of the next step are set from the formula that counts, in every parameter group.
    """
    if saved is None:
        return _go_on_at(scheduler, consumed_samples)
    saved = {_OLD_NAMES.get(name, name): value for name, value in saved.items()}
    names = [name for name in _FLAGS if name in saved and name not in _without_effect(scheduler)]
    if config.use_checkpoint_opt_param_scheduler:
        for name in names:
            setattr(scheduler, name, saved[name])
        for group in scheduler.optimizer.param_groups:
            # Groups with rates of their own (--decoupled-lr) keep theirs.
            if not group.get("is_decoupled_lr", False):
                group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
    elif not config.override_opt_param_scheduler:
        for name in names:
            mine = getattr(scheduler, name)
            if saved[name] != mine:
                raise ValueError(
                    f"{_FLAGS[name]} gives {mine} and the checkpoint was saved with {saved[name]} ({name}): give the "
                    "same, or --override-opt_param-scheduler to use the command line's, or "
                    "--use-checkpoint-opt_param-scheduler to use the checkpoint's"
                )
    scheduler.num_steps = int(saved.get("num_steps", 0))
    scheduler.step(increment=0)
    return []


def _go_on_at(scheduler: OptimizerParamScheduler, consumed_samples: int) -> list[str]:
    """Set the schedule, which counts samples, to where a run that goes on must be; returns the warning about it."""
    if consumed_samples == 0:
        return []
    scheduler.num_steps = consumed_samples
    scheduler.step(increment=0)
    return [
        f"WARNING: the checkpoint has no learning rate schedule: the command line's goes on after {consumed_samples} "
        "samples"
    ]


def _without_effect(scheduler: OptimizerParamScheduler) -> set[str]:
    """Lengths that a constant schedule does not read."""
    names = set()
    if scheduler.lr_decay_style == "constant":
        names.add("lr_decay_steps")
    if scheduler.wd_incr_style == "constant":
        names.add("wd_incr_steps")
    return names
