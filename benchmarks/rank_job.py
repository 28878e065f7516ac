"""What torchrun starts on each GPU for benchmarks/two_gpus.py: trainings one after another, in one process.

    torchrun --nproc_per_node 2 -m benchmarks.rank_job JOB.json

JOB.json: {"folder": ..., "runs": [[name, flags of pretrain_gpt.py], ...]}. Each run leaves FOLDER/NAME.rankR.log and,
once it is complete, FOLDER/NAME.rankR.json with what this rank saw.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_offload.optimizer.megatron import DeepOffloadOptimizer
from megatron.training.arguments import parse_args
from megatron.training.launch import Ranks
from megatron.training.training import pretrain

NUM_WARM_UP = 2
"""Iterations at the start that no median counts."""
_NUM_TIMELINES = 6


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=False, timeout=timedelta(seconds=60))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # each run has a port, and rank 0 serves it
    for name, flags in job["runs"]:
        if rank == 0:
            store.set(f"port of {name}", str(free_port()))
        own_port = int(store.get(f"port of {name}"))
        place = Ranks(rank, world, int(os.environ["LOCAL_RANK"]), world, "127.0.0.1", own_port, "torchrun")
        train(flags, place, Path(job["folder"]) / f"{name}.rank{rank}")
    return 0


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(flags: str, ranks: Ranks, path: Path) -> None:
    """One training; writes `path`.log while it runs and `path`.json at its end."""
    seen: dict[str, Any] = {}
    start = time.perf_counter()
    log = path.with_name(path.name + ".log")
    with log.open("w", buffering=1) as out, contextlib.redirect_stdout(out), _observed(seen):
        pretrain(parse_args(flags.split(), world_size=ranks.world_size), ranks)
    text = log.read_text()
    times = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    seen |= {
        "losses": re.findall(r"lm loss: (\S+)", text),
        "iteration_ms": statistics.median(times[NUM_WARM_UP:] or times) if times else None,
        "num_iterations": len(times),
        "wait_ms": re.findall(r"offload wait \(ms\): (\S+)", text)[NUM_WARM_UP:],
        "digest": "".join(re.findall(r"state digest: (\S+)", text)),
        "placement": "".join(re.findall(r"placement: GPU (share .*?), \d+ slots", text)[:1]),
        "predicted_ms": float("".join(re.findall(r"predicted update: (\S+) ms", text)[:1]) or 0),
        "seconds": time.perf_counter() - start,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    path.with_name(path.name + ".json").write_text(json.dumps(seen, indent=1))
    gc.collect()  # the next run's memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _observed(seen: dict[str, Any]) -> Iterator[None]:
    """Note each step's update on this rank, and its peaks, before anything is hashed."""
    step, digest, close = DeepOffloadOptimizer.step, DeepOffloadOptimizer.state_digest, DeepOffloadOptimizer.close

    def watched_step(self: DeepOffloadOptimizer) -> Any:
        if "numel" not in seen:
            seen["numel"] = self._engine.layout.numel
            self.keep_timelines(_NUM_TIMELINES)
        return step(self)

    def note(self: DeepOffloadOptimizer) -> None:
        if "numel" not in seen or "update_ms" in seen:
            return
        updates = [t for t in self.timelines() if t.update_spans]
        seen["update_ms"] = statistics.median(t.update_seconds * 1e3 for t in updates) if updates else None
        seen["in_place_ms"] = statistics.median(t.in_place_seconds * 1e3 for t in updates) if updates else None
        seen["state_bytes"] = self.memory_bytes()
        seen["peak_device_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def watched_digest(self: DeepOffloadOptimizer, *arguments: Any, **options: Any) -> str:
        note(self)
        start = time.perf_counter()
        text = digest(self, *arguments, **options)
        seen["digest_seconds"] = time.perf_counter() - start
        return text

    def watched_close(self: DeepOffloadOptimizer) -> None:
        note(self)
        close(self)

    with (
        mock.patch.object(DeepOffloadOptimizer, "step", watched_step),
        mock.patch.object(DeepOffloadOptimizer, "state_digest", watched_digest),
        mock.patch.object(DeepOffloadOptimizer, "close", watched_close),
    ):
        yield


if __name__ == "__main__":
    sys.exit(main())
