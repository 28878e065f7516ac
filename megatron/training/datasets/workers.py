"""Runs one function over a stream of items in worker processes: results in order, and never a wait for the dead.

Each worker has a pipe of its own and at most one item in hand. A shared queue would be simpler, but a worker killed
while it holds the queue's lock leaves everybody waiting for ever; here its end of the pipe closes and the parent
sees that at once.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_ITEMS_AHEAD = 4  # per worker: finished results that may wait for an earlier one
_STOP_SECONDS = 5.0


class WorkerError(Exception):
    """A worker died or its function raised: one sentence for the user."""


class OrderedPool:
    """`num_workers` forked processes that apply `function`. Use it as a context manager; fork before starting threads.

    The function and what it refers to (a tokenizer) are inherited, not sent. Workers end by themselves when the
    parent dies, however it dies.
    """

    def __init__(self, num_workers: int, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        gc.collect()
        gc.freeze()  # the collector of a child would otherwise touch, and so copy, every page of the tokenizer
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            # The child must not keep the other ends: a pipe reports a death only when all its copies are closed.
            process = context.Process(
                target=_work, args=(theirs, function, [*self._connections, ours], os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        gc.unfreeze()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid or -1 for process in self._processes]

    def map(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield `function(item)` for each item, in the order of the items.

        An exception of `items` is raised after the results of all items before it. Raises WorkerError when a worker
        dies or its function raises.
        """
        busy: dict[int, int] = {}  # worker -> position of its item
        finished: dict[int, Any] = {}
        next_out, next_in = 0, 0
        source = _Source(items)
        window = _ITEMS_AHEAD * len(self._processes)
        while True:
            for worker in range(len(self._processes)):
                if worker in busy or next_in - next_out >= window or not source.has_next():
                    continue
                self._send(worker, source.take())
                busy[worker] = next_in
                next_in += 1
            while next_out in finished:
                yield finished.pop(next_out)
                next_out += 1
            if not busy:
                if source.has_next():
                    continue
                break
            source.has_next()  # read the next item while all workers are busy
            for worker in self._ready(busy):
                finished[busy[worker]] = self._receive(worker)
                del busy[worker]
        source.raise_error()

    def _ready(self, busy: dict[int, int]) -> list[int]:
        # All pipes, not only the busy ones: an idle worker that was killed is noticed too.
        ready = wait(self._connections)
        workers = [i for i, connection in enumerate(self._connections) if connection in ready]
        for worker in workers:
            if worker not in busy:
                raise self._death(worker)
        return workers

    def _send(self, worker: int, item: object) -> None:
        try:
            self._connections[worker].send(item)
        except OSError:
            raise self._death(worker) from None

    def _receive(self, worker: int) -> object:
        try:
            is_error, result = self._connections[worker].recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if is_error:
            raise WorkerError(f"worker {worker} failed: {result}")
        return result

    def _death(self, worker: int) -> WorkerError:
        process = self._processes[worker]
        process.join(_STOP_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
            hint = ", often the system's answer to too little memory: use fewer --workers" if code == -9 else ""
        else:
            how, hint = f"ended with exit code {code}", ""
        return WorkerError(f"worker {worker} (process {process.pid}) {how}{hint}")

    def close(self) -> None:
        """End all workers; takes seconds at most."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()  # an idle worker sees the end of its pipe and returns
        deadline = time.monotonic() + 0.2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(_STOP_SECONDS)

    def __enter__(self) -> OrderedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Source:
    """The items, with a look ahead of one; an exception is kept until the items before it are done."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ahead: list[Any] = []
        self._is_done = False
        self._error: BaseException | None = None

    def has_next(self) -> bool:
        if not self._ahead and not self._is_done:
            try:
                self._ahead.append(next(self._items))
            except StopIteration:
                self._is_done = True
            except (ValueError, OSError) as error:
                self._is_done, self._error = True, error
        return bool(self._ahead)

    def take(self) -> object:
        return self._ahead.pop()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _work(connection: Connection, function: Callable[[Any], Any], others: list[Connection], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    if os.getppid() != parent:
        return  # the parent died between fork and here
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (False, function(item))
        except BaseException as error:  # noqa: BLE001 - panics of Rust tokenizers are no Exception
            answer = (True, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        try:
            connection.send(answer)
        except OSError:
            return
