"""The compiled kernel against the specification: every instruction set, length, alignment, type and thread count."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from deep_offload.kernels import cpu, reference
from deep_offload.plan.layout import MasterStorage
from tests.kernels.kernel_cases import (
    CLASSES,
    GRAD_DTYPES,
    GRAD_SCALE,
    WEIGHT_DTYPES,
    State,
    assert_same_bits,
    assert_same_but_for_nans,
    assert_same_result,
    bits,
    empty_weight,
    extreme_state,
    generator,
    ordinary_state,
    run_cpu,
    run_reference,
    subnormal_state,
    table,
)

ISAS = cpu.supported_isas()
LENGTHS = (*range(1, 70), 127, 128, 129, 65537)
STATES = {"ordinary": ordinary_state, "extreme": extreme_state, "subnormal": subnormal_state}


def type_id(dtype: torch.dtype | None) -> str:
    """Part of a test's name."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


@functools.cache
def ordinary_case(numel: int, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None):
    """(state, the specification's result), the same for every instruction set."""
    state = ordinary_state(numel, grad_dtype)
    return state, run_reference(state, weight_dtype)


# Each type of gradient and of weight, in pairs that take each path of the loop; the whole product is tested above.
TYPE_PAIRS = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.fixture(params=ISAS)
def isa(request) -> str:
    return request.param


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=type_id)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=type_id)
def test_every_isa_has_the_bits_of_the_specification(grad_dtype, weight_dtype, decoupled):
    """All instruction sets equal the reference for each type of gradient and weight, in ordinary and extreme states."""
    for name, make in STATES.items():
        state = make(10_007, grad_dtype)
        want = run_reference(state, weight_dtype, decoupled)
        for isa in ISAS:
            got = run_cpu(state, weight_dtype, isa, decoupled, num_threads=2)
            assert_same_result(got, want, f"{isa}, {name}")


@pytest.mark.parametrize(("grad_dtype", "weight_dtype"), TYPE_PAIRS, ids=type_id)
def test_lengths_and_alignments_never_change_a_bit(isa, grad_dtype, weight_dtype):
    """Any piece of an array, at any alignment of its arrays to each other, gets the bits it gets inside the whole."""
    state, (want, want_weight) = ordinary_case(65537 + 64, grad_dtype, weight_dtype)
    margin = 40
    for case, length in enumerate(LENGTHS):
        start = (case * 7) % 19
        arrays, views = [], []
        for k, tensor in enumerate((state.master, state.exp_avg, state.exp_avg_sq, state.grad)):
            offset = (case + k * (case % 3)) % 17  # all alike, and each its own
            array = torch.full((length + margin,), 3.0, dtype=tensor.dtype)
            views.append(array[offset : offset + length])
            views[-1].copy_(tensor[start : start + length])
            arrays.append((array, offset))
        weight = view = None
        if weight_dtype is not None:
            weight = empty_weight(length + margin, weight_dtype)
            view = weight[case % 23 : case % 23 + length]
        cpu.adam_update(*views, view, reference.one_segment(length), table(), GRAD_SCALE, True, 1, isa)
        piece = want.cut(start, start + length)
        what = f"{isa}, {length} elements from {start}"
        wanted_weight = None if want_weight is None else want_weight[start : start + length]
        assert_same_result((State(*views), view), (piece, wanted_weight), what)
        for array, offset in arrays:
            assert bool((array[:offset] == 3.0).all()) and bool((array[offset + length :] == 3.0).all()), what
        if weight is not None:
            assert int((weight != 7.0).sum()) == int((view != 7.0).sum()), what


@pytest.mark.parametrize("numel", [1, 33, 65537, 200_003, 1_000_003])
def test_threads_never_change_a_bit(isa, numel):
    """The cuts between threads leave no trace, with fewer elements than threads, too."""
    state, want = ordinary_case(numel, torch.bfloat16, torch.bfloat16)
    for num_threads in (1, 2, 3):
        got = run_cpu(state, torch.bfloat16, isa, num_threads=num_threads)
        assert_same_result(got, want, f"{isa}, {num_threads} threads")


