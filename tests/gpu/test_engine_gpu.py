"""On a GPU: the same bits as without one, for every placement, with real copies in flight and with delays."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from engine_cases import ALL_RESIDENT, Case, assert_same_bits, collect, drive

from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.engine import EngineSettings, OffloadEngine
from deep_offload.optimizer.shards import Segment, Shard
from deep_offload.plan.layout import build_layout
from deep_offload.plan.placement import place_by_share
from deep_offload.runtime.lanes import CudaDevice
from deep_offload.runtime.worker import SubgroupWorker

NUM_STEPS = 20


@pytest.mark.parametrize("wire", ["fp32", "param"])
@pytest.mark.parametrize("split", [False, True])
def test_cuda_engine_has_the_bits_of_the_cpu_engine(wire, split):
    """Shares, strides, residents and slots on CUDA against the all-resident run of the host backend."""
    want = drive(Case(**ALL_RESIDENT, fixed_scale=0.37), NUM_STEPS)
    places = [dict(share=s) for s in (0.0, 1 / 3, 0.5, 1.0)] + [dict(stride=2), dict(stride=3)]
    for place, resident, slots in itertools.product(places, (0.0, 0.5, 1.0), (1, 3)):
        case = Case(
            **place, resident=resident, slots=slots, wire=wire, split=split, threads=4, device="cuda", fixed_scale=0.37
        )
        assert_same_bits(drive(case, NUM_STEPS), want, str(case))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_cuda_engine_other_types(dtype, grad_dtype, share):
    """fp32 gradient buffers, fp16 and fp32 parameters."""
    types = dict(dtype=dtype, grad_dtype=grad_dtype, fixed_scale=0.37)
    want = drive(Case(**ALL_RESIDENT, **types), NUM_STEPS)
    case = Case(share=share, resident=0.25, threads=4, device="cuda", **types)
    assert_same_bits(drive(case, NUM_STEPS), want, str(case))


def _large(share: float, resident: float, split: bool, wire: torch.dtype, steps: int = 4) -> dict[str, torch.Tensor]:
    """Copies that take milliseconds, so that a missing wait has time to do harm."""
    generator = torch.Generator("cuda").manual_seed(1)
    numel = 3 * (1 << 23)
    shards = []
    for _ in range(4):
        weight = (torch.randn(numel, generator=generator, device="cuda") * 0.02).to(torch.bfloat16)
        shards.append(Shard(weight, torch.zeros_like(weight), (Segment(0, numel, 0),)))
    layout = build_layout([s.spec for s in shards], 1 << 23)
    placement = place_by_share(len(layout.subgroups), share, resident)
    engine = OffloadEngine(shards, layout, EngineSettings(placement, 2, split, wire, 8), warn=pytest.fail)
    try:
        for step in range(1, steps + 1):
            engine.wait_until_reusable()
            for shard in shards:  # overwritten at once: a gradient that is still being read would change
                shard.grad.copy_(torch.randn(numel, generator=generator, device="cuda"))
            for i in reversed(range(len(layout.subgroups))):
                engine.grads_ready(i)
            engine.update([AdamClass(1e-3, 0.9, 0.95, 1e-8, 0.1, step)], [0], 0.5)
        engine.synchronize()
        model = type("Model", (), {"shards": shards})
        return collect(engine, model)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("share", "resident", "split", "wire"),
    [
        (0.0, 0.0, True, torch.float32),
        (0.5, 0.0, True, torch.float32),
        (0.5, 0.0, False, torch.bfloat16),
        (1.0, 0.0, True, torch.bfloat16),
        (0.6, 0.4, True, torch.bfloat16),
    ],
)
def test_large_copies_change_no_bit(share, resident, split, wire):
    """100 M parameters, gradients overwritten right after the wait: bits of the resident run."""
    assert_same_bits(_large(share, resident, split, wire), _large(0.0, 1.0, True, wire), f"share {share}")


@pytest.mark.parametrize("kind", ["prefetch", "flush", "update_gpu", "grad_flush", "param_h2d"])
def test_delays_change_no_bit(monkeypatch, kind):
    """A spin kernel before each op of one kind, on its own stream, never changes a bit."""
    want = _large(0.0, 1.0, True, torch.bfloat16, steps=3)
    original = getattr(SubgroupWorker, kind)

    def late(self, op):
        torch.cuda._sleep(20_000_000)
        return original(self, op)

    monkeypatch.setattr(SubgroupWorker, kind, late)
    assert_same_bits(_large(0.5, 0.0, True, torch.bfloat16, steps=3), want, f"{kind} delayed")


def test_a_wait_left_out_is_seen(monkeypatch):
    """Without the wait of the GPU lane for prefetches, delayed ones are missed: the tests above can fail."""
    want = _large(0.0, 1.0, True, torch.bfloat16, steps=3)
    original, original_wait = SubgroupWorker.prefetch, CudaDevice.wait

    def late(self, op):
        torch.cuda._sleep(20_000_000)
        return original(self, op)

    def wait(self, lane, done):
        if done.op.kind.value != "prefetch":
            original_wait(self, lane, done)

    monkeypatch.setattr(SubgroupWorker, "prefetch", late)
    monkeypatch.setattr(CudaDevice, "wait", wait)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(_large(0.5, 0.0, True, torch.bfloat16, steps=3), want, "no wait")
