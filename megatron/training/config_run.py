"""Settings of checkpoints, logging and the life cycle of a run.

Standard library only. Fields carry Megatron's argument names in snake_case and its defaults.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from megatron.training.config_model import fill, require, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved where, and what a start reads."""

    save: str | None = None
    """Directory that gets iter_NNNNNNN directories and the tracker file."""

    load: str | None = None
    """Directory to start from (the parent of iter_NNNNNNN)."""

    pretrained_checkpoint: str | None = None
    """Directory whose weights alone are loaded when --load holds nothing."""

    save_interval: int | None = None
    """Steps between checkpoints; needed with --save."""

    save_retain_interval: int | None = None
    """Of older checkpoints keep only those at multiples of this many steps."""

    keep_last: int | None = None
    """Keep this many newest checkpoints (and those of --save-retain-interval). Not given: all."""

    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Format of saved checkpoints. The format of a loaded one is found by itself."""

    ckpt_step: int | None = None
    """Iteration to load instead of the newest."""

    no_load_optim: bool = False
    """Start with a fresh optimizer."""

    no_load_rng: bool = False
    """Start with fresh random number states."""

    no_save_optim: bool = False
    """Save no optimizer state."""

    no_save_rng: bool = False
    """Save no random number states."""

    finetune: bool = False
    """Load weights alone and start at iteration 0."""

    use_checkpoint_args: bool = False
    """Take the model's shape and tokenizer from the checkpoint."""

    exit_on_missing_checkpoint: bool = False
    """End with code 1 when --load holds no checkpoint, instead of starting from random weights."""

    override_opt_param_scheduler: bool = False
    """After a load use the learning rates and decay of the command line."""

    use_checkpoint_opt_param_scheduler: bool = False
    """After a load use the learning rates and decay of the checkpoint."""

    async_save: bool = False
    """Write checkpoints in the background."""

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = "assume_ok_unexpected"
    """What missing and unexpected keys of a checkpoint do."""

    ckpt_fully_parallel_save: bool = True
    """Spread saving over data-parallel ranks."""

    ckpt_fully_parallel_load: bool = False
    """Spread loading over data-parallel ranks."""

    def __post_init__(self) -> None:
        if self.save_interval == 0:  # Megatron's "never"
            fill(self, "save_interval", None)
        require(
            self.save is None or self.save_interval is not None,
            f"--save {self.save} without --save-interval never saves: add --save-interval N",
        )
        for name in ("save_interval", "save_retain_interval", "keep_last"):
            value = getattr(self, name)
            if value is not None:
                require_positive("--" + name.replace("_", "-"), value)
        require(
            not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler),
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other: give one",
        )
        require(
            not (self.use_checkpoint_args and self.load is None),
            "--use-checkpoint-args needs --load: add the checkpoint's directory",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What is printed, drawn and evaluated, and when."""

    log_interval: int = 100
    """Steps between log lines."""

    eval_interval: int = 1000
    """Steps between evaluations."""

    eval_iters: int = 100
    """Batches of one evaluation; 0 does not evaluate."""

    eval_at_start: bool = False
    """Evaluate once before the first step, too."""

    log_throughput: bool = False
    """Print TFLOP/s per GPU."""

    log_params_norm: bool = False
    """Print the norm of the parameters."""

    log_num_zeros_in_grad: bool = False
    """Print how many gradient elements are 0."""

    log_progress: bool = False
    """Write SAVE/progress.txt."""

    timing_log_level: Literal[0, 1, 2] = 0
    """How detailed timers are."""

    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """How timers of all ranks are shown."""

    run_dir: str | None = None
    """Directory for run.jsonl and a trace, of which `python -m deep_offload report` makes a page."""

    tensorboard_dir: str | None = None
    """Directory of TensorBoard files."""

    tensorboard_log_interval: int = 1
    """Steps between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """Points that TensorBoard may hold back."""

    log_timers_to_tensorboard: bool = False
    """Draw timers in TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Draw the perplexity of evaluations in TensorBoard."""

    log_memory_to_tensorboard: bool = False
    """Draw memory in TensorBoard."""

    log_loss_scale_to_tensorboard: bool = True
    """Draw the loss scale in TensorBoard."""

    log_world_size_to_tensorboard: bool = False
    """Draw the number of ranks in TensorBoard."""

    wandb_project: str = ""
    """Project of Weights & Biases; empty does not use it."""

    wandb_exp_name: str = ""
    """Name of the Weights & Biases run."""

    wandb_entity: str = ""
    """Owner of the Weights & Biases run."""

    wandb_save_dir: str = ""
    """Local directory of the Weights & Biases run. Not given: SAVE/wandb."""

    def __post_init__(self) -> None:
        for name in ("log_interval", "eval_interval", "tensorboard_log_interval"):
            require_positive("--" + name.replace("_", "-"), getattr(self, name))
        require(self.eval_iters >= 0, f"--eval-iters is {self.eval_iters}, it must be 0 or more")
        require(
            not self.wandb_project or bool(self.wandb_exp_name),
            "--wandb-project needs --wandb-exp-name: add a name for the run",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleConfig:
    """Start, random numbers, device, early stops and profiling."""

    seed: int = 1234
    """Seed of weights, dropout and data order."""

    deterministic_mode: bool = False
    """Use only reproducible kernels: the same bits at every run."""

    use_cpu: bool = False
    """Train on the CPU although the machine has a GPU. Machines without a GPU need no flag."""

    dry_run: bool = False
    """Print placement, bytes and predicted times, allocate nothing, and end (code 2 if it does not fit)."""

    skip_train: bool = False
    """Evaluate only."""

    iterations_to_skip: tuple[int, ...] = ()
    """Iterations whose batches are read but not trained on."""

    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "disabled"
    """A loss or gradient that is not finite: skip the update; or compute the step again, save, and end with code 16
    or 17. report_stats: compute every step twice and print by how much the results differ."""

    check_for_spiky_loss: bool = False
    """With --rerun-mode validate_results: compute a step whose loss jumps again, and report."""

    exit_interval: int | None = None
    """End after an iteration that is a multiple of this number."""

    exit_duration_in_mins: int | None = None
    """End after this many minutes from the start of the program."""

    exit_signal_handler: bool = False
    """On --exit-signal finish the iteration, save and end."""

    exit_signal: str = "SIGTERM"
    """Signal that --exit-signal-handler waits for."""

    manual_gc: bool = False
    """Collect garbage at fixed steps only, on all ranks at once."""

    manual_gc_interval: int = 0
    """Steps between garbage collections with --manual-gc; 0 is never."""

    manual_gc_eval: bool = True
    """Collect garbage around evaluations with --manual-gc."""

    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Return unused GPU memory to the driver: 1 after, 2 before and after each step."""

    profile: bool = False
    """Write a PyTorch profile of some steps."""

    profile_step_start: int = 10
    """First profiled step."""

    profile_step_end: int = 12
    """Step at which profiling ends."""

    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that profile."""

    def __post_init__(self) -> None:
        names = {s.name for s in signal.Signals}
        require(self.exit_signal in names, f"--exit-signal {self.exit_signal} is unknown, allowed are names as SIGTERM")
        require(0 <= self.seed < 2**32, f"--seed is {self.seed}, allowed are whole numbers from 0 to 4294967295")
        for name in ("exit_interval", "exit_duration_in_mins"):
            value = getattr(self, name)
            if value is not None:
                require_positive("--" + name.replace("_", "-"), value)
