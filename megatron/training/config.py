"""All settings of a training run, frozen and complete: what `arguments.parse_args` returns.

Standard library only. The sections live in three modules and are all importable from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deep_offload.config import OffloadConfig
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

    notes: tuple[str, ...] = ()
    """What was accepted without effect or changed, one sentence each; printed once, numbered, at start-up."""

    def __post_init__(self) -> None:
        model_ranks = self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size
        require(
            self.world_size % model_ranks == 0,
            f"the world size {self.world_size} is not a multiple of --tensor-model-parallel-size "
            f"{self.parallel.tensor_model_parallel_size} times --pipeline-model-parallel-size "
            f"{self.parallel.pipeline_model_parallel_size}: start a multiple of {model_ranks} ranks or lower them",
        )
        fill(self, "data_parallel_size", self.world_size // model_ranks)
        if self.batch.global_batch_size is None:
            size = self.batch.micro_batch_size * self.data_parallel_size
            fill(self, "batch", replace(self.batch, global_batch_size=size))
        self._check_batch()
        self._check_model()
        self._check_schedule()

    def _check_batch(self) -> None:
        micro = self.batch.micro_batch_size * self.data_parallel_size
        require(
            self.batch.global_batch_size % micro == 0,
            f"--global-batch-size {self.batch.global_batch_size} is not a multiple of --micro-batch-size "
            f"{self.batch.micro_batch_size} times the data-parallel size {self.data_parallel_size}: "
            f"use a multiple of {micro}",
        )

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
        pipeline = self.parallel.pipeline_model_parallel_size
        require(
            self.model.num_layers % pipeline == 0,
            f"--num-layers {self.model.num_layers} is not a multiple of --pipeline-model-parallel-size {pipeline}: "
            "change one of them",
        )
        self.parallel.num_virtual_stages(self.model.num_layers)

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

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Model chunks of one rank, None without the interleaved pipeline schedule."""
        return self.parallel.num_virtual_stages(self.model.num_layers)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step at the full global batch."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.data_parallel_size)

    def with_vocab(self, vocab_size: int) -> TrainingConfig:
        """Return the same settings with `data.vocab_size` and `data.padded_vocab_size` of a known tokenizer."""
        padded = self.data.padded_vocab_size
        if padded is None:
            padded = self.model.padded_vocab_size(vocab_size, self.parallel.tensor_model_parallel_size)
        data = replace(self.data, vocab_size=vocab_size, padded_vocab_size=padded)
        return replace(self, data=data)
