"""Settings of data, batches, optimizer and learning rate.

Standard library only. Fields carry Megatron's argument names in snake_case and its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config_model import FILLED, fill, require, require_positive

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "GPTSentencePieceTokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from."""

    data_path: tuple[str, ...] = ()
    """Prefix of one .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ...; cut by --split."""

    train_data_path: tuple[str, ...] = ()
    """Prefixes for training alone; instead of --data-path."""

    valid_data_path: tuple[str, ...] = ()
    """Prefixes for validation alone."""

    test_data_path: tuple[str, ...] = ()
    """Prefixes for the test alone."""

    data_args_path: str | None = None
    """File that holds what --data-path would be given."""

    split: str | None = FILLED
    """Parts of --data-path for training, validation and test, such as 949,50,1. Not given: 969,30,1."""

    data_cache_path: str | None = None
    """Directory for index caches. Not given: a cache directory beside the data."""

    mock_data: bool = False
    """Train on generated tokens."""

    sft: bool = False
    """The data paths are JSONL files of chats, put through the tokenizer's chat template; loss on the answers."""

    tokenizer_type: str | None = None
    """Kind of tokenizer. Not given: GPT2BPETokenizer when --vocab-file and --merge-file are."""

    tokenizer_model: str | None = None
    """Tokenizer file or directory, or the name of a HuggingFace tokenizer."""

    vocab_size: int | None = None
    """Entries of the vocabulary before padding. Not given: the tokenizer's."""

    padded_vocab_size: int | None = None
    """Rows of the embedding. Not given: the vocabulary padded to --make-vocab-size-divisible-by times TP."""

    unpadded_vocab_size: int | None = None
    """Rows that are no padding: logits of the others are masked out of the loss. Not given: all, as in Megatron."""

    vocab_file: str | None = None
    """vocab.json of a GPT-2 style tokenizer."""

    merge_file: str | None = None
    """merges.txt of a GPT-2 style tokenizer."""

    tiktoken_pattern: str | None = None
    """Splitting pattern of TikTokenizer; v1 or v2."""

    tiktoken_num_special_tokens: int = 1000
    """Special tokens of TikTokenizer."""

    num_workers: int = 2
    """Loader processes of each rank."""

    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: one ordered pass over the samples; cyclic: shuffled passes."""

    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""

    reset_position_ids: bool = False
    """Count positions anew after each end of document."""

    reset_attention_mask: bool = False
    """Keep documents of one sample from attending to each other."""

    mmap_bin_files: bool = True
    """Memory-map .bin files instead of reading them."""

    num_dataset_builder_threads: int = 1
    """Threads that build the datasets of a blend."""

    def __post_init__(self) -> None:
        require(
            not (self.data_path and (self.train_data_path or self.valid_data_path or self.test_data_path)),
            "--data-path and --train-data-path/--valid-data-path/--test-data-path exclude each other: give one kind",
        )
        require(
            not (self.mock_data and (self.data_path or self.train_data_path)),
            "--mock-data and a data path exclude each other: give only one of them",
        )
        require(
            not (self.sft and (self.mock_data or self.data_args_path)),
            "--sft reads chats from --data-path or --train-data-path: drop --mock-data and --data-args-path",
        )
        if self.split is not None:
            fill(self, "split", _normalized_split(self.split))
        elif not (self.train_data_path or self.valid_data_path or self.test_data_path):
            fill(self, "split", "969,30,1")
        if self.tokenizer_type is None and self.vocab_file and self.merge_file:
            fill(self, "tokenizer_type", "GPT2BPETokenizer")
        require(
            self.tokenizer_type is None or self.tokenizer_type in TOKENIZER_TYPES,
            f"--tokenizer-type {self.tokenizer_type} is not built here, allowed are {', '.join(TOKENIZER_TYPES)}",
        )
        require(self.num_workers >= 0, f"--num-workers is {self.num_workers}, it must be 0 or more")
        for name in ("vocab_size", "padded_vocab_size", "unpadded_vocab_size"):
            if getattr(self, name) is not None:
                require_positive("--" + name.replace("_", "-"), getattr(self, name))


def _normalized_split(split: str) -> str:
    """Return three parts, comma-separated. Quotes that a shell array left around the value do not matter."""
    parts = [part.strip() for part in split.strip("'\" ").split(",")]
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        weights = []
    require(
        1 <= len(weights) <= 3 and min(weights, default=-1.0) >= 0.0 and sum(weights) > 0.0,
        f"--split is {split!r}, allowed are up to three parts for training, validation and test, such as 949,50,1",
    )
    return ",".join(parts + ["0"] * (3 - len(parts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many samples one step takes and how many steps there are."""

    micro_batch_size: int
    """Samples of one forward pass on one data-parallel rank."""

    global_batch_size: int = FILLED
    """Samples of one step over all ranks. Not given: micro batch x data-parallel size (filled by TrainingConfig)."""

    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: grow the batch from START by INCREMENT up to the global batch over SAMPLES samples."""

    step_batch_size_schedule: str | None = None
    """Batch sizes from numbers of consumed tokens on, such as "0:16 2.4B:32"; instead of --global-batch-size."""

    train_iters: int | None = None
    """Steps of the whole run; instead of --train-samples."""

    train_samples: int | None = None
    """Samples of the whole run; instead of --train-iters."""

    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the global batch instead of per micro-batch."""

    def __post_init__(self) -> None:
        require_positive("--micro-batch-size", self.micro_batch_size)
        if self.global_batch_size is not None:
            require_positive("--global-batch-size", self.global_batch_size)
        for name in ("train_iters", "train_samples"):
            if getattr(self, name) is not None:
                require_positive("--" + name.replace("_", "-"), getattr(self, name))
        require(
            self.train_iters is None or self.train_samples is None,
            "--train-iters and --train-samples both end the run: give only one of them",
        )
        require(
            self.rampup_batch_size is None or self.step_batch_size_schedule is None,
            "--rampup-batch-size and --step-batch-size-schedule both change the batch: give only one of them",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The Adam update, apart from its learning rate."""

    optimizer: Literal["adam"] = "adam"
    """The optimizer; Adam with decoupled weight decay (AdamW) as in Megatron."""

    decoupled_weight_decay: bool = True
    """Decay weights apart from the gradient (AdamW); off adds weight decay to the gradient (Adam with L2)."""

    weight_decay: float = 0.01
    """Weight decay; biases and norms have none."""

    start_weight_decay: float = FILLED
    """Weight decay at the first step; --weight-decay unless --weight-decay-incr-style is linear or cosine."""

    end_weight_decay: float = FILLED
    """Weight decay at the last step; --weight-decay unless --weight-decay-incr-style is linear or cosine."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""

    adam_beta1: float = 0.9
    """Decay of the first moment, 0..1."""

    adam_beta2: float = 0.999
    """Decay of the second moment, 0..1."""

    adam_eps: float = 1e-8
    """Added to the denominator of the update."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    check_for_nan_in_loss_and_grad: bool = True
    """Stop on a loss or gradient that is not finite. Off with fp16 and a dynamic loss scale."""

    def __post_init__(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0.0 <= value < 1.0, f"--{name.replace('_', '-')} is {value}, allowed are numbers from 0 to below 1")
        for name in ("adam_eps", "clip_grad", "weight_decay"):
            value = getattr(self, name)
            require(value >= 0.0, f"--{name.replace('_', '-')} is {value}, it must be 0 or more")
        for name in ("start_weight_decay", "end_weight_decay"):
            if self.weight_decay_incr_style == "constant":
                fill(self, name, self.weight_decay)
            require(
                getattr(self, name) is not None,
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs --{name.replace('_', '-')}: add it",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LRConfig:
    """The learning rate over the run. Schedules count samples; skipped steps do not advance them."""

    lr: float | None = None
    """Largest learning rate; needed to train."""

    min_lr: float = 0.0
    """Smallest learning rate of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""

    lr_decay_iters: int | None = None
    """Steps until --min-lr. Not given: --train-iters."""

    lr_decay_samples: int | None = None
    """Samples until --min-lr. Not given: --train-samples."""

    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""

    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""

    lr_warmup_fraction: float | None = None
    """Part of the decay that is warm-up, 0..1; instead of the two above."""

    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD."""

    lr_wsd_decay_iters: int | None = None
    """Steps of the last phase of WSD."""

    lr_wsd_decay_samples: int | None = None
    """Samples of the last phase of WSD."""

    decoupled_lr: float | None = None
    """Learning rate of embeddings and output layer. Not given: --lr."""

    decoupled_min_lr: float | None = None
    """Smallest learning rate of embeddings and output layer. Not given: --min-lr."""

    def __post_init__(self) -> None:
        if self.lr is not None:
            require(
                0.0 <= self.min_lr <= self.lr,
                f"--min-lr {self.min_lr} is outside of 0..{self.lr}: it must be from 0 to --lr",
            )
            require(
                self.lr_warmup_init <= self.lr,
                f"--lr-warmup-init {self.lr_warmup_init} is more than --lr {self.lr}: lower it",
            )
        if self.lr_warmup_fraction is not None:
            require(
                self.lr_warmup_iters == 0 and self.lr_warmup_samples == 0,
                "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: give only one of them",
            )
            require(
                0.0 <= self.lr_warmup_fraction <= 1.0,
                f"--lr-warmup-fraction is {self.lr_warmup_fraction}, allowed are numbers from 0 to 1",
            )
        require(
            self.lr_decay_style != "WSD" or (self.lr_wsd_decay_iters or self.lr_wsd_decay_samples) is not None,
            "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples): add it",
        )
        require(
            self.decoupled_min_lr is None or self.decoupled_lr is not None,
            "--decoupled-min-lr needs --decoupled-lr: add it",
        )