SEGMENT_TABLES = {
    "two classes": [[0, 333, 0], [333, 5000, 1]],
    "hold in the middle": [[0, 1, 1], [1, 17, -1], [17, 2049, 0], [2049, 4100, -1], [4100, 5000, 1]],
    "all held": [[0, 5000, -1]],
    "one element each": [[i, i + 1, i % 3 - 1] for i in range(500)] + [[500, 5000, 0]],
}


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("segments", SEGMENT_TABLES.values(), ids=SEGMENT_TABLES)
def test_segments_take_their_own_scalars_and_held_ones_keep_their_state(isa, segments, decoupled):
    """Segments equal the reference; a held one keeps its state and still gets its weight rounded from the master."""
    state = ordinary_state(5000, torch.float16, seed=9)
    rows = torch.tensor(segments)
    want = run_reference(state, torch.bfloat16, decoupled, rows)
    for num_threads in (1, 2):
        got = run_cpu(state, torch.bfloat16, isa, decoupled, rows, num_threads)
        assert_same_result(got, want, f"{isa}, {num_threads} threads")
    for start, end, index in segments:
        if index == reference.HOLD:
            assert_same_bits(got[0].master[start:end], state.master[start:end], "held master")
            assert_same_bits(got[0].exp_avg[start:end], state.exp_avg[start:end], "held exp_avg")
            assert_same_bits(got[1][start:end], reference.round_to(state.master[start:end], torch.bfloat16), "weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=type_id)
def test_a_weight_over_its_gradient(isa, dtype):
    """A 16-bit weight written over the 16-bit gradient has the bits of a separate one."""
    state, want = ordinary_case(10_001, dtype, dtype)
    new = state.copy()
    cpu.adam_update(
        new.master, new.exp_avg, new.exp_avg_sq, new.grad, new.grad,
        reference.one_segment(new.numel), table(), GRAD_SCALE, True, 2, isa,
    )  # fmt: skip
    assert_same_result((new, new.grad), want, isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=type_id)
def test_every_16_bit_gradient_is_widened_exactly(isa, dtype):
    """All 65536 patterns of a 16-bit gradient enter the update with their exact value."""
    grad = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    zero = torch.zeros(1 << 16)
    state = State(zero + 1.0, zero, zero, torch.where(grad.isfinite(), grad, torch.zeros_like(grad)))
    assert_same_result(run_cpu(state, None, isa, grad_scale=1.0), run_reference(state, None, grad_scale=1.0), isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=type_id)
def test_every_rounding_of_the_weight(isa, dtype):
    """The weight is rounded as specified around every value and tie of its type, infinities and NaNs included."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32)
    ties = 1 << 12 if dtype is torch.float16 else 1 << 15
    near = [patterns.view(torch.int32) + delta for delta in (0, ties - 1, ties, ties + 1, 2 * ties - 1)]
    small = spread_subnormals()  # fp16's subnormals are normal in fp32: their ties are elsewhere
    master = torch.cat([*(n.view(torch.float32) for n in near), small])
    state = State(master, torch.zeros_like(master), torch.zeros_like(master), torch.zeros_like(master))
    _, weight = run_cpu(state, dtype, isa, segments=reference.one_segment(len(master), reference.HOLD), num_threads=2)
    want = reference.round_to(master, dtype)
    assert torch.equal(weight.isnan(), master.isnan())
    assert_same_but_for_nans(weight, want, isa)


def spread_subnormals() -> torch.Tensor:
    """Multiples of a quarter of fp16's smallest number, with neighbors, both signs."""
    quarters = torch.arange(-(1 << 13), 1 << 13, dtype=torch.float32) * 2.0**-26
    above, below = (torch.nextafter(quarters, torch.tensor(x)) for x in (1.0, -1.0))
    return torch.cat([quarters, above, below])


@pytest.mark.parametrize("flush", [True, False])
def test_a_threads_flush_mode_changes_no_bit_and_survives(isa, flush):
    """torch.set_flush_denormal on the calling thread changes nothing, and is as it was afterwards."""
    state = subnormal_state(10_000, torch.float32)
    want = run_reference(state, torch.float16)
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot flush subnormals")
    try:
        got = run_cpu(state, torch.float16, isa, num_threads=2)
        flushes = float(torch.tensor(1e-40, dtype=torch.float64).to(torch.float32) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert flushes is flush
    assert_same_result(got, want, isa)
    assert bool((bits(want[0].exp_avg_sq) != 0).any()), "the case must hold subnormals"


def test_not_a_number_and_infinity_go_where_the_specification_says(isa):
    """Infinite and NaN gradients make the same elements infinite or NaN; the others keep their bits."""
    state = ordinary_state(1000, torch.float32, seed=11)
    rng = generator(12)
    for value in (float("inf"), float("-inf"), float("nan")):
        state.grad[torch.randint(0, 1000, (30,), generator=rng)] = value
    want, got = run_reference(state, None)[0], run_cpu(state, None, isa)[0]
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert_same_but_for_nans(getattr(got, name), getattr(want, name), name)


@pytest.mark.parametrize("grad_scale", [0.0, 1.0, -2.5, 1e-30, 2.0**-16, 1e30])
def test_any_grad_scale(isa, grad_scale):
    """The multiplier is rounded to fp32 once and applied once, whatever its size."""
    state = extreme_state(5000, torch.bfloat16, seed=13)
    want = run_reference(state, torch.bfloat16, grad_scale=grad_scale)
    got = run_cpu(state, torch.bfloat16, isa, grad_scale=grad_scale)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert_same_but_for_nans(getattr(got[0], name), getattr(want[0], name), name)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-15, 1.0])
def test_any_eps(isa, eps):
    """An eps of zero divides by zero where the moments are zero, as the specification does."""
    state = subnormal_state(5000, torch.float32, seed=14)
    scalars = reference.scalar_table([replace(CLASSES[0], eps=eps)])
    ours, theirs = state.copy(), state.copy()
    segments = reference.one_segment(5000)
    reference.adam_update(
        theirs.master, theirs.exp_avg, theirs.exp_avg_sq, theirs.grad, None, segments, scalars, 1.0,
        MasterStorage.FULL, True,
    )  # fmt: skip
    cpu.adam_update(ours.master, ours.exp_avg, ours.exp_avg_sq, ours.grad, None, segments, scalars, 1.0, True, 1, isa)
    assert_same_but_for_nans(ours.master, theirs.master, isa)
    assert_same_bits(ours.exp_avg, theirs.exp_avg, isa)
