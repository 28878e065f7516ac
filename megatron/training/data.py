"""Datasets and loaders: megatron-core's GPT datasets over .bin/.idx pairs, checked before they are built."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron.training.batch import BatchShape
from megatron.training.config import DataConfig, TrainingConfig
from megatron.training.data_cache import cache_folders, content_stamp, remove_broken
from megatron.training.data_check import NAMES, DataReport, Wanted, check_split, check_whole
from megatron.training.datasets.blend import Blend, parse_data_path
from megatron.training.samplers import SequentialBatches, ShuffledBatches
from megatron.training.sft import build_chat_datasets, check_chats
from megatron.training.tokenizer import Tokenizer, build_tokenizer

SampleIterator = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where the tokens of the three splits come from: `blend` cut by `split`, or `per_split`, or generated tokens."""

    report: DataReport
    blend: Blend | None = None
    split: str | None = None
    per_split: tuple[Blend | None, ...] = ()

    @property
    def num_samples(self) -> Wanted:
        """Samples to build of each split; 0 builds no dataset."""
        return self.report.num_samples

    @property
    def prefixes(self) -> list[str]:
        """All data prefixes."""
        return [prefix for blend in (self.blend, *self.per_split) if blend is not None for prefix in blend.prefixes]

    @property
    def notes(self) -> tuple[str, ...]:
        """What stays empty, one sentence each."""
        return self.report.notes


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """Return the tokenizer that the settings name. Raises ValueError where none is named or it cannot be built."""
    if data.tokenizer_type is None:
        raise ValueError("--tokenizer-type is not given: name the one that made the data, such as HuggingFaceTokenizer")
    return build_tokenizer(
        data.tokenizer_type,
        model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=data.vocab_size,
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
    )


def num_samples_per_split(config: TrainingConfig) -> Wanted:
    """Return the samples that training, all its evaluations, and the test at the end take."""
    per_evaluation = samples_per_evaluation(config)
    num_evaluations = config.num_iterations // config.logging.eval_interval + 1 + config.logging.eval_at_start
    training = 0 if config.lifecycle.skip_train else config.num_samples
    return training, num_evaluations * per_evaluation, per_evaluation


def samples_per_evaluation(config: TrainingConfig) -> int:
    """Return the samples that one evaluation takes."""
    return config.logging.eval_iters * config.batch.global_batch_size


def valid_position(config: TrainingConfig, iteration: int, consumed_samples: int) -> int:
    """Return the validation sample at which a run goes on that resumes after `iteration`: `consumed_samples` or 0.

    It is 0 where the validation data of this run would end before its last evaluation: an earlier run evaluated more
    often, or the run is done and only evaluates once more. It is the same on all ranks.
    """
    if config.lifecycle.skip_train:
        return 0
    interval = config.logging.eval_interval
    num_left = config.num_iterations // interval - iteration // interval
    needed = (max(num_left, 0) + 1) * samples_per_evaluation(config)
    return consumed_samples if consumed_samples + needed <= num_samples_per_split(config)[1] else 0


def changed_epochs(saved: Sequence[int], source: DataSource) -> list[str]:
    """Return a line if training sources are repeated more or less often than `saved`, a checkpoint's passes, says.

    All passes over a source are shuffled together, so their number decides which sample comes when.
    """
    now = source.report.epochs
    if len(saved) != len(now) or tuple(saved) == now:
        return []
    was, is_ = (", ".join(map(str, numbers)) for numbers in (saved, now))
    return [
        f"WARNING: training shuffled {was} passes over its data and now shuffles {is_}, as it has another number of "
        "samples: samples that were seen may come again and others never"
    ]


