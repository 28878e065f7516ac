"""All settings of a training run, frozen and complete: what `arguments.parse_args` returns.

Standard library only. The sections live in three modules and are all importable from here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from deep_offload.config import OffloadConfig
from deep_offload.model.gpt import ParallelShape
from megatron.training import batch_schedule
from megatron.training.config_model import (
    FILLED,
    DtypeName,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    fill,
    require,
)
from megatron.training.config_run import CheckpointConfig, LifecycleConfig, LoggingConfig
from megatron.training.config_schedule import BatchConfig, DataConfig, LRConfig, OptimConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "DtypeName",
    "LRConfig",
    "LRSamples",
    "LifecycleConfig",
    "LoggingConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TrainingConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LRSamples:
    """Lengths of the learning-rate schedule in samples, the unit in which it advances."""

    warmup: float
    """Linear warm-up; not whole with --lr-warmup-fraction."""

    decay: int
    """From the start until --min-lr, warm-up included."""

    wsd_decay: int | None
    """Last phase of WSD, at the end of the decay."""

    weight_decay: int
    """From --start-weight-decay to --end-weight-decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Every setting of one run on `world_size` ranks, checked against each other.

    Raises ValueError, one sentence, for settings that contradict each other. `data.padded_vocab_size` stays None
    until the tokenizer is known: see `with_vocab`.
    """

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr: LRConfig = field(default_factory=LRConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    world_size: int = 1
    """Ranks of the whole job."""

    data_parallel_size: int = FILLED
    """Copies of the model: world size / (tensor x pipeline parallel size); filled here."""

    batch_phases: tuple[batch_schedule.Phase, ...] = FILLED
    """(first consumed sample, global batch) of each phase of the batch size; filled here."""

    notes: tuple[str, ...] = ()
    """What was accepted without effect or changed, one sentence each; printed once, numbered, at start-up."""

    def __post_init__(self) -> None:
        model_ranks = self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size
        require(
            self.world_size >= 1 and self.world_size % model_ranks == 0,
            f"the world size {self.world_size} is not a multiple of --tensor-model-parallel-size "
            f"{self.parallel.tensor_model_parallel_size} times --pipeline-model-parallel-size "
            f"{self.parallel.pipeline_model_parallel_size}: start a multiple of {model_ranks} ranks or lower them",
        )
        fill(self, "data_parallel_size", self.world_size // model_ranks)
        self._fill_batch()
        if self.precision.fp16 and self.precision.loss_scale is None:
            # Overflows are how a dynamic loss scale finds its value.
            fill(self, "optim", replace(self.optim, check_for_nan_in_loss_and_grad=False))
        self._check_model()
        self._check_schedule()
        require(
            self.offload.offload_grad_wire != "param" or self.precision.grad_buffer_dtype != "fp32",
            "--offload-grad-wire param would round gradients, because the gradient buffer is fp32: add "
            "--grad-reduce-in-bf16 (with --bf16), train with --fp16, or use --offload-grad-wire fp32",
        )
        require(
            not (self.parallel.ddp_average_in_collective and self.batch.calculate_per_token_loss),
            "--ddp-average-in-collective would average what --calculate-per-token-loss divides by the tokens: give "
            "only one of them",
        )
        require(
            self.checkpoint.save is not None or not self.logging.log_progress,
            "--log-progress writes SAVE/progress.txt: add --save or drop it",
        )

    def _fill_batch(self) -> None:
        batch, step = self.batch, self.batch.micro_batch_size * self.data_parallel_size
        if batch.step_batch_size_schedule is not None:
            phases = batch_schedule.step_phases(batch.step_batch_size_schedule, self.model.seq_length)
            last = phases[-1][1]
            require(
                batch.global_batch_size in (None, last),
                f"--global-batch-size {batch.global_batch_size} is not the last batch {last} of "
                "--step-batch-size-schedule: drop --global-batch-size",
            )
            fill(self, "batch", replace(batch, global_batch_size=last))
        elif batch.rampup_batch_size is not None:
            require(batch.global_batch_size is not None, "--rampup-batch-size needs --global-batch-size: add it")
            phases = batch_schedule.rampup_phases(*batch.rampup_batch_size, batch.global_batch_size)
        else:
            if batch.global_batch_size is None:
                fill(self, "batch", replace(batch, global_batch_size=step))
            phases = batch_schedule.constant_phases(self.batch.global_batch_size)
        for _, size in phases:
            source = "--global-batch-size" if size == self.batch.global_batch_size else "the growing batch size"
            require(
                size % step == 0,
                f"{source} {size} is not a multiple of --micro-batch-size {batch.micro_batch_size} times the "
                f"data-parallel size {self.data_parallel_size}: use a multiple of {step}",
            )
        fill(self, "batch_phases", phases)

    def _check_model(self) -> None:
        tensor = self.parallel.tensor_model_parallel_size
        for flag, value in (
            ("--num-attention-heads", self.model.num_attention_heads),
            ("--num-query-groups", self.model.num_query_groups),
            ("--ffn-hidden-size", self.model.ffn_hidden_size),
        ):
            require(
                value % tensor == 0 or (flag == "--num-query-groups" and tensor % value == 0),
                f"{flag} {value} is not a multiple of --tensor-model-parallel-size {tensor}: change one of them",
            )
        if self.parallel.sequence_parallel:
            require(
                self.model.seq_length % tensor == 0,
                f"--seq-length {self.model.seq_length} is not a multiple of --tensor-model-parallel-size {tensor}, "
                "which --sequence-parallel needs: change one of them",
            )
        padded = self.data.padded_vocab_size
        require(
            padded is None or padded % tensor == 0,
            f"--padded-vocab-size {padded} is not a multiple of --tensor-model-parallel-size {tensor}: "
            "change one of them",
        )
        self._check_virtual_stages()
        block = self.recompute.recompute_num_layers
        if self.recompute.recompute_method == "uniform" and block is not None:
            for layers in self._layers_of_chunks():
                require(
                    layers % block == 0,
                    f"--recompute-method uniform cuts the {layers} layers of a model chunk into blocks of "
                    f"--recompute-num-layers {block}, which does not divide them: use a divisor, or "
                    "--recompute-method block",
                )

    def _check_virtual_stages(self) -> None:
        """megatron-core's interleaved schedule looks at its micro-batches only in the step that has too few."""
        if self.virtual_pipeline_model_parallel_size is None:
            return
        ranks = self.parallel.pipeline_model_parallel_size
        group = self.parallel.microbatch_group_size_per_vp_stage or ranks
        require(
            group >= ranks,
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than --pipeline-model-parallel-size "
            f"{ranks}: raise it or drop it",
        )
        step = self.batch.micro_batch_size * self.data_parallel_size
        for _, size in self.batch_phases:
            count = size // step
            require(
                count >= group and not 0 < count % group < ranks,
                f"a global batch of {size} is {count} x --micro-batch-size {self.batch.micro_batch_size} for each "
                f"pipeline, which virtual stages run in groups of {group}: the last group must be whole or have at "
                f"least {ranks}, change --global-batch-size (or its growth) or drop the virtual stages",
            )

    def _layers_of_chunks(self) -> list[int]:
        """Return the layers of each model chunk, of all pipeline ranks in turn."""
        parallel, virtual = self.parallel, self.virtual_pipeline_model_parallel_size or 1
        shape = ParallelShape(
            pipeline=parallel.pipeline_model_parallel_size,
            virtual=virtual,
            first_layers=parallel.decoder_first_pipeline_num_layers,
            last_layers=parallel.decoder_last_pipeline_num_layers,
            counts_embedding=parallel.account_for_embedding_in_pipeline_split,
            counts_loss=parallel.account_for_loss_in_pipeline_split,
        )
        places = itertools.product(range(shape.pipeline), range(virtual))
        return [shape.num_layers(self.model.num_layers, rank, stage) for rank, stage in places]

    def _check_schedule(self) -> None:
        """--train-iters and the *-samples flags exclude each other, and the other way round, as in Megatron."""
        if self.batch.train_samples is not None:
            pairs = (("lr_decay_iters", None), ("lr_warmup_iters", 0), ("lr_wsd_decay_iters", None))
            unit, given = "samples", "--train-samples"
        else:
            pairs = (("lr_decay_samples", None), ("lr_warmup_samples", 0), ("lr_wsd_decay_samples", None))
            unit, given = "iters", "--train-iters"
        for name, default in pairs:
            flag = "--" + name.replace("_", "-")
            instead = flag.rsplit("-", 1)[0] + "-" + unit
            require(
                getattr(self.lr, name) == default,
                f"{flag} does not go with {given}: use {instead}",
            )
        lengths = self.lr_samples
        if self.lr.lr is not None and lengths.decay > 0:
            require(
                lengths.warmup < lengths.decay,
                f"the learning rate warms up for {lengths.warmup:g} samples, but the decay ends after {lengths.decay}: "
                "shorten the warm-up or lengthen --lr-decay-iters (or -samples)",
            )
            require(
                (lengths.wsd_decay or 0) <= lengths.decay,
                f"the last phase of WSD is {lengths.wsd_decay} samples, but the whole decay is {lengths.decay}: "
                "shorten --lr-wsd-decay-iters (or -samples)",
            )

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Model chunks of one rank, None without the interleaved pipeline schedule."""
        return self.parallel.num_virtual_stages(self.model.num_layers)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step at the full global batch."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.data_parallel_size)

    @property
    def num_iterations(self) -> int:
        """Steps of the whole run; 0 when neither --train-iters nor --train-samples was given."""
        if self.batch.train_samples is not None:
            return batch_schedule.iterations_within(self.batch_phases, self.batch.train_samples)
        return self.batch.train_iters or 0

    @property
    def num_samples(self) -> int:
        """Samples that the steps of the whole run consume."""
        return self.samples_after(self.num_iterations)

    @property
    def lr_samples(self) -> LRSamples:
        """The learning-rate schedule's lengths in samples."""
        lr, by_samples = self.lr, self.batch.train_samples is not None
        if by_samples:
            decay = self.batch.train_samples if lr.lr_decay_samples is None else lr.lr_decay_samples
            warmup: float = lr.lr_warmup_samples
            wsd_decay = lr.lr_wsd_decay_samples
        else:
            decay_iters = self.num_iterations if lr.lr_decay_iters is None else lr.lr_decay_iters
            decay = self.samples_after(decay_iters)
            warmup = self.samples_after(lr.lr_warmup_iters)
            wsd_decay = None
            if lr.lr_wsd_decay_iters is not None:
                wsd_decay = decay - self.samples_after(max(0, decay_iters - lr.lr_wsd_decay_iters))
        if lr.lr_warmup_fraction is not None:
            warmup = lr.lr_warmup_fraction * decay
        total = self.batch.train_samples if by_samples else self.num_samples
        return LRSamples(warmup=warmup, decay=decay, wsd_decay=wsd_decay, weight_decay=total)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch of the step that begins after `consumed_samples` samples."""
        return batch_schedule.batch_size_at(self.batch_phases, consumed_samples)

    def samples_after(self, iterations: int) -> int:
        """Return the samples that the first `iterations` steps of the run consume."""
        return batch_schedule.samples_after(self.batch_phases, iterations)

    def with_vocab(self, vocab_size: int) -> TrainingConfig:
        """Return the same settings with `data.padded_vocab_size` for a tokenizer of `vocab_size` ids."""
        padded, rows = self.data.padded_vocab_size, self.data.unpadded_vocab_size or vocab_size
        require(
            rows >= vocab_size,
            f"--unpadded-vocab-size {rows} is less than the tokenizer's {vocab_size} ids: it is not the "
            "tokenizer of these weights, or raise the number",
        )
        if padded is None:
            padded = self.model.padded_vocab_size(rows, self.parallel.tensor_model_parallel_size)
        require(
            padded >= rows,
            f"--padded-vocab-size {padded} is less than the tokenizer's {vocab_size} ids or --unpadded-vocab-size: "
            "raise it",
        )
        return replace(self, data=replace(self.data, padded_vocab_size=padded))
