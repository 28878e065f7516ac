"""Reading one tensor ahead of writing, and the cheap look for values that are not finite."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.training.conversion.ahead import one_ahead
from megatron.training.conversion.source import _is_finite


def test_results_come_in_order_one_ahead():
    """While a result is used exactly one more is made, in another thread."""
    made: list[int] = []
    threads: set[int] = set()
    ready = [threading.Event() for _ in range(6)]

    def call(number):
        made.append(number)
        threads.add(threading.get_ident())
        ready[number].set()
        return number

    seen = []
    for number in one_ahead((lambda n=n: call(n)) for n in range(6)):
        seen.append(number)
        ready[min(number + 1, 5)].wait(10)
        assert made == list(range(min(number + 2, 6)))
    assert seen == list(range(6))
    assert len(threads) == 1 and threading.get_ident() not in threads
    assert list(one_ahead([])) == []


def test_error_comes_in_its_turn_and_ends_it():
    """What is made before a failure is still given, and nothing is made after it."""
    made = []

    def call(number):
        made.append(number)
        if number == 2:
            raise ValueError("the third is damaged")
        return number

    results = one_ahead((lambda n=n: call(n)) for n in range(6))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="third"):
        next(results)
    assert made in ([0, 1, 2], [0, 1, 2, 3])


def test_caller_that_stops_leaves_nothing_running():
    """Closing the iterator waits for the call at work."""
    before = threading.active_count()
    results = one_ahead((lambda n=n: n) for n in range(100))
    next(results)
    results.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 33, 5000])
def test_one_bad_value_is_seen_anywhere(dtype, size):
    """NaN and both infinities are found at every kind of place; finite values, extremes included, pass."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0] = torch.finfo(dtype).max
    assert _is_finite(values)
    assert _is_finite(torch.empty(0, dtype=dtype))
    for bad in (float("nan"), float("inf"), float("-inf")):
        for place in {*range(min(size, 40)), size // 2, size - 1}:
            damaged = values.clone()
            damaged[place] = bad
            assert not _is_finite(damaged), (bad, place)
