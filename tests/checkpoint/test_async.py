"""--async-save: what is written is the state of its iteration, however slow the writer and whatever comes after."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

from deep_offload.optimizer.host_room import available_host_bytes
from deep_offload.runtime.limits import read_host_limits
from megatron.training.checkpointing_async import has_room_for_copy
from megatron.training.checkpointing_inspect import Checkpoint
from tests.checkpoint.cases import MODEL, OFFLOAD, VOCAB, Run, words

PLACEMENTS = {
    "cpu": OFFLOAD + " --offload-gpu-share 0",
    "gpu": OFFLOAD + " --offload-gpu-share 1 --offload-subgroup-numel 5000",
    "split": OFFLOAD + " --offload-split-master on --offload-resident-fraction 0.3",
}


def _train(argv, *, copy=True, waits=True, seconds=0.0):
    """Train with a writer that takes `seconds` longer for each tensor; returns log lines and the digest."""
    from megatron.training import checkpointing, checkpointing_async, checkpointing_format

    add, room = checkpointing_format.BoxWriter.add_tensor, checkpointing.has_room_for_copy
    wait = checkpointing_async.AsyncSave.wait_for_reader

    def slow(self, *args):
        time.sleep(seconds)
        add(self, *args)

    checkpointing_format.BoxWriter.add_tensor = slow
    checkpointing.has_room_for_copy = lambda *args: copy
    if not waits:
        checkpointing_async.AsyncSave.wait_for_reader = lambda self: None
    try:
        run = Run(argv)
        run.train()
        run.trainer.finish()
        result = run.lines, run.optimizer.state_digest(VOCAB)
        run.close()
        return result
    finally:
        checkpointing_format.BoxWriter.add_tensor = add
        checkpointing.has_room_for_copy = room
        checkpointing_async.AsyncSave.wait_for_reader = wait


def _flags(placement, folder, *more):
    return words(MODEL, PLACEMENTS[placement], f"--save {folder} --save-interval 2 --train-iters 6", *more)


@pytest.fixture(scope="module")
def expected(pool, tmp_path_factory):
    """Digests of synchronous checkpoints by iteration; every placement has the same."""
    folder = tmp_path_factory.mktemp("sync")
    _, digest = pool.run(_train, _flags("cpu", folder), ranks=2)[0]
    digests = {i: Checkpoint(folder / f"iter_{i:07d}").digest() for i in (2, 4, 6)}
    assert digests[6] == digest and len(set(digests.values())) == 3
    return digests


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "wait"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_slow_writer_writes_the_state_of_its_iteration(pool, expected, tmp_path, placement, copy):
    """Later steps train the same and do not reach the files, with a copy and without."""
    lines, digest = pool.run(_train, _flags(placement, tmp_path, "--async-save"), copy=copy, seconds=0.002, ranks=2)[0]
    assert digest == expected[6]
    for iteration, value in expected.items():
        assert Checkpoint(tmp_path / f"iter_{iteration:07d}").digest() == value
    assert sum("beside training" in line and "stood still for" in line for line in lines) == 3
    assert sum("saved checkpoint of iteration" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": 3 << 20, "job/memory.current": 1 << 20, "job/step/memory.max": "max"}, 2),
        (
            "4:memory:/job\n",
            {"memory/job/memory.limit_in_bytes": 3 << 20, "memory/job/memory.usage_in_bytes": 2 << 20},
            1,
        ),
        ("0::/\n", {"memory.max": "max", "memory.current": 1 << 20}, None),
        ("0::/\n", {"memory.max": 1 << 50, "memory.current": 0}, None),
    ],
    ids=["nested", "version 1", "no limit", "more than there is"],
)
def test_a_copy_fits_into_what_every_limit_leaves(tmp_path, monkeypatch, membership, files, expected):
    """The group of a SLURM step or of systemd-run counts, of either version; without a limit what the machine has."""
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    (tmp_path / "self").write_text(membership)
    monkeypatch.setattr(read_host_limits, "__defaults__", (tmp_path / "cgroup", tmp_path / "self"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert available_host_bytes() == (1 << 40 if expected is None else expected << 20)
    assert has_room_for_copy(1 << 20, 1) == (expected != 1)


def test_without_the_wait_later_steps_reach_the_file(pool, expected, tmp_path):
    """The comparison above can fail: a writer that nobody waits for writes a mixture."""
    argv = _flags("cpu", tmp_path, "--async-save")
    pool.run(_train, argv, copy=False, waits=False, seconds=0.005, ranks=1)
    one = _flags("cpu", tmp_path / "sync")
    pool.run(_train, one, ranks=1)
    right = Checkpoint(tmp_path / "sync" / "iter_0000002").digest()
    assert Checkpoint(tmp_path / "iter_0000002").digest() != right
