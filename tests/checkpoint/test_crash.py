"""Saves that are killed, that find the disk full, and files that are damaged afterwards."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.training import checkpointing_format
from megatron.training import checkpointing_layout as layout
from megatron.training import checkpointing_load as load
from megatron.training import checkpointing_safety as safety
from megatron.training.exit_codes import FAULT, USAGE, code_of
from tests.checkpoint import save_cases as cases

REPOSITORY = Path(__file__).resolve().parents[2]


def _kill(tmp_path: Path, times: int, seed: int) -> None:
    code = (
        f"import torch; torch.set_num_threads(1); from tests.checkpoint.save_cases import kill_at_random_moments as k; "
        f"print(k({str(tmp_path / 'save')!r}, {times}, {seed}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    last, seen = done.stdout.strip().rsplit("(", 1)[1].split(",", 1)
    assert int(last) > 1, "no save was ever completed: the moments are badly chosen"
    assert ".saving" in seen, "no save was ever cut short: the moments are badly chosen"


def test_killed_saves_leave_a_complete_checkpoint(tmp_path):
    """Two ranks killed -9 at random moments of a save: the tracker names a checkpoint whose every byte is right."""
    _kill(tmp_path, times=12, seed=1)


@pytest.mark.full
def test_fifty_killed_saves_leave_a_complete_checkpoint(tmp_path):
    """The same at fifty moments."""
    _kill(tmp_path, times=50, seed=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_ends_the_save_everywhere(pool, tmp_path, rank):
    """All ranks learn the error, nothing hangs, the older checkpoint stays and the next save works."""
    root = str(tmp_path / "save")
    assert all(result.error is None for result in pool.run(cases.save, root, 1, ranks=2))
    for result in pool.run(cases.save_with_little_disk, root, 2, rank, 200_000, ranks=2):
        assert result.error is not None and f"rank {rank}" in result.error
    assert cases.complete_and_right(Path(root)) == 1
    assert sorted(p.name for p in Path(root).iterdir()) == ["iter_0000001", layout.TRACKER]
    assert all(result.error is None for result in pool.run(cases.save, root, 3, ranks=2))
    assert cases.complete_and_right(Path(root)) == 3


def test_a_full_disk_of_a_file_system(pool, tmp_path):
    """The same on a real file system that is too small."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        root = str(small / "save")
        assert pool.run(cases.save, root, 1, ranks=2)[0].error is None
        error = pool.run(cases.save, root, 2, ranks=2)[0].error
        assert error is not None and "No space left" in error
        assert cases.complete_and_right(Path(root)) == 1
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("fault", ["write", "sync"])
def test_a_disk_keeps_its_words(tmp_path, monkeypatch, fault):
    """torch's own complaint about an archive that is cut short does not take their place, and no thread stays."""
    folder, name, said = tmp_path, "file", "told once"
    if fault == "write":
        folder, name, said = Path("/dev"), "full", "No space left"
    else:
        monkeypatch.setattr(checkpointing_format, "_SYNC_BYTES", 1 << 20)
        monkeypatch.setattr(os, "fdatasync", mock.Mock(side_effect=OSError(5, said)))
    shape = (1 << 20,)
    with pytest.raises(OSError, match=said), checkpointing_format.BoxWriter(folder, name) as writer:
        for number in range(3):
            writer.add_tensor(str(number), shape, (0,), shape, torch.zeros(shape))
        writer.finish()
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())


