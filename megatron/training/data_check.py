"""What lies behind a data prefix, checked before anything is built: whole files, and a split that can be drawn from.

Without these checks a cut file fails at some late sample, and a split without tokens is searched for ever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.training.datasets.indexed_format import HEADER_BYTES, bin_path, idx_path, unpack_header

SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True, slots=True)
class IndexedTokens:
    """A checked PREFIX.bin/PREFIX.idx pair. `lengths`: int32 [sequences], tokens of each, read from disk as needed."""

    prefix: str
    lengths: np.ndarray


@dataclass(frozen=True, slots=True)
class SplitSize:
    """What one prefix gives to one split."""

    num_sequences: int
    num_tokens: int


def check_prefix(prefix: str) -> IndexedTokens:
    """Return the index of `prefix`.

    Raises ValueError, one sentence, where a file is missing, no index, empty, or shorter than the index says.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not os.path.isfile(path):
            stem, suffix = os.path.splitext(prefix)
            hint = (
                f"give the prefix without the suffix, {stem}"
                if suffix in (".bin", ".idx")
                else ("give the path of PREFIX.bin and PREFIX.idx without its suffix")
            )
            raise ValueError(f"the data prefix {prefix} has no file {path}: {hint}")
    path = idx_path(prefix)
    with open(path, "rb") as file:
        header = unpack_header(file.read(HEADER_BYTES), path)
    have = os.path.getsize(path)
    if have < HEADER_BYTES + header.body_bytes:
        raise ValueError(
            f"{path} has {have} bytes, but its header announces {HEADER_BYTES + header.body_bytes}: the file was cut "
            "short, copy or make it again"
        )
    count = header.num_sequences
    if count == 0:
        raise ValueError(f"{path} holds 0 documents: there is nothing to train on, make the dataset again")
    lengths = np.memmap(path, dtype=np.int32, mode="r", offset=HEADER_BYTES, shape=(count,))
    pointers = np.memmap(path, dtype=np.int64, mode="r", offset=HEADER_BYTES + 4 * count, shape=(count,))
    boundary = np.memmap(
        path, dtype=np.int64, mode="r", offset=HEADER_BYTES + 12 * count, shape=(header.num_boundaries,)
    )
    last = int(boundary[-1]) if header.num_boundaries else 0
    if last != count:
        raise ValueError(
            f"{path} ends its documents at sequence {last}, but holds {count} sequences: make the dataset again"
        )
    need = int(pointers[-1]) + int(lengths[-1]) * header.dtype.itemsize
    have = os.path.getsize(bin_path(prefix))
    if have < need:
        raise ValueError(
            f"{bin_path(prefix)} has {have} bytes, but {path} describes {need}: the file was cut short, copy or make "
            "it again"
        )
    return IndexedTokens(prefix, lengths)


def split_sizes(index: IndexedTokens, split_matrix: Sequence[tuple[float, float] | None]) -> list[SplitSize | None]:
    """Return what each split gets of a prefix, None for a split that was not asked for.

    split_matrix: begin and end of each split as parts of 1, as megatron-core cuts sequences.
    """
    count = len(index.lengths)
    sizes: list[SplitSize | None] = []
    for part in split_matrix:
        if part is None:
            sizes.append(None)
            continue
        begin, end = int(round(part[0] * float(count))), int(round(part[1] * float(count)))
        sizes.append(SplitSize(end - begin, int(index.lengths[begin:end].sum(dtype=np.int64))))
    return sizes


def check_split(
    prefix: str, num_sequences: int, split: str, sizes: Sequence[SplitSize | None], wanted: Sequence[int]
) -> list[str]:
    """Check that every split that samples are wanted of has tokens. Returns notes on splits that stay empty.

    wanted: samples per split. An empty test split is only noted. Raises ValueError naming the split and a better one.
    """
    notes = []
    for index, (size, samples) in enumerate(zip(sizes, wanted)):
        if samples == 0 or (size is not None and size.num_tokens > 0):
            continue
        name = SPLIT_NAMES[index]
        what = "0 documents" if size is None or size.num_sequences == 0 else f"{size.num_sequences} empty documents"
        if name == "test":
            notes.append(f"--split {split} gives the test {what} of {prefix}: no test at the end.")
            continue
        way_out = f"--split {_suggest(num_sequences)}" + (" or --eval-iters 0" if name == "validation" else "")
        raise ValueError(
            f"--split {split} gives {name} {what} of the {num_sequences} in {prefix}: use {way_out}, or more data"
        )
    return notes


def _suggest(num_sequences: int) -> str:
    """Return a split that leaves at least one sequence for training and one for validation."""
    if num_sequences < 2:
        return "1,0,0"
    held_out = max(1, num_sequences // 20)
    return f"{num_sequences - held_out},{held_out},0"


def describe_split(name: str, sizes: Sequence[SplitSize], num_samples: int, seq_length: int) -> str:
    """Return one line: how many tokens a split has and how often its samples go through them."""
    tokens = sum(size.num_tokens for size in sizes)
    documents = sum(size.num_sequences for size in sizes)
    epochs = num_samples * seq_length / tokens if tokens else 0.0
    return (
        f"    {name}: {tokens:,} tokens in {documents:,} documents, {num_samples:,} samples of {seq_length} "
        f"= {epochs:.2f} epochs"
    )
