"""Long-lived ranks for tests: N processes that stay up and run one picklable function after another, together.

Starting a process and importing torch takes seconds, a case takes a fraction of one: a pool runs many cases per start.

    POOL = RankPool(4)
    losses = POOL.run(train_some_steps, 10, ranks=2)   # [result of rank 0, result of rank 1]

The function must be importable (`from tests.some_module import function`), its arguments and results picklable. Each
run gets a new torch.distributed world over gloo; megatron-core's groups of the run before are gone (`use_layout`).
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

_REPOSITORY = str(Path(__file__).resolve().parents[1])


RUNS_PER_START = 8
"""New processes after so many runs: gloo's threads outlive their groups, and hundreds of them slow everything down."""


class RankFailure(AssertionError):
    """A case failed. The message is the first error of all ranks, or where each rank stood when time was up."""


@dataclass(frozen=True, slots=True)
class _Case:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    ranks: int
    store: str
    timeout_s: float


class RankPool:
    """`size` processes on this machine. A failed case ends them all; the next run starts new ones."""

    def __init__(
        self,
        size: int,
        *,
        timeout_s: float = 120.0,
        threads: int = 1,
        method: str = "forkserver",
        runs_per_start: int = RUNS_PER_START,
    ) -> None:
        """timeout_s: of one run, start-up excluded; threads: of torch in each rank.

        method: how processes start. Those that use a GPU are spawned: importing megatron-core may look for GPUs, and
        CUDA does not work in a process that is forked from one that did.
        """
        self.size = size
        self._context = multiprocessing.get_context(method)
        self._runs_per_start = runs_per_start
        self._timeout_s = timeout_s
        self._threads = threads
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")
        self._num_runs = 0
        self._runs_since_start = 0
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> list[Any]:
        """Call function(*arguments, **options) on the first `ranks` ranks (all by default); returns results by rank.

        Raises RankFailure with the traceback that came first when a rank raises, dies, or is not done in time.
        """
        count = self.size if ranks is None else ranks
        assert 1 <= count <= self.size, f"the pool has {self.size} ranks, not {count}"
        if self._runs_since_start >= self._runs_per_start:
            self.close()
        if not self._workers:
            self._start()
            self._runs_since_start = 0
        self._runs_since_start += 1
        self._num_runs += 1
        limit = self._timeout_s if timeout_s is None else timeout_s
        store = os.path.join(self._folder.name, f"store_{self._num_runs}")
        case = _Case(function, arguments, options, count, store, limit)
        for _, pipe in self._workers[:count]:
            pipe.send(case)
        return self._collect(count, limit)

    def close(self) -> None:
        """End all processes."""
        workers, self._workers = self._workers, []
        for process, pipe in workers:
            pipe.close()
            process.join(timeout=0.2)
        for process, _ in workers:
            if process.is_alive():
                process.kill()
            process.join(timeout=5)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _start(self) -> None:
        context = self._context
        if isinstance(context, ForkServerContext):
            # Forked from a server that has imported torch but started no thread: as cheap as fork, as safe as spawn.
            context.set_forkserver_preload(["tests.rank_pool_preload"])
        for rank in range(self.size):
            here, there = context.Pipe()
            # Not daemonic: checkpoint writers and data loaders start processes of their own.
            place = rank, there, self._threads, self._folder.name
            process = context.Process(target=_serve, args=place, daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))
        for _, pipe in self._workers:
            if not pipe.poll(120) or pipe.recv() != "ready":
                self.close()
                raise RankFailure("a rank of the pool did not start within 120 s")

    def _collect(self, count: int, limit: float) -> list[Any]:
        results: dict[int, Any] = {}
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:count])}
        until = time.monotonic() + limit
        while len(results) < count:
            waiting = [pipe for pipe, rank in ranks.items() if rank not in results]
            ready = wait(waiting, timeout=max(until - time.monotonic(), 0))
            if not ready:
                raise RankFailure(self._where_all_stand(sorted(set(range(count)) - set(results)), limit))
            for pipe in ready:
                rank = ranks[pipe]
                try:
                    is_ok, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join(timeout=2)
                    code = process.exitcode
                    self.close()
                    raise RankFailure(f"rank {rank} of {count} died with exit code {code}") from None
                if not is_ok:
                    self.close()
                    raise RankFailure(f"rank {rank} of {count} raised first:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(count)]

    def _where_all_stand(self, missing: list[int], limit: float) -> str:
        for rank in missing:
            process = self._workers[rank][0]
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        lines = [f"ranks {missing} were not done after {limit:g} s"]
        for rank in missing:
            path = Path(self._folder.name, _trace_of(rank))
            lines.append(f"--- rank {rank} stood at:\n{path.read_text() if path.exists() else 'unknown'}")
        self.close()
        return "\n".join(lines)


def use_layout(tensor: int = 1, pipeline: int = 1, virtual: int | None = None, seed: int = 1234) -> None:
    """In a rank: set up megatron-core's groups (data parallelism takes the ranks that are left) and seeds."""
    import numpy as np
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        create_gloo_process_groups=False,
    )
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def _trace_of(rank: int) -> str:
    return f"trace_{rank}"


def _serve(rank: int, pipe: Connection, threads: int, folder: str) -> None:
    """Run cases in `folder` until the pool closes the pipe."""
    if _REPOSITORY not in sys.path:
        sys.path.insert(0, _REPOSITORY)
    os.chdir(folder)  # what runs leave beside themselves, such as a post-mortem, goes there
    import torch

    torch.set_num_threads(threads)
    with open(_trace_of(rank), "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        _enable_cpu()
        pipe.send("ready")
        while True:
            try:
                case = pipe.recv()
            except EOFError:
                os._exit(0)  # without waiting for threads of gloo or of a test
            pipe.send(_run(rank, case))


def _run(rank: int, case: _Case) -> tuple[bool, Any]:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{case.store}",
            rank=rank,
            world_size=case.ranks,
            timeout=timedelta(seconds=case.timeout_s),
        )
        result = case.function(*case.arguments, **case.options)
        _leave()
        return True, result
    except BaseException:  # noqa: BLE001 - all of them belong to the test's report
        return False, traceback.format_exc()


def _leave() -> None:
    """Forget everything global of a run, so that the next one may use another layout."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    tracker = random._CUDA_RNG_STATE_TRACKER
    if tracker is not None:
        tracker.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _enable_cpu() -> None:
    import torch

    if not torch.cuda.is_available():
        from megatron.training import cpu

        cpu.enable()
