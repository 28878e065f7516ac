"""Finds damaged indexed datasets before training does. numpy only; the training layer calls `check_prefix` at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.training.datasets.indexed_format import HEADER_BYTES, IndexHeader, bin_path, idx_path, unpack_header

_CHUNK = 1 << 22  # sequences, or tokens, looked at in one go
_MAX_SEQUENCES = 2**31 - 1  # megatron.core numbers sequences in int32


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """What a sound dataset holds."""

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    """Sequences: what training calls documents, and what --split divides."""
    num_documents: int
    """Documents by the boundaries: equal to `num_sequences` unless texts were split into sentences."""
    num_tokens: int

    @property
    def bin_bytes(self) -> int:
        """Size of PREFIX.bin."""
        return self.num_tokens * self.dtype.itemsize


def check_prefix(prefix: str) -> PrefixSummary:
    """Return what PREFIX.idx and PREFIX.bin hold, after comparing every entry of the index with the other ones.

    Reads the whole index (12 bytes a sequence, 8 a document) and the size of PREFIX.bin, not its tokens. Raises
    ValueError, one sentence that names the file and the two numbers that do not match.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not os.path.isfile(path):
            raise ValueError(_missing(prefix, path))
    header = _read_header(prefix)
    if header.num_sequences > _MAX_SEQUENCES:
        raise ValueError(
            f"{idx_path(prefix)} has {header.num_sequences} sequences, at most {_MAX_SEQUENCES} can be numbered: "
            "split the dataset"
        )
    num_tokens = _check_sequences(prefix, header)
    _check_boundaries(prefix, header)
    have, need = os.path.getsize(bin_path(prefix)), num_tokens * header.dtype.itemsize
    if have != need:
        how = "was cut short" if have < need else "does not belong to this index"
        raise ValueError(f"{bin_path(prefix)} has {have} bytes, its index says {need}: it {how}, make or copy it again")
    if num_tokens == 0:
        raise ValueError(f"{bin_path(prefix)} has 0 tokens in {header.num_sequences} sequences: there is no text in it")
    return PrefixSummary(prefix, header.dtype, header.num_sequences, header.num_boundaries - 1, num_tokens)


def _missing(prefix: str, path: str) -> str:
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix) and os.path.isfile(prefix):
            return f"{prefix} is a file: give the prefix without its ending, {prefix.removesuffix(suffix)}"
    folder, name = os.path.split(prefix)
    near = sorted(
        entry.removesuffix(".idx") for entry in _names_in(folder or ".") if entry.startswith(name) and ".idx" in entry
    )
    near = [entry for entry in near if entry != name and "." not in entry.removeprefix(name)]
    hint = f", did you mean {os.path.join(folder, near[0])}?" if near else ": check the path given by --data-path"
    return f"{path} does not exist{hint}"


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_header(prefix: str) -> IndexHeader:
    path = idx_path(prefix)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = unpack_header(file.read(HEADER_BYTES), path)
    need = HEADER_BYTES + header.body_bytes
    # One more byte a sequence: the modes of a multimodal dataset, which readers of text leave alone.
    if size not in (need, need + header.num_sequences):
        how = "was cut short" if size < need else "is too long"
        raise ValueError(f"{path} has {size} bytes, its header says {need}: it {how}, make or copy it again")
    return header


def _check_sequences(prefix: str, header: IndexHeader) -> int:
    """Return the number of tokens after comparing each sequence's offset with the lengths before it."""
    path, itemsize = idx_path(prefix), header.dtype.itemsize
    count = header.num_sequences
    next_pointer = 0
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        lengths = _read_array(path, np.int32, HEADER_BYTES + 4 * start, size)
        pointers = _read_array(path, np.int64, HEADER_BYTES + 4 * count + 8 * start, size)
        if int(lengths.min()) < 0:
            bad = int(np.argmax(lengths < 0))
            raise ValueError(f"{path}: sequence {start + bad} of {count} has {lengths[bad]} tokens: make it again")
        sizes = lengths.astype(np.int64) * itemsize
        expected = np.cumsum(sizes) - sizes + next_pointer
        if not np.array_equal(pointers, expected):
            bad = int(np.argmax(pointers != expected))
            raise ValueError(
                f"{path}: sequence {start + bad} of {count} starts at byte {pointers[bad]}, the lengths before it "
                f"say {expected[bad]}: make the dataset again"
            )
        next_pointer = int(expected[-1] + sizes[-1])
    return next_pointer // itemsize