def check_data(config: TrainingConfig) -> DataSource:
    """Return the data of a run after reading its indices (no tokens, no other rank).

    Raises ValueError, one sentence, for a prefix that is missing or damaged and for a split that has no tokens.
    """
    data, wanted, seq_length = config.data, num_samples_per_split(config), config.model.seq_length
    if data.mock_data:
        return DataSource(DataReport(wanted))
    if data.sft:
        return DataSource(DataReport(*check_chats(config, wanted)))
    if data.data_path or data.data_args_path:
        blend = parse_data_path(data.data_path or _read_words(data.data_args_path or ""))
        assert data.split is not None, "DataConfig fills the split beside --data-path"
        return DataSource(check_split(blend, data.split, wanted, seq_length), blend=blend, split=data.split)
    if not data.train_data_path:
        raise ValueError("no data is given: use --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    words = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = tuple(parse_data_path(part) if part else None for part in words)
    return DataSource(check_whole(blends, wanted, seq_length), per_split=blends)


def _read_words(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().split()
    except OSError as error:
        raise ValueError(f"--data-args-path {path} cannot be read: {error.strerror}") from None


class TrainingData:
    """The datasets of a run on this rank, and loaders over them that start at a given sample.

    Only tensor-parallel rank 0 of a pipeline stage that reads data holds datasets; elsewhere loaders are None.
    """

    def __init__(
        self, config: TrainingConfig, source: DataSource, tokenizer: Tokenizer, stages: Sequence[tuple[bool, bool]]
    ) -> None:
        """Build the datasets; collective over all ranks.

        stages: for each model chunk of this rank, whether it is the first and whether it is the last of all.
        """
        self.shape = BatchShape(
            micro_batch_size=config.batch.micro_batch_size,
            seq_length=config.model.seq_length,
            end_of_document=tokenizer.eod,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            is_packed=config.data.sft,
            # Without --unpadded-vocab-size a model may use its padding, as in Megatron.
            num_ids=config.data.unpadded_vocab_size or config.data.padded_vocab_size,
        )
        self._config = config
        self._reads = [self.shape.is_needed(first, last) for first, last in stages]
        self._wanted = source.num_samples
        is_source = parallel_state.get_tensor_model_parallel_rank() == 0 and any(self._reads)
        self._datasets = _build_datasets(config, source, tokenizer, is_source)

    def train_iterators(self, consumed_samples: int) -> list[SampleIterator | None]:
        """Return an iterator for each model chunk of this rank, None where it reads nothing."""
        return self._iterators(0, consumed_samples, self._config.data.dataloader_type == "cyclic")

    def valid_iterators(self, consumed_samples: int) -> list[SampleIterator | None]:
        """Return the iterators of the validation split."""
        return self._iterators(1, consumed_samples, False)

    def test_iterators(self) -> list[SampleIterator | None]:
        """Return the iterators of the test split."""
        return self._iterators(2, 0, False)

    def _iterators(self, split: int, consumed_samples: int, shuffled: bool) -> list[SampleIterator | None]:
        dataset = self._datasets[split]
        if dataset is None:
            return [None] * len(self._reads)
        return [
            iter(self._loader(dataset, split, consumed_samples, shuffled)) if reads else None for reads in self._reads
        ]

    def _loader(
        self, dataset: torch.utils.data.Dataset, split: int, consumed_samples: int, shuffled: bool
    ) -> torch.utils.data.DataLoader:
        config = self._config
        total = len(dataset)  # type: ignore[arg-type]
        group = config.batch.micro_batch_size * config.data_parallel_size
        if (not shuffled and total < self._wanted[split]) or total < group:
            raise ValueError(
                f"{NAMES[split]} takes {self._wanted[split]} samples, but one pass over the data has {total}: "
                "give weights to --data-path (data then repeats), --dataloader-type cyclic, or train less"
            )
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        place = (total, consumed_samples, config.batch.micro_batch_size, rank, size)
        sampler = ShuffledBatches(*place, seed=config.lifecycle.seed) if shuffled else SequentialBatches(*place)
        workers = config.data.num_workers
        return torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            pin_memory=torch.cuda.is_initialized(),
            persistent_workers=workers > 0,
            # Its own generator: ranks without a loader must not fall behind in the default one, which dropout uses.
            generator=torch.Generator().manual_seed(config.lifecycle.seed),
        )


def _build_datasets(
    config: TrainingConfig, source: DataSource, tokenizer: Tokenizer, is_source: bool
) -> list[torch.utils.data.Dataset | None]:
    data, sizes = config.data, list(source.num_samples)
    if data.sft:
        return build_chat_datasets(config, sizes if is_source else (0, 0, 0), tokenizer.eod)
    per_split = [_core_blend(blend) if size else None for blend, size in zip(source.per_split, sizes)]
    settings = GPTDatasetConfig(
        random_seed=config.lifecycle.seed,
        sequence_length=config.model.seq_length,
        blend=_core_blend(source.blend),
        blend_per_split=per_split or None,
        split=source.split,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=_with_stamps(tokenizer, source.prefixes),  # type: ignore[arg-type] # its three attributes are used
        # Positions and masks follow from the tokens and are made on the device: see batch.py.
        reset_position_ids=False,
        reset_attention_mask=False,
        create_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
    )
    if settings.split_matrix is not None:
        # A split that nobody reads may have no tokens, and megatron-core would search it for ever.
        settings.split_matrix = [part if size else None for part, size in zip(settings.split_matrix, sizes)]
    if dist.get_rank() == 0:
        remove_broken(cache_folders(source.prefixes, data.data_cache_path), print)
    kind = GPTDataset
    if data.mock_data:
        kind = MockGPTDataset
        # It warns for each split that generated tokens have no index cache.
        logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # memory-mapped tokens are only read
        try:
            return BlendedMegatronDatasetBuilder(kind, sizes, lambda: is_source, settings).build()
        except OSError as error:
            raise _cache_error(data, error) from None
        except Exception as error:
            if isinstance(error.__cause__, OSError):
                raise _cache_error(data, error.__cause__) from None
            raise


@dataclass(frozen=True, slots=True)
class _TokenizerKey:
    """What megatron-core's datasets read of a tokenizer; `unique_identifiers` goes into the key of index caches."""

    vocab_size: int
    eod: int
    unique_identifiers: Mapping[str, object]


def _with_stamps(tokenizer: Tokenizer, prefixes: Sequence[str]) -> _TokenizerKey:
    """Return the tokenizer's key with the data's in it.

    megatron-core's own key has the path of the data alone: a dataset written anew under its old prefix would be read
    through the index of the old one, which lacks documents or points behind the end.
    """
    identifiers = {**tokenizer.unique_identifiers, "data": [content_stamp(prefix) for prefix in prefixes]}
    return _TokenizerKey(tokenizer.vocab_size, tokenizer.eod, identifiers)


def _core_blend(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
    """Return a blend as megatron-core spells it."""
    if blend is None:
        return None
    return list(blend.prefixes), None if blend.weights is None else list(blend.weights)


def _cache_error(data: DataConfig, error: OSError) -> ValueError:
    where = data.data_cache_path or "the cache folder beside the data"
    return ValueError(f"the index cache in {where} cannot be used ({error}): point --data-cache-path to another folder")


def print_datasets(source: DataSource, report: Callable[[str], None]) -> None:
    """Print the sizes of the three splits in Megatron's words, then what they mean in tokens and epochs."""
    report(" > datasets target sizes (minimum size):")
    for name, count in zip(("train", "validation", "test"), source.num_samples):
        report(f"    {name + ':':<12}{count}")
    for line in source.report.lines:
        report(line)
