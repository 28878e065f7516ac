"""Host memory for state: exact sizes, touched once, in huge pages, never copied by a fork."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deep_offload.runtime import arena as arena_module
from deep_offload.runtime.arena import PIN_CHUNK_BYTES, ArraySpec, HostArena, _chunks

MIB = 1 << 20


def make(sizes, **settings) -> HostArena:
    specs = [ArraySpec(numel, dtype) for numel, dtype in sizes]
    return HostArena(specs, pin=False, num_threads=2, warn=pytest.fail, **settings)


def test_arrays_are_exact_zeroed_and_apart():
    """Each array has its size and type, starts on a page, is zero, and shares no byte with another."""
    arena = make([(1000, torch.float32), (7, torch.bfloat16), (0, torch.int16), (4096, torch.float32)])
    assert [(a.numel(), a.dtype) for a in arena.arrays] == [
        (1000, torch.float32),
        (7, torch.bfloat16),
        (0, torch.int16),
        (4096, torch.float32),
    ]
    assert arena.num_bytes == 4096 + 4096 + 0 + 16384
    for number, array in enumerate(arena.arrays):
        if array.numel():
            assert array.data_ptr() % 4096 == 0
        assert int(array.count_nonzero()) == 0
        array.fill_(number + 1)
    for number, array in enumerate(arena.arrays):
        assert torch.all(array == number + 1)
    arena.close()


def test_reserving_much_says_how_far_it_is(monkeypatch):
    """A line for each chunk when time has passed, none for the last, none at all while it is quick."""
    monkeypatch.setattr(arena_module, "PIN_CHUNK_BYTES", MIB)
    lines: list[str] = []
    sizes = [(MIB // 4, torch.float32)] * 4
    make(sizes, log=lines.append).close()
    assert lines == []
    monkeypatch.setattr(arena_module, "SECONDS_BETWEEN_LINES", 0.0)
    make(sizes, log=lines.append).close()
    assert [line.split(" after ")[0] for line in lines] == [
        f"reserving host memory: 0.0 of {4 * MIB / 2**30:.1f} GiB"
    ] * 3


def test_memory_is_the_sum_of_the_arrays():
    """The process grows by what the planner counts: no rounding to powers of two, nothing allocated twice."""
    code = (
        "import torch\n"
        "from deep_offload.runtime.arena import ArraySpec, HostArena\n"
        "def kib(name):\n"
        "    return int([l for l in open('/proc/self/status') if l.startswith(name)][0].split()[1])\n"
        "torch.zeros(10)\n"
        "before, start = kib('RssAnon'), kib('VmHWM')\n"
        "arena = HostArena([ArraySpec(75 << 18, torch.float32)] * 3, pin=False, num_threads=2, warn=print)\n"
        "print(kib('RssAnon') - before, kib('VmHWM') - start)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    grown, peak = (int(word) for word in result.stdout.split())
    wanted = 3 * 75 * 1024
    assert wanted <= grown <= 1.05 * wanted
    assert peak <= 1.1 * wanted


def test_a_fork_copies_no_page():
    """A forked child finds no state, so what the parent writes afterwards costs no second copy."""
    arena = make([(16 * MIB, torch.float32)])
    state = arena.arrays[0]
    state.fill_(1.0)
    read_end, write_end = os.pipe()
    release_read, release_write = os.pipe()
    child = os.fork()
    if child == 0:  # a data worker: stays while the parent trains on
        os.read(release_read, 1)
        os.write(write_end, bytes([int(state[123].item())]))
        os._exit(0)
    before = _memory_of_both(child)
    state.fill_(2.0)
    after = _memory_of_both(child)
    os.write(release_write, b"x")
    seen = os.read(read_end, 1)
    os.waitpid(child, 0)
    assert seen == b"\0", "the child must neither see the state nor end when it looks"
    assert after - before < 8 * MIB, "pages that the child has too would have been copied: 64 MiB"
    assert torch.all(state == 2.0)
    arena.close()


def test_more_than_the_memory_of_the_moment_can_be_mapped():
    """Virtual machines grow: what counts are limits, which are checked before, not MemTotal."""
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    arena_module._private_mapping(4 * 1024 * int(total.split()[1])).close()


def test_state_lies_in_huge_pages():
    """Where the kernel gives them to who asks, nearly all of an arena is made of them."""
    settings = Path("/sys/kernel/mm/transparent_hugepage")
    if "[never]" in (settings / "enabled").read_text() or "madvise]" not in (settings / "defrag").read_text():
        pytest.skip("this kernel gives none, or only those that happen to be free")
    before = _huge_bytes()
    arena = make([(32 * MIB, torch.float32)])
    assert _huge_bytes() - before >= 120 * MIB
    arena.close()
    assert _huge_bytes() - before < 8 * MIB


def _huge_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("AnonHugePages:")).split()[1]) * 1024


def _memory_of_both(child: int) -> int:
    """Proportional set size of parent and child together, bytes."""
    total = 0
    for pid in (os.getpid(), child):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) * 1024
    return total


def test_unmappable_size_is_one_sentence():
    """A size that the system refuses names the bytes and what to change."""
    code = (
        "import resource, torch\n"
        "from deep_offload.runtime.arena import ArraySpec, HostArena\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try:\n"
        "    HostArena([ArraySpec(1 << 32, torch.float32)], pin=False, num_threads=1, warn=print)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.startswith("16.00 GiB of host memory for optimizer state could not be mapped"), result.stderr


def test_chunks_cut_between_arrays_only():
    """Pinning goes in chunks that cover everything and never cut an array."""
    sizes = [3 << 30, 2 << 30, 1 << 30, 5 << 30, 4096]
    chunks = _chunks(sizes, sum(sizes))
    borders = {0}
    for size in sizes:
        borders.add(max(borders) + size)
    assert sum(length for _, length in chunks) == sum(sizes)
    assert all(start in borders and length >= 1 for start, length in chunks)
    assert all(length >= PIN_CHUNK_BYTES for _, length in chunks[:-1])


def test_what_cuda_does_not_pin_stays_pageable(monkeypatch):
    """The second chunk is refused: the first is given back, its error and the refusal's are taken back, one warning."""
    refused, forgotten, said = iter([0, 2]), [], []
    given_back: list[int] = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, num_bytes, flags):
            return next(refused)

        @staticmethod
        def cudaHostUnregister(address):
            given_back.append(address)
            return 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(arena_module, "_forget_cuda_error", lambda: forgotten.append(len(given_back)))
    monkeypatch.setattr(arena_module, "PIN_CHUNK_BYTES", 4096)
    specs = [ArraySpec(1024, torch.float32)] * 3
    arena = HostArena(specs, pin=True, num_threads=1, warn=said.append)
    assert not arena.is_pinned and len(said) == 1 and "(CUDA error 2)" in said[0]
    assert len(given_back) == 1 and forgotten == [0, 1]
    arena.arrays[2].fill_(3.0)
    assert arena.arrays[2].sum() == 3 * 1024
    arena.close()