def _check_boundaries(prefix: str, header: IndexHeader) -> None:
    path, count = idx_path(prefix), header.num_boundaries
    if count == 0:
        raise ValueError(f"{path} has 0 document boundaries, at least 1 is needed: make the dataset again")
    offset = HEADER_BYTES + 12 * header.num_sequences
    previous = 0
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        boundaries = _read_array(path, np.int64, offset + 8 * start, size)
        if start == 0 and boundaries[0] != 0:
            raise ValueError(f"{path}: the first document starts at sequence {boundaries[0]}, not 0: make it again")
        steps = np.diff(boundaries, prepend=previous)
        if int(steps.min()) < 0:
            bad = int(np.argmax(steps < 0))
            raise ValueError(
                f"{path}: document boundary {start + bad} is {boundaries[bad]}, less than the one before it, "
                f"{boundaries[bad] - steps[bad]}: make the dataset again"
            )
        previous = int(boundaries[-1])
    if previous != header.num_sequences:
        raise ValueError(
            f"{path}: the last document ends at sequence {previous}, but the index has {header.num_sequences} "
            "sequences: make the dataset again"
        )


def _read_array(path: str, dtype: type[np.generic], offset: int, count: int) -> np.ndarray:
    return np.fromfile(path, dtype=dtype, count=count, offset=offset)


def read_lengths(prefix: str) -> np.ndarray:
    """Return the tokens of each sequence, int32 [sequences], of a dataset that `check_prefix` found sound."""
    header = _read_header(prefix)
    return _read_array(idx_path(prefix), np.int32, HEADER_BYTES, header.num_sequences)


def read_boundaries(prefix: str) -> np.ndarray:
    """Return the document boundaries, int64 [documents + 1], of a dataset that `check_prefix` found sound."""
    header = _read_header(prefix)
    offset = HEADER_BYTES + 12 * header.num_sequences
    return _read_array(idx_path(prefix), np.int64, offset, header.num_boundaries)


def check_vocabulary(
    summary: PrefixSummary, vocab_size: int, on_progress: Callable[[int], None] | None = None
) -> tuple[int, int]:
    """Return (smallest, largest) id of all tokens. Reads the whole .bin; `on_progress` gets the bytes read so far.

    Raises ValueError, naming the first bad token's position, for an id outside 0..vocab_size-1.
    """
    path = bin_path(summary.prefix)
    smallest, largest, position = np.inf, -np.inf, 0
    with open(path, "rb") as file:
        while (tokens := np.fromfile(file, dtype=summary.dtype, count=_CHUNK)).size:
            low, high = tokens.min(), tokens.max()
            if low < 0 or high >= vocab_size:
                bad = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
                raise ValueError(
                    f"{path}: token {position + bad} ({_sequence_of(summary, position + bad)}) is {tokens[bad]}, "
                    f"allowed are 0 to {vocab_size - 1}: tokenize with the tokenizer that --vocab-size belongs to"
                )
            smallest, largest = min(smallest, low), max(largest, high)
            position += tokens.size
            if on_progress is not None:
                on_progress(position * summary.dtype.itemsize)
    return int(smallest), int(largest)


def _sequence_of(summary: PrefixSummary, token: int) -> str:
    ends = np.cumsum(read_lengths(summary.prefix), dtype=np.int64)
    return f"in sequence {int(np.searchsorted(ends, token, side='right'))}"