def _verify(folder: str) -> bool | str:
    try:
        return load.verify(Path(folder))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_refused_by_its_name(pool, tmp_path, damage):
    """One bit, one missing byte or a missing file: every rank refuses and names the file."""
    root = str(tmp_path / "save")
    pool.run(cases.save, root, 1, ranks=2)
    folder = tmp_path / "save" / "iter_0000001"
    assert pool.run(_verify, str(folder), ranks=2) == [True, True]
    names = sorted(p.name for p in folder.iterdir() if p.name != layout.CHECKSUMS)
    assert names == [".metadata", *(f"__{r}_{i}.distcp" for r in (0, 1) for i in (0, 1)), "common.pt", "metadata.json"]
    for name in names:
        good = (folder / name).read_bytes()
        if damage == "flip":
            middle = len(good) // 2
            (folder / name).write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        elif damage == "cut":
            (folder / name).write_bytes(good[:-1])
        else:
            (folder / name).unlink()
        said = pool.run(_verify, str(folder), ranks=2)
        assert said[0] == said[1]
        assert re.search(rf"/iter_0000001/{re.escape(name)} (is damaged|cannot be read)", str(said[0])), said[0]
        (folder / name).write_bytes(good)
    assert pool.run(_verify, str(folder), ranks=2) == [True, True]


def test_without_checksums_a_cut_file_is_refused(pool, tmp_path):
    """A checkpoint of another program has no checksums: its sizes must do."""
    pool.run(cases.save, str(tmp_path / "save"), 1, ranks=2)
    folder = tmp_path / "save" / "iter_0000001"
    (folder / layout.CHECKSUMS).unlink()
    assert pool.run(_verify, str(folder), ranks=2) == [False, False]
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    assert re.search(r"__1_0.distcp has \d+ bytes and needs \d+", str(pool.run(_verify, str(folder), ranks=2)[0]))


def _agree(error: Exception | None, path: str | None) -> tuple[type, str, int]:
    """What a rank learns where the second one raises, or cannot read `path`: the exception, its text, the exit code."""

    def work() -> None:
        if dist.get_rank() == 1:
            if error is not None:
                raise error
            safety.verify_file(Path(str(path)).parent, Path(str(path)).name, "0" * 64)

    try:
        load.agree(work)
    except Exception as caught:
        return type(caught), str(caught), code_of(caught)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "kind", "text", "code"),
    [
        (ValueError("--load names x: name y"), ValueError, "--load names x: name y", USAGE),
        (
            PermissionError(13, "Permission denied", "/x"),
            ValueError,
            "rank 1 cannot read the checkpoint ([Errno 13] Permission denied: '/x'): give one that all ranks can read",
            USAGE,
        ),
        (OSError(5, "Input/output error", "/x"), RuntimeError, "rank 1: OSError: [Errno 5] Input/output", FAULT),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "rank 1: CUDA out of memory.", FAULT),
        (RuntimeError("CUDA error: an illegal"), RuntimeError, "rank 1: RuntimeError: CUDA error: an illegal", FAULT),
        (KeyError("optimizer"), RuntimeError, "rank 1: KeyError: 'optimizer'", FAULT),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_fault_while_loading_is_no_wrong_usage(pool, error, kind, text, code):
    """All ranks raise the same kind: ValueError is the user's, memory that ran out stays what it is."""
    first, second = pool.run(_agree, error, None, ranks=2)
    assert first == second and first[0] is kind and first[2] == code
    assert first[1].startswith(text)


def test_a_disk_that_fails_is_a_fault(pool, tmp_path):
    """Reading this file is a real input/output error: no damage of the checkpoint, and it has the file's name."""
    path = tmp_path / "__0_0.distcp"
    path.symlink_to("/proc/self/mem")
    kind, text, code = pool.run(_agree, None, str(path), ranks=2)[0]
    assert (kind, code) == (RuntimeError, FAULT)
    assert text == f"rank 1: OSError: [Errno 5] Input/output error: '{path}'"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", layout.CHECKSUMS])
def test_every_reader_tells_a_failing_disk_from_damage(tmp_path, name):
    """Tensors, index and checksums; a file that is not there is still one sentence."""
    _two_halves(tmp_path, [0, 1])

    def read() -> None:
        reader = checkpointing_format.CheckpointReader(tmp_path)
        list(reader.read("weight", (0, 0), (4, 2)))
        safety.read_checksums(tmp_path)

    read()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path / name}'"):
        read()
    missing = safety.verify_file(tmp_path, "nothing", "0" * 64)
    assert missing is not None and "nothing cannot be read (No such file or directory)" in missing


