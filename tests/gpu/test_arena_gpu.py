"""Host memory that CUDA does not take: a warning, pageable arrays, and a GPU that goes on."""

import torch

from deep_offload.runtime.arena import ArraySpec, HostArena


def test_a_failed_pin_leaves_no_error_behind():
    """Pages that are registered already are refused; the next kernel does not raise what that call left."""
    said: list[str] = []
    arena = HostArena([ArraySpec(1 << 20, torch.float32)], pin=True, num_threads=1, warn=said.append)
    assert arena.is_pinned and not said
    assert not arena._pin(arena.arrays[0].data_ptr(), arena.num_bytes, said.append)
    assert "pinning 0.0 GiB of host memory failed (CUDA error" in said[0]
    ones = torch.ones(4, device="cuda") + 1
    arena.arrays[0][:4].copy_(ones)
    assert arena.arrays[0][:4].tolist() == [2.0] * 4
    arena.close()
