"""Learning rate and weight decay over the run: megatron-core's scheduler from our settings."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.config import TrainingConfig


def build_scheduler(config: TrainingConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the scheduler that writes `lr` and `weight_decay` into the optimizer's parameter groups.

    Its steps are samples: after each successful update the loop calls `step(global batch)`, so that a skipped update
    does not advance it. At construction it writes the rates of the first update (--lr-warmup-init with a warm-up).
    Raises ValueError for a missing learning rate; that the warm-up fits into the decay is TrainingConfig's to check.
    """
    lr, samples = config.lr, config.lr_samples
    if config.lifecycle.skip_train:
        return OptimizerParamScheduler(optimizer, 0.0, 0.0, 0.0, 0, 1, "constant", 0.0, 0.0, 1, "constant")
    if lr.lr is None:
        raise ValueError("--lr is not given: training needs a learning rate")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=lr.lr_warmup_init,
        max_lr=lr.lr,
        min_lr=lr.min_lr,
        lr_warmup_steps=samples.warmup,  # type: ignore[arg-type] # a fraction need not be whole, and is divided by
        lr_decay_steps=samples.decay,
        lr_decay_style=lr.lr_decay_style,
        start_wd=config.optim.start_weight_decay,
        end_wd=config.optim.end_weight_decay,
        wd_incr_steps=max(samples.weight_decay, 1),
        wd_incr_style=config.optim.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=config.checkpoint.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.checkpoint.override_opt_param_scheduler,
        wsd_decay_steps=samples.wsd_decay,
        lr_wsd_decay_style=lr.lr_wsd_decay_style,
    )


def learning_rates(optimizer: MegatronOptimizer) -> tuple[float, float | None]:
    """Return the rate of ordinary parameters and that of embeddings and output (None without --decoupled-lr).

    After `scheduler.step` these are the rates of the next update, as Megatron's log line shows them.
    """
    plain, decoupled = None, None
    for group in optimizer.param_groups:
        if group.get("is_decoupled_lr", False):
            decoupled = group["lr"]
        elif plain is None:
            plain = group["lr"]
    rate = decoupled if plain is None else plain
    assert rate is not None, "an optimizer has parameter groups, on ranks without parameters too"
    return float(rate), None if decoupled is None else float(decoupled)