class _FailingDisk(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_an_archive_on_a_failing_disk_is_not_torn():
    """zipfile says of it that it is no archive."""
    with pytest.raises(OSError, match=r"Input/output error: '/x/common.pt'"):
        safety.check_pickle(_FailingDisk(b"PK" + bytes(200)), "/x/common.pt")


def test_tensors_on_a_failing_disk_are_not_torn(tmp_path, monkeypatch):
    """The pickle of an archive is read, its tensors are not: the disk's fault, with the file's name."""
    path = tmp_path / "common.pt"
    torch.save({"weight": torch.arange(100_000.0)}, path)
    assert torch.equal(safety.load_checked(path, str(path))["weight"], torch.arange(100_000.0))

    class LostMiddle(io.BytesIO):
        def readinto(self, buffer) -> int:
            if self.tell() < 200_000 < self.tell() + len(buffer):
                raise OSError(errno.EIO, "Input/output error")
            return super().readinto(buffer)

    monkeypatch.setattr(safety, "open", lambda file, _mode: LostMiddle(Path(file).read_bytes()), raising=False)
    with pytest.raises(OSError, match=rf"Input/output error: '{path}'"):
        safety.load_checked(path, str(path))


def _two_halves(folder: Path, kept: list[int]) -> None:
    """A checkpoint of one tensor [4, 2] in two boxes, whose index names those in `kept`."""
    with checkpointing_format.BoxWriter(folder, "__0_0.distcp") as writer:
        for row in (0, 2):
            writer.add_tensor("weight", (4, 2), (row, 0), (2, 2), torch.arange(4.0) + 2 * row + 1)
        written = writer.finish()
    written.items[:] = [written.items[number] for number in kept]
    (folder / layout.METADATA).write_bytes(checkpointing_format.build_index([written]))


def test_a_hole_in_an_index_is_no_zero(tmp_path):
    """Elements that no box has are refused by their tensor's name; those beyond its end come from elsewhere."""
    _two_halves(tmp_path, [0, 1])
    reader, fill = checkpointing_format.CheckpointReader(tmp_path), torch.full((10,), -1.0)
    values = checkpointing_format.flat_values(reader, "weight", (0, 0), (5, 2), fill)
    assert torch.equal(values, torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, -1, -1]))
    assert torch.equal(checkpointing_format.flat_values(reader, "weight", (4, 0), (5, 2), fill), fill)
    _two_halves(tmp_path, [0])
    reader = checkpointing_format.CheckpointReader(tmp_path)
    values = checkpointing_format.flat_values(reader, "weight", (0, 0), (2, 2), torch.zeros(4))
    assert torch.equal(values, torch.tensor([1.0, 2, 3, 4]))
    for offset, shape, named, wanted in (((0, 0), (5, 2), 4, 8), ((1, 0), (2, 1), 1, 2), ((2, 0), (2, 2), 0, 4)):
        sentence = rf"\.metadata names {named} of {wanted} elements of weight in box .*: it has gaps or boxes"
        with pytest.raises(ValueError, match=sentence):
            checkpointing_format.flat_values(reader, "weight", offset, shape, torch.zeros(math.prod(shape)))


def _failing_save(root: str) -> str | None:
    def broken():
        if dist.get_rank() == 1:
            raise KeyError("a bug")
        return cases.items(2)

    return cases.save_checkpoint(Path(root), 2, broken, dict, keep_last=None, retain_interval=None).error


def test_any_error_of_a_rank_is_shared(pool, tmp_path):
    """A fault that nobody expected on one rank does not leave the other one waiting."""
    errors = pool.run(_failing_save, str(tmp_path / "save"), timeout_s=20, ranks=2)
    assert errors[0] == errors[1] and "rank 1: KeyError" in errors[0]
