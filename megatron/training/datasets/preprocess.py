"""JSONL in, indexed datasets out: the job behind tools/preprocess_data.py."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron.training.datasets.encode import BlockEncoder, EncodedBlock
from megatron.training.datasets.indexed_format import bin_path, token_dtype
from megatron.training.datasets.indexed_writer import IndexedWriter
from megatron.training.datasets.jsonl import expand_inputs, input_bytes, read_blocks
from megatron.training.datasets.progress import Progress
from megatron.training.datasets.workers import OrderedPool, WorkerError
from megatron.training.tokenizer import Tokenizer

_SHOWN_BAD_LINES = 20
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 15, 1 << 19


class DataError(Exception):
    """The data, not the command line, is at fault: one sentence for the user."""


@dataclass(frozen=True, slots=True)
class PreprocessJob:
    """What to tokenize and where to."""

    inputs: Sequence[str]
    """Paths or globs of JSONL files, plain or gzip."""
    output_prefix: str
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    num_workers: int = 1
    on_bad_line: Literal["error", "skip"] = "error"
    log_interval: int = 1000

    def prefix_of(self, key: str) -> str:
        """Return the dataset prefix of one JSON key."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(slots=True)
class Totals:
    """What a job did."""

    num_documents: int = 0
    num_empty: int = 0
    bad_kinds: Counter[str] = field(default_factory=Counter)
    dtype: np.dtype[Any] | None = None
    tokens_of_key: dict[str, int] = field(default_factory=dict)
    num_bad_shown: int = 0

    @property
    def num_bad(self) -> int:
        """Lines that became no document."""
        return sum(self.bad_kinds.values())


def run_job(job: PreprocessJob, tokenizer: Tokenizer) -> Totals:
    """Tokenize `job.inputs` and publish one dataset for each key: the same bytes whatever `num_workers`.

    Raises ValueError for what the command line got wrong (missing input, missing output folder) before any work,
    and DataError for the rest. After an error nothing new stands under the output prefix.
    """
    files = expand_inputs(job.inputs)
    _check_output_folder(job)
    dtype = token_dtype(tokenizer.vocab_size)
    _silence_inner_threads(tokenizer)
    total_bytes = input_bytes(files)
    encoder = BlockEncoder(tokenizer, job.json_keys, dtype, job.append_eod, job.on_bad_line == "error")
    totals = Totals(dtype=dtype)
    blocks = read_blocks(files, _block_bytes(total_bytes, job.num_workers))
    # The workers fork before the writers open files and before the progress bar starts its thread.
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(OrderedPool(job.num_workers, encoder.encode))
        writers = [stack.enter_context(IndexedWriter(job.prefix_of(key), dtype)) for key in job.json_keys]
        progress = stack.enter_context(Progress(total_bytes, job.log_interval))
        try:
            _write_all(pool.map(blocks), writers, totals, progress, job)
            for writer in writers:
                writer.finish()
        except WorkerError as error:
            raise DataError(f"{error}: nothing was written") from None
        except ValueError as error:
            raise DataError(str(error)) from None
        except OSError as error:
            raise DataError(f"{describe_os_error(error)}: nothing was written") from None
        for writer in writers:
            writer.publish()
        totals.tokens_of_key = {key: writer.num_tokens for key, writer in zip(job.json_keys, writers)}
    return totals


def _write_all(
    results: Iterator[EncodedBlock],
    writers: Sequence[IndexedWriter],
    totals: Totals,
    progress: Progress,
    job: PreprocessJob,
) -> None:
    for block in results:
        if block.bad_kinds:
            _count_bad(block, totals, progress, job)
        for writer, key in zip(writers, block.keys):
            lengths = np.frombuffer(key.sequence_lengths, dtype=np.int32)
            writer.append(key.tokens, lengths, np.frombuffer(key.sequences_per_document, dtype=np.int32))
        totals.num_documents += block.num_documents
        totals.num_empty += block.num_empty
        progress.update(totals.num_documents, block.position_bytes, sum(writer.num_tokens for writer in writers))
    if not any(writer.num_tokens for writer in writers):
        empty = " without a token" if totals.num_documents else ""
        skipped = f", {totals.num_bad} bad lines ({format_kinds(totals.bad_kinds)})" if totals.num_bad else ""
        raise DataError(
            f"{totals.num_documents} documents{empty} in {_names(job.inputs)}{skipped}: nothing was written"
        )


def _count_bad(block: EncodedBlock, totals: Totals, progress: Progress, job: PreprocessJob) -> None:
    if job.on_bad_line == "error":
        raise DataError(f"{block.bad_lines[0]}: nothing was written (--on-bad-line skip leaves such lines out)")
    for bad in block.bad_lines:
        if totals.num_bad_shown < _SHOWN_BAD_LINES:
            progress.note(f"skipped {bad}")
        elif totals.num_bad_shown == _SHOWN_BAD_LINES:
            progress.note(f"more than {_SHOWN_BAD_LINES} bad lines: the others are only counted")
        totals.num_bad_shown += 1
    totals.bad_kinds += block.bad_kinds


def format_kinds(kinds: Counter[str]) -> str:
    """Return "3 blank line, 1 not JSON", most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _check_output_folder(job: PreprocessJob) -> None:
    folder = os.path.dirname(job.output_prefix) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"the folder {folder} of --output-prefix {job.output_prefix} does not exist: create it first")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"the folder {folder} of --output-prefix {job.output_prefix} is not writable")
    for key in job.json_keys:
        if os.path.isdir(bin_path(job.prefix_of(key))):
            raise ValueError(f"{bin_path(job.prefix_of(key))} is a directory: choose another --output-prefix")


def _silence_inner_threads(tokenizer: Tokenizer) -> None:
    # Processes share the work; threads inside each would only fight for the same cores. Set before the fork, and
    # before the first batch: the tokenizers library reads it then.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inner = getattr(tokenizer, "_tokenizer", None)
    for disable in ("no_truncation", "no_padding"):
        # A tokenizer.json may carry the cut and the filling of its last use; documents are kept whole.
        if type(inner).__module__.startswith("tokenizers") and hasattr(inner, disable):
            getattr(inner, disable)()


def _block_bytes(total_bytes: int | None, num_workers: int) -> int:
    """Return a block size that gives every worker several blocks; it never changes what is written."""
    if total_bytes is None:
        return _MAX_BLOCK_BYTES
    return min(max(total_bytes // (8 * num_workers), _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)


def describe_os_error(error: OSError) -> str:
    """Return "file: reason", or the reason where no file is known."""
    return f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}"


def _names(inputs: Sequence[str]) -> str:
    return inputs[0] if len(inputs) == 1 else f"{inputs[0]} and {len(inputs) - 1} more"
