"""The Triton kernel against the specification and the CPU kernel, bit for bit, on the device."""

from __future__ import annotations

import re

import pytest
import torch

from deep_offload.kernels import cpu, reference
from deep_offload.plan.layout import MasterStorage
from tests.kernels.kernel_cases import (
    GRAD_DTYPES,
    GRAD_SCALE,
    WEIGHT_DTYPES,
    State,
    assert_same_bits,
    assert_same_result,
    bits,
    empty_weight,
    extreme_state,
    ordinary_state,
    run_cpu,
    run_reference,
    subnormal_state,
    table,
)

# Triton, and with it the kernel, is there where torch is built for CUDA; elsewhere this whole file is skipped.
gpu = pytest.importorskip("deep_offload.kernels.gpu")

STATES = {"ordinary": ordinary_state, "subnormal": subnormal_state, "extreme": extreme_state}
STORAGES = [(MasterStorage.FULL, dtype) for dtype in WEIGHT_DTYPES] + [
    (MasterStorage.SPLIT, torch.bfloat16),
    (MasterStorage.WEIGHT, torch.float32),
]
SEGMENTS = {
    "one": lambda n: [[0, n, 0]],
    "one held": lambda n: [[0, n, reference.HOLD]],
    "aligned": lambda n: (
        [[0, 4096, 0], [4096, 4112, 1], [4112, 8192, reference.HOLD], [8192, n // 16 * 16, 1]]
        + ([[n // 16 * 16, n, 0]] if n % 16 else [])
    ),
    "ragged": lambda n: [[0, 1, 1], [1, 2050, 0], [2050, 5001, reference.HOLD], [5001, n, 1]],
}


def storage_id(case) -> str:
    return f"{case[0].name}-{case[1]}"


def run_gpu(
    state: State, storage: MasterStorage, weight_dtype: torch.dtype | None, decoupled: bool, rows: torch.Tensor,
    grad_scale: float = GRAD_SCALE,
) -> tuple[State, torch.Tensor | None]:  # fmt: skip
    """The kernel's result on the CPU, with the master as fp32 whatever the storage."""
    device = torch.device("cuda")
    master, exp_avg, exp_avg_sq, grad = (
        t.to(device, copy=True) for t in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)
    )
    weight = empty_weight(state.numel, weight_dtype)
    weight = None if weight is None else weight.to(device)
    kept: torch.Tensor | None = master
    if storage is MasterStorage.SPLIT:
        weight, kept = reference.split_master(master)
    elif storage is MasterStorage.WEIGHT:
        weight, kept = master, None
    segments = gpu.SegmentTable.build(rows, device)
    gpu.adam_update(
        kept, exp_avg, exp_avg_sq, grad, weight, segments, table(decoupled).to(device), grad_scale, storage, decoupled
    )
    if storage is MasterStorage.SPLIT:
        master = reference.merge_master(weight, kept)
    new = State(master.cpu(), exp_avg.cpu(), exp_avg_sq.cpu(), grad.cpu())
    return new, None if weight is None else weight.cpu()


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("case", STORAGES, ids=storage_id)
def test_bits_of_the_reference_and_of_the_cpu(case, grad_dtype, decoupled):
    """Every storage, gradient and weight type equals the reference and the CPU kernel, in extreme states too."""
    storage, weight_dtype = case
    for name, make in STATES.items():
        for numel in (1, 77, 2048, 100_003, 1 << 20):
            state = make(numel, grad_dtype, seed=numel)
            rows = reference.one_segment(numel)
            want, want_weight = run_reference(state, weight_dtype, decoupled)
            assert_same_result(run_cpu(state, weight_dtype, None, decoupled, num_threads=4), (want, want_weight), "cpu")
            got, weight = run_gpu(state, storage, weight_dtype, decoupled, rows)
            assert_same_result((got, weight), (want, want_weight), f"{name}, {numel} elements")


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("case", STORAGES, ids=storage_id)
def test_segments(case, segments):
    """Segments cut into blocks, aligned or not, take their own scalars; held ones keep their state."""
    storage, weight_dtype = case
    for numel in (20_000, 20_003):
        rows = torch.tensor(segments(numel))
        state = ordinary_state(numel, torch.bfloat16, seed=numel)
        want, want_weight = run_reference(state, weight_dtype, True, rows)
        got, weight = run_gpu(state, storage, weight_dtype, True, rows)
        assert_same_result((got, None), (want, None), "state")
        if storage is MasterStorage.FULL:
            assert_same_bits(weight, want_weight, "weight")
        elif storage is MasterStorage.SPLIT:
            assert_same_bits(weight, reference.round_to(want.master, torch.bfloat16), "weight")


def test_the_reference_has_the_same_bits_on_both_devices():
    """The specification itself gives equal bits on CPU and GPU, so it may be run where the data is."""
    state = ordinary_state(1 << 20, torch.bfloat16, seed=3)
    want, want_weight = run_reference(state, torch.bfloat16)
    moved = State(*(t.cuda() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)))
    weight = torch.empty(moved.numel, dtype=torch.bfloat16, device="cuda")
    reference.adam_update(
        moved.master, moved.exp_avg, moved.exp_avg_sq, moved.grad, weight, reference.one_segment(moved.numel),
        table(), GRAD_SCALE, MasterStorage.FULL, True,
    )  # fmt: skip
    back = State(moved.master.cpu(), moved.exp_avg.cpu(), moved.exp_avg_sq.cpu(), moved.grad.cpu())
    assert_same_result((back, weight.cpu()), (want, want_weight), "reference on the GPU")


def test_twenty_steps_on_alternating_devices():
    """A state that moves between CPU and GPU kernels every step ends with the bits of one that never moved."""
    numel = 300_001
    stays, moves = ordinary_state(numel, torch.bfloat16).copy(), ordinary_state(numel, torch.bfloat16).copy()
    rows = reference.one_segment(numel)
    for step in range(20):
        grad = ordinary_state(numel, torch.bfloat16, seed=1000 + step).grad
        cpu.adam_update(stays.master, stays.exp_avg, stays.exp_avg_sq, grad, None, rows, table(), 1.0, True, 4)
        state = State(moves.master, moves.exp_avg, moves.exp_avg_sq, grad)
        if step % 2:
            moves, _ = run_gpu(state, MasterStorage.SPLIT, torch.bfloat16, True, rows, 1.0)
        else:
            moves, _ = run_cpu(state, None, None, num_threads=2, grad_scale=1.0)
    assert_same_bits(moves.master, stays.master, "master")
    assert_same_bits(moves.exp_avg_sq, stays.exp_avg_sq, "exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_gradient_and_every_rounding(dtype):
    """All 65536 gradients are widened exactly, and masters around every value and tie are rounded as specified."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    grad = torch.where(patterns.isfinite(), patterns, torch.zeros_like(patterns))
    zero = torch.zeros(1 << 16)
    state = State(zero + 1.0, zero, zero, grad)
    rows = reference.one_segment(1 << 16)
    got, _ = run_gpu(state, MasterStorage.FULL, None, True, rows, 1.0)
    assert_same_result((got, None), run_reference(state, None, grad_scale=1.0), "gradients")
    ties = 1 << 12 if dtype is torch.float16 else 1 << 15
    around = [patterns.float().view(torch.int32) + delta for delta in (0, ties - 1, ties, ties + 1)]
    master = torch.cat(around).view(torch.float32)
    zero = torch.zeros_like(master)
    held = reference.one_segment(len(master), reference.HOLD)
    _, weight = run_gpu(State(master, zero, zero, zero), MasterStorage.FULL, dtype, True, held)
    want = reference.round_to(master, dtype)
    assert torch.equal(weight.isnan(), master.isnan())
    assert_same_bits(weight[~master.isnan()], want[~master.isnan()], "weights")


def test_a_weight_over_its_gradient():
    """The 16-bit weight may be written over the gradient's memory."""
    state = ordinary_state(100_001, torch.bfloat16, seed=8)
    want, want_weight = run_reference(state, torch.bfloat16)
    master, exp_avg, exp_avg_sq, grad = (t.cuda() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.grad))
    segments = gpu.SegmentTable.build(reference.one_segment(state.numel), grad.device)
    gpu.adam_update(
        master, exp_avg, exp_avg_sq, grad, grad, segments, table().cuda(), GRAD_SCALE, MasterStorage.FULL, True
    )
    assert_same_bits(grad.cpu(), want_weight, "weight")
    assert_same_bits(master.cpu(), want.master, "master")


def test_the_update_runs_on_the_current_stream():
    """On a side stream the update sees what that stream wrote before it."""
    state = ordinary_state(1 << 20, torch.float32, seed=9)
    want, _ = run_reference(state, None)
    arrays = [torch.zeros(state.numel, device="cuda") for _ in range(4)]
    sources = [t.pin_memory() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)]
    segments = gpu.SegmentTable.build(reference.one_segment(state.numel), arrays[0].device)
    scalars = table().cuda()
    torch.cuda.synchronize()  # the arrays are zeroed before the side stream writes them
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for array, source in zip(arrays, sources):
            array.copy_(source, non_blocking=True)
        gpu.adam_update(*arrays, None, segments, scalars, GRAD_SCALE, MasterStorage.FULL, True)
    side.synchronize()
    assert_same_bits(arrays[0].cpu(), want.master, "master")


def test_contraction_would_be_seen():
    """The same kernel launched with fp fusion differs from the reference, so equality is not by chance."""
    state = ordinary_state(1 << 18, torch.float32, seed=10)
    want, _ = run_reference(state, None)
    kernel = gpu.triton_adam.adam_kernel
    arrays = [t.cuda() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)]
    kernel[(state.numel // gpu.BLOCK,)](
        *arrays, arrays[1], arrays[1], table().cuda(), GRAD_SCALE, state.numel, 0,
        HAS_TABLE=False, IS_ALIGNED=False, GRAD=gpu.triton_adam.FP32.value, OUT=gpu.triton_adam.NONE.value,
        STORAGE=gpu.triton_adam.FULL.value, DECOUPLED=True, SIZE=gpu.BLOCK, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    assert bool((bits(arrays[1].cpu()) != bits(want.exp_avg)).any())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"exp_avg": torch.zeros(10)}, "master: expected a contiguous tensor of 10 elements on cpu"),
        ({"exp_avg_sq": torch.zeros(9, device="cuda")}, "exp_avg_sq: expected a contiguous tensor of 10 elements"),
        ({"grad": torch.zeros(10, device="cuda", dtype=torch.float64)}, "grad: expected float32, bfloat16 or float16"),
        ({"exp_avg_sq": torch.zeros(10, device="cuda").bfloat16()}, "exp_avg_sq: expected float32"),
        ({"scalars_device": torch.zeros(2, 9)}, "scalars_device: expected a contiguous tensor on cuda:0"),
        ({"scalars_device": torch.zeros(2, 8, device="cuda")}, "scalars_device: expected float32 [num_classes, 9]"),
        ({"grad": torch.zeros(20, device="cuda")[::2]}, "grad: expected a contiguous tensor of 10 elements"),
        ({"master": None}, "storage FULL takes a master of torch.float32"),
    ]
    if torch.cuda.is_available()
    else [],
)
def test_wrong_arguments_are_refused(changes, sentence):
    """A wrong size, type or device is refused before anything is launched."""
    device = torch.device("cuda", 0)
    values = dict(
        master=torch.zeros(10, device=device), exp_avg=torch.zeros(10, device=device),
        exp_avg_sq=torch.zeros(10, device=device), grad=torch.zeros(10, device=device), weight=None,
        segments=gpu.SegmentTable.build(reference.one_segment(10), device), scalars_device=table().to(device),
        grad_scale=1.0, storage=MasterStorage.FULL, decoupled=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(sentence)):
        gpu.adam_update(**{**values, **changes})
