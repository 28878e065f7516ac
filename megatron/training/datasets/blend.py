"""Weighted data paths, splits and epochs: the arithmetic of megatron.core's dataset builder, without building."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SPLIT_NAMES = ("train", "valid", "test")
_SURPLUS = 0.005  # megatron.core asks each source of a weighted blend for this much more than its share


@dataclass(frozen=True, slots=True)
class Blend:
    """Dataset prefixes and their weights; weights is None where none were given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    def share(self, index: int) -> float:
        """Return the share of samples that source `index` gives; needs weights, or a single source."""
        if self.weights is None:
            assert len(self.prefixes) == 1
            return 1.0
        return self.weights[index] / sum(self.weights)


def parse_data_path(words: Sequence[str]) -> Blend:
    """Return the blend that the words of --data-path spell: prefixes, or weight prefix weight prefix ...

    As Megatron reads it: an odd number of words, or no number in any weight's place, means prefixes only.
    Raises ValueError for a mixture of both and for a weight that is not above 0.
    """
    if not words:
        raise ValueError("--data-path is empty: give a prefix, or weight prefix weight prefix ...")
    numbers = [_number(word) for word in words[0::2]]
    if len(words) % 2 == 1 or all(number is None for number in numbers):
        if len(words) > 1 and _number(words[0]) is not None:
            raise ValueError(
                f"--data-path has {len(words)} words and starts with the weight {words[0]}: "
                "weights and prefixes must come in pairs"
            )
        return Blend(tuple(word.strip() for word in words), None)
    weights = []
    for word, number in zip(words[0::2], numbers):
        if number is None:
            raise ValueError(f"--data-path has {word!r} where a weight should be: give all prefixes a weight, or none")
        if not 0 < number < math.inf:
            raise ValueError(f"--data-path has the weight {word}, allowed are numbers above 0: leave the source out")
        weights.append(number)
    return Blend(tuple(word.strip() for word in words[1::2]), tuple(weights))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test that `text`, such as "949,50,1", spells; they sum to 1.

    Raises ValueError for anything but one to three numbers, not all zero.
    """
    words = [word.strip() for word in re.split(r"[,/]", text)]
    numbers = [_number(word) for word in words]
    if len(words) > 3 or any(number is None or not 0 <= number < math.inf for number in numbers):
        raise ValueError(f"--split is {text!r}, expected are up to three numbers from 0, such as 949,50,1")
    values = [number or 0.0 for number in numbers] + [0.0] * (3 - len(words))
    total = sum(values)
    if total <= 0:
        raise ValueError(f"--split is {text!r}, at least one of its numbers must be above 0")
    return values[0] / total, values[1] / total, values[2] / total


def split_ranges(shares: Sequence[float], num_sequences: int) -> list[tuple[int, int] | None]:
    """Return (first, last + 1) of each split's sequences, None where its share is 0; rounded as megatron.core does."""
    ends = list(accumulate(shares, initial=0.0))
    return [
        (round(begin * float(num_sequences)), round(end * float(num_sequences))) if end > begin else None
        for begin, end in zip(ends[:-1], ends[1:])
    ]


def suggest_split(shares: Sequence[float], sequences_of_sources: Sequence[int]) -> str | None:
    """Return a --split that gives every wanted split at least one sequence of every source, near `shares`.

    Where the smallest source has too few sequences, splits are given up from the last one. None: not even train.
    """
    fewest = min(sequences_of_sources)
    for num_kept in range(3, 0, -1):
        kept = [share if i < num_kept else 0.0 for i, share in enumerate(shares)]
        wanted = sum(share > 0 for share in kept)
        if not kept[0] or fewest < wanted:
            continue
        for parts in range(1, 4):
            # Small splits grow to `parts` sequences of the smallest source; train gives them up.
            counts = [max(parts, round(share * fewest)) if share else 0 for share in kept]
            counts[0] = fewest - counts[1] - counts[2]
            if counts[0] > 0 and not _has_empty(counts, sequences_of_sources):
                return ",".join(map(str, counts))
    return None


def _has_empty(counts: Sequence[int], sequences_of_sources: Sequence[int]) -> bool:
    shares = [count / sum(counts) for count in counts]
    ranges = [split_range for count in sequences_of_sources for split_range in split_ranges(shares, count)]
    return any(split_range is not None and split_range[0] == split_range[1] for split_range in ranges)


def samples_of_source(num_samples: int, blend: Blend, index: int) -> int:
    """Return the samples that megatron.core builds from source `index` for `num_samples` of the whole blend."""
    if blend.weights is None:
        return num_samples
    return math.ceil(math.ceil(num_samples * blend.share(index)) * (1 + _SURPLUS))


def whole_epochs(num_samples: int, seq_length: int, tokens_per_epoch: int) -> int:
    """Return how many times the source's tokens are laid end to end for `num_samples`; each sample reads one more."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def samples_per_epoch(tokens_per_epoch: int, seq_length: int) -> int:
    """Return the samples that one pass over a source gives."""
    return max(0, (tokens_per_epoch - 1) // seq_length)
