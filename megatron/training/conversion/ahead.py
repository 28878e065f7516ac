"""Making the next tensor while the one before is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def one_ahead(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results in order, each call made in one other thread while the caller uses the result before.

    Two results are in memory at once. What a call raises is raised in its turn; nothing runs on after the end.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="one-ahead") as pool:
        waiting: Future[T] | None = None
        for call in calls:
            following = pool.submit(call)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
