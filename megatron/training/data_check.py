"""Whether each split of the data has tokens, checked before anything is built, and what the splits amount to.

megatron-core searches a split without tokens for ever. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.training.datasets.blend import (
    Blend,
    parse_split,
    samples_of_source,
    split_ranges,
    suggest_split,
    whole_epochs,
)
from megatron.training.datasets.check import check_prefix, read_lengths

NAMES = ("training", "validation", "test")
Wanted = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SplitSize:
    """What one prefix gives to one split."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DataReport:
    """num_samples: what is left to build of what is wanted; `lines` describe the splits, `notes` what stays empty.

    `epochs`: the passes over each training source that are shuffled for `num_samples`; empty where that is one in
    any case.
    """

    num_samples: Wanted
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    epochs: tuple[int, ...] = ()


def check_split(blend: Blend, split: str, wanted: Wanted, seq_length: int) -> DataReport:
    """Check every prefix of a blend that `split` cuts into training, validation and test.

    wanted: samples of each split. A test split without tokens is given up with a note. Raises ValueError, one
    sentence, for damaged files and for training or validation without tokens.
    """
    shares = parse_split(split)
    sizes: list[list[SplitSize]] = [[], [], []]
    empty: tuple[list[str], list[str], list[str]] = ([], [], [])
    counts = []
    for prefix in blend.prefixes:
        count = check_prefix(prefix).num_sequences
        lengths = read_lengths(prefix)
        counts.append(count)
        for index, part in enumerate(split_ranges(shares, count)):
            begin, end = part or (0, 0)
            size = SplitSize(end - begin, int(lengths[begin:end].sum(dtype=np.int64)))
            sizes[index].append(size)
            if size.num_tokens == 0:
                empty[index].append(f"{prefix} ({count} documents)")
    for index in (0, 1):
        if wanted[index] and empty[index]:
            better = suggest_split(tuple(share or 1.0 / 3 for share in shares), counts)
            ways = [f"use for example --split {better}"] if better else ["use more data"]
            ways += ["--eval-iters 0"] if index == 1 else []
            raise ValueError(
                f"--split {split} leaves no token for {NAMES[index]} of {', '.join(empty[index][:3])}: "
                f"{' or '.join(ways)}"
            )
    notes = []
    if wanted[2] and empty[2]:
        notes.append(f"--split {split} leaves no token for the test of {', '.join(empty[2][:3])}: no test at the end.")
        wanted = (wanted[0], wanted[1], 0)
    epochs = _epochs(blend, sizes[0], wanted[0], seq_length)
    return DataReport(wanted, _describe(sizes, wanted, seq_length), tuple(notes), epochs)


def check_whole(blends: Sequence[Blend | None], wanted: Wanted, seq_length: int) -> DataReport:
    """Check prefixes that belong to one split as a whole; a split without prefixes gets no samples."""
    sizes = []
    for blend in blends:
        prefixes = [] if blend is None else [check_prefix(prefix) for prefix in blend.prefixes]
        sizes.append([SplitSize(prefix.num_sequences, prefix.num_tokens) for prefix in prefixes])
    first, second, third = (count if blend is not None else 0 for blend, count in zip(blends, wanted))
    kept = (first, second, third)
    epochs = _epochs(blends[0], sizes[0], kept[0], seq_length)
    return DataReport(kept, _describe(sizes, kept, seq_length), epochs=epochs)


def _epochs(blend: Blend | None, sizes: Sequence[SplitSize], num_samples: int, seq_length: int) -> tuple[int, ...]:
    is_one_pass = blend is not None and blend.weights is None and len(blend.prefixes) > 1
    if blend is None or is_one_pass or num_samples == 0:
        return ()
    return tuple(
        whole_epochs(samples_of_source(num_samples, blend, index), seq_length, size.num_tokens)
        for index, size in enumerate(sizes)
    )


def _describe(sizes: Sequence[Sequence[SplitSize]], wanted: Wanted, seq_length: int) -> tuple[str, ...]:
    """Return a line for each split: how many tokens it has and how often its samples go through them."""
    lines = []
    for name, own, num_samples in zip(NAMES, sizes, wanted):
        tokens = sum(size.num_tokens for size in own)
        if tokens:
            lines.append(
                f"    {name}: {tokens:,} tokens in {sum(size.num_sequences for size in own):,} documents, "
                f"{num_samples:,} samples of {seq_length} = {num_samples * seq_length / tokens:.2f} epochs"
            )
    return tuple(lines)
