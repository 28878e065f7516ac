"""Rates of a GPU's lanes: measured in seconds, in order, with nothing left behind."""

import time

import torch

from deep_offload.model.hardware import profile_from_json, profile_to_json
from deep_offload.runtime import measure
from deep_offload.runtime.lane_bench import CudaBench

GPU = torch.device("cuda", 0)


def test_a_measured_profile_is_sound():
    """Within 20 s every rate is there, lanes in company are no faster than alone, and no GPU memory stays taken."""
    warm = torch.full((64, 64), 0.01, dtype=torch.bfloat16, device=GPU)
    torch.mm(warm, warm)  # cuBLAS keeps its workspace
    before, start = torch.cuda.memory_allocated(), time.monotonic()
    p = measure.measure_profile(GPU, 4)
    assert time.monotonic() - start < 20
    assert p.num_gpus >= 1 and p.fingerprint == measure.fingerprint(GPU, 4)
    for lane in ("h2d", "d2h"):
        alone, both, busy = (getattr(p, f"{lane}_{kind}bytes_per_s") for kind in ("", "both_", "busy_"))
        assert 1e9 < busy <= both <= alone
    for wire in ("fp32", "param"):
        busy, alone = (p.cpu_adam_params_per_s(wire, busy=busy) for busy in (True, False))
        assert 1e7 < busy <= alone
        copies = p.h2d_busy_bytes_per_s + p.d2h_busy_bytes_per_s
        assert p.dram_bytes_per_s >= 0.999 * (28 * busy + copies)
    assert profile_from_json(profile_to_json(p)) == p
    assert torch.cuda.memory_allocated() == before


def test_a_copy_is_counted_when_it_has_ended():
    """A call returns when the copy of the call before has ended, no earlier: its events and bytes say so."""
    bench = CudaBench(GPU, 1, 1, lambda _line: None)
    try:
        bench.on_device["d2h"].fill_(7.0)
        torch.cuda.synchronize()
        bench.d2h()
        first = bench._ends["d2h"]
        bench.d2h()
        assert first.query() and bench.copy_buffers[1].eq(7.0).all()
        bench.settle()
        assert not bench._ends
    finally:
        bench.close()
