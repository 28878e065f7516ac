"""A pairwise cover in two levels: trainings, and for each several placements, which share one reference run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Row = dict[str, object]


def pairs_of(row: Row) -> set[tuple]:
    """All pairs of (option, value) that occur in the row."""
    items = sorted(row.items())
    return set(itertools.combinations(items, 2))


def product_rows(options: dict[str, Sequence]) -> list[Row]:
    """Every combination."""
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


def greedy_cover(rows: Sequence[Row]) -> list[Row]:
    """Few of `rows` in which every pair that occurs in any of them occurs; the same rows each time."""
    missing = set().union(*(pairs_of(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def two_level_cover(outer: Sequence[Row], inner: Sequence[Row], each: int) -> list[tuple[Row, list[Row]]]:
    """For each outer row at least `each` inner rows; every pair of values across and inside inner rows occurs."""
    everything = set().union(*(pairs_of(o | i) for o in outer for i in inner))
    missing = everything - set().union(*(pairs_of(o) for o in outer))
    cases: list[tuple[Row, list[Row]]] = [(row, []) for row in outer]
    rounds = 0
    while missing or rounds < each:
        for row, chosen in cases:
            best = max(inner, key=lambda i: (len(pairs_of(row | i) & missing), i not in chosen))
            if rounds < each or pairs_of(row | best) & missing:
                chosen.append(best)
                missing -= pairs_of(row | best)
        rounds += 1
    return cases
