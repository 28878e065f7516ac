"""Saves without a model, for tests of what happens around them: kills, full disks, damaged and dangerous files."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.training import checkpointing_layout as layout
from megatron.training.checkpointing_format import CheckpointReader
from megatron.training.checkpointing_load import read_common
from megatron.training.checkpointing_safety import read_checksums, verify_file
from megatron.training.checkpointing_save import SaveItem, SaveResult, save_checkpoint

ROWS, COLUMNS, NUM_TENSORS = 64, 1024, 6


def values(number: int, iteration: int) -> torch.Tensor:
    """Return what tensor `number` holds at an iteration: fp32 [ROWS, COLUMNS]."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1000 * iteration + number))


def items(iteration: int) -> list[SaveItem]:
    """Return this rank's rows of all tensors, and one object of the first rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = ROWS // size
    out = []
    for number in range(NUM_TENSORS):
        part = values(number, iteration)[rank * rows : (rank + 1) * rows]
        out.append(
            SaveItem(f"tensor{number}", lambda part=part: part, (ROWS, COLUMNS), (rank * rows, 0), (rows, COLUMNS))
        )
    if rank == 0:
        out.append(SaveItem("thing/shard_0_1", lambda: {"iteration": iteration}))
    return out


def save(root: str, iteration: int, keep_last: int | None = None, retain: int | None = None) -> SaveResult:
    """Save iteration `iteration` of the tensors above."""
    common = {"iteration": iteration, "deep_offload": {"format": 1}}
    return save_checkpoint(
        Path(root), iteration, lambda: items(iteration), lambda: common, keep_last=keep_last, retain_interval=retain
    )


def save_with_little_disk(root: str, iteration: int, rank: int, limit: int) -> SaveResult:
    """Save while files of one rank may not grow beyond `limit` bytes, as on a disk that is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return save(root, iteration)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def complete_and_right(root: Path) -> int:
    """Return the iteration that a run would load, after comparing every byte of it with what was saved."""
    place = layout.find_checkpoint(root, None)
    if place is None:
        return 0
    folder, iteration = place
    sums = read_checksums(folder)
    assert sums is not None and sums.keys() == {p.name for p in folder.iterdir()} - {layout.CHECKSUMS}
    for name, digest in sums.items():
        assert verify_file(folder, name, digest) is None
    assert read_common(folder)["iteration"] == iteration
    reader = CheckpointReader(folder)
    for number in range(NUM_TENSORS):
        out = torch.zeros(ROWS, COLUMNS)
        for where, part in reader.read(f"tensor{number}", (0, 0), (ROWS, COLUMNS)):
            out[where] = part
        assert torch.equal(out, values(number, int(iteration)))
    assert reader.read_object("thing/shard_0_1") == {"iteration": iteration}
    return int(iteration)


def kill_at_random_moments(root: str, times: int, seed: int) -> tuple[int, set[str]]:
    """Kill two saving ranks -9 `times` times, each at a random moment, checking after each; in one process.

    Returns the last iteration and which kinds of hidden leftovers were seen.
    """
    moments = random.Random(seed)
    folder, last, seen = Path(root), 0, set()
    seconds = 0.0
    for attempt in range(times):
        with tempfile.TemporaryDirectory() as store:
            children = [_fork_saver(root, rank, 2, f"{store}/store", last) for rank in range(2)]
            _wait_for(Path(store, "started"))
            if not seconds:  # the first is only stopped after two saves, to know how long they take
                started = time.monotonic()
                _wait_for(folder / "iter_0000002")
                seconds = (time.monotonic() - started) / 2
            time.sleep(moments.uniform(0, 2.5 * seconds))
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)
        now = complete_and_right(folder)
        assert now >= last, f"after kill {attempt} the checkpoint of iteration {last} is gone"
        seen |= {entry.name[: entry.name.index("_")] for entry in folder.iterdir() if entry.name.startswith(".")}
        last = now
    return last, seen


def _fork_saver(root: str, rank: int, size: int, store: str, iteration: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if dist.is_initialized():
            # The parent's own world, whose threads were not forked.
            dist.distributed_c10d._world.default_pg = None
            dist.distributed_c10d._world.pg_map.clear()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        if rank == 0:
            Path(store).with_name("started").touch()
        while True:
            iteration += 1
            save(root, iteration, keep_last=2)
    finally:
        os._exit(1)


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until, "the saving processes did not start"
        time.sleep(0.002)
