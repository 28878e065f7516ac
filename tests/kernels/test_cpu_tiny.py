"""Vectors with tiny elements: the roads of csrc/care.h keep every bit, and the quick one is taken."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deep_offload.kernels import cpu, reference
from deep_offload.kernels.scalars import AdamClass, round_to_fp32, scalar_row
from deep_offload.plan.layout import MasterStorage
from tests.kernels.kernel_cases import (
    GRAD_DTYPES,
    State,
    assert_same_but_for_nans,
    empty_weight,
    generator,
    ordinary_state,
    subnormal_state,
)

ISAS = cpu.supported_isas()
NUMEL = 256 * 64
LANES = {"avx512_wide": 16, "avx2_wide": 8}  # the sets that have roads
ROADS = [isa for isa in ISAS if isa in LANES]
SCALED = [isa for isa in ISAS if isa == "avx512_wide"]

# Powers of two around which an operation changes its kind or a limit of csrc/care.h lies.
POWERS = (-149, -148, -127, -126, -125, -124, -104, -103, -100, -96, -75, -60, -56, -50, -40, -20, 0)
GRAD_SCALES = (1.0, 1 / 3, 2.0**-16, 2.0**-29, 1.7 * 2.0**19, 2.0**-45, 2.0**29, 0.0)
BETAS = ((0.9, 0.95), (0.9, 0.999), (0.0, 0.5), (2e-5, 2e-5), (0.99998, 0.99998), (0.999999, 0.9999999))
DECAYS = (0.0, 0.1, 400.0, 900.0)  # with lr 1e-3, 400 leaves 0.6 of the master
EPSILONS = (1e-8, 1e-15)
ADAM = AdamClass(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)


def around_powers(numel: int, powers: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """fp32 of both signs: zeros, powers of two, their neighbors, and numbers anywhere up to the next one."""
    power = torch.tensor(powers)[torch.randint(len(powers), (numel,), generator=rng)]
    exact = torch.ldexp(torch.ones(numel, dtype=torch.float64), power).to(torch.float32).view(torch.int32)
    near = exact + torch.randint(-3, 4, (numel,), generator=rng, dtype=torch.int32)
    within = exact + (torch.rand(numel, generator=rng) * (exact.clamp(max=1 << 23))).to(torch.int32)
    kind = torch.rand(numel, generator=rng)
    magnitude = torch.where(kind < 0.3, exact, torch.where(kind < 0.6, near.clamp(min=0), within))
    magnitude[kind > 0.9] = 0
    return torch.where(torch.rand(numel, generator=rng) < 0.5, magnitude, magnitude | -(1 << 31)).view(torch.float32)


def sparse(values: Tensor, rng: torch.Generator) -> Tensor:
    """`values` in half of the blocks of 64 elements, else 0: rows that got no gradient."""
    kept = torch.rand(len(values) // 64, generator=rng) < 0.5
    return values * kept.repeat_interleave(64)


def mixed_state(seed: int, grad_scale: float, adam: AdamClass) -> State:
    """Moments and gradients of every kind, lane by lane.

    By blocks, masters are ordinary (but 0 where moment and gradient are), just above the least beside which a tiny
    moment does not count, about 2^4 below that, or of every kind, there beside a few second moments below 0. One half
    of the gradients cancels the moment as far as fp32 can, or is near a limit of x.
    """
    rng = generator(seed)
    exp_avg, grad = around_powers(NUMEL, POWERS, rng), sparse(around_powers(NUMEL, POWERS, rng), rng)
    exp_avg_sq = around_powers(NUMEL, POWERS, rng).abs()
    step_size = adam.lr / (1 - adam.beta1**adam.step)
    least = 2.0**-68 * step_size / adam.eps * (1 + 3 * torch.rand(NUMEL, generator=rng) ** 4) * (1 + 2.0**-20)
    signs = torch.randint(0, 2, (NUMEL,), generator=rng) * 2 - 1
    lower = least * signs / 2.0 ** (8 * torch.rand(NUMEL, generator=rng))
    masters = (torch.randn(NUMEL, generator=rng), least * signs, lower, around_powers(NUMEL, POWERS, rng))
    block = torch.arange(NUMEL) // 64 % 4
    master = torch.stack(masters).gather(0, block[None])[0]
    exp_avg_sq[(block == 3) & (torch.rand(NUMEL, generator=rng) < 0.02)] *= -1
    if grad_scale > 0.0:
        kind = torch.rand(NUMEL, generator=rng)
        cancelling = -exp_avg.double() * adam.beta1 / (1 - adam.beta1) / grad_scale
        grad = torch.where(kind < 0.2, cancelling.to(torch.float32), grad)
        grad = torch.where(kind > 0.7, (grad.double() / grad_scale).to(torch.float32), grad)
    master[(block == 0) & (exp_avg == 0) & (grad == 0)] *= 0.0
    return State(master, exp_avg, exp_avg_sq, grad)


def run(state: State, adam: AdamClass, grad_scale: float, isa: str | None) -> tuple[State, Tensor]:
    """(new state, bf16 weight) of an instruction set, or of the specification for None."""
    new, weight = state.copy(), empty_weight(state.numel, torch.bfloat16)
    arrays = (new.master, new.exp_avg, new.exp_avg_sq, new.grad, weight, reference.one_segment(state.numel))
    scalars = reference.scalar_table([adam])
    if isa is None:
        reference.adam_update(*arrays, scalars, grad_scale, MasterStorage.FULL, adam.decoupled)
    else:
        cpu.adam_update(*arrays, scalars, grad_scale, adam.decoupled, 1, isa)
    return new, weight


def roads(state: State, adam: AdamClass, grad_scale: float, isa: str) -> tuple[list[int], State]:
    """(numbers of vectors on the [plain, scaled, wide] road, new state)."""
    new = state.copy()
    row = torch.tensor(scalar_row(adam))
    arrays = (new.master, new.exp_avg, new.exp_avg_sq, new.grad)
    return cpu.extension().adam_roads(*arrays, row, round_to_fp32(grad_scale), isa), new


def assert_all_agree(state: State, adam: AdamClass, grad_scale: float) -> None:
    """Every instruction set gives the bits of the specification."""
    want, want_weight = run(state, adam, grad_scale, None)
    for isa in ISAS:
        got, weight = run(state, adam, grad_scale, isa)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert_same_but_for_nans(getattr(got, name), getattr(want, name), f"{isa}, {adam}, {grad_scale}: {name}")
        assert_same_but_for_nans(weight, want_weight, f"{isa}, {adam}, {grad_scale}: weight")


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_tiny_elements_in_any_mixture_keep_their_bits(betas, eps):
    """States whose neighbors are tiny, zero and ordinary independently, for scalars inside and outside all limits."""
    for case, (grad_scale, weight_decay) in enumerate(itertools.product(GRAD_SCALES, DECAYS)):
        adam = replace(ADAM, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        state = mixed_state(case, grad_scale, adam)
        grad_dtype = GRAD_DTYPES[case % len(GRAD_DTYPES)]
        largest = torch.finfo(grad_dtype).max
        state = replace(state, grad=state.grad.clamp(-largest, largest).to(grad_dtype))
        assert_all_agree(state, replace(adam, decoupled=case % 7 != 6), grad_scale)


@pytest.mark.parametrize("isa", SCALED)
@pytest.mark.parametrize("grad_scale", [1.0, 1 / 3, 2.0**-16, 2.0**-29, 1.7 * 2.0**19])
def test_the_mixtures_above_take_the_scaled_road(isa, grad_scale):
    """What the test above compares is that road in at least a third of its vectors, for scalars inside the limits."""
    state = mixed_state(3, grad_scale, ADAM)
    assert roads(state, ADAM, grad_scale, isa)[0][1] * LANES[isa] > NUMEL // 3


@pytest.mark.parametrize("isa", SCALED)
def test_rows_without_gradient_take_the_scaled_road(isa):
    """Decayed moments beside ordinary masters take it in every vector, with a tiny gradient and without."""
    state = subnormal_state(NUMEL, torch.float32)
    tiny = replace(state, exp_avg=state.exp_avg.clamp(-1e-38, 1e-38), grad=state.grad.clamp(-1e-38, 1e-38))
    silent = replace(tiny, grad=torch.zeros(NUMEL))
    decayed_first = replace(silent, exp_avg_sq=torch.full((NUMEL,), 1e-8))
    for case in (tiny, silent, decayed_first):
        counts, new = roads(case, ADAM, 0.9, isa)
        assert counts == [0, NUMEL // LANES[isa], 0]
        want, _ = run(case, ADAM, 0.9, None)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert_same_but_for_nans(getattr(new, name), getattr(want, name), name)


@pytest.mark.parametrize("isa", ROADS)
def test_other_vectors_take_the_other_roads(isa):
    """Ordinary vectors stay on the plain road; a master of 0 beside a tiny moment, or an odd scalar, takes Wide."""
    num_vectors = NUMEL // LANES[isa]
    grad = torch.full((NUMEL,), 1e-3)
    assert roads(replace(ordinary_state(NUMEL, torch.float32), grad=grad), ADAM, 1.0, isa)[0] == [num_vectors, 0, 0]
    tiny = subnormal_state(NUMEL, torch.float32)
    tiny = replace(tiny, exp_avg=torch.full((NUMEL,), 1e-39), grad=torch.zeros(NUMEL))
    assert roads(replace(tiny, master=torch.zeros(NUMEL)), ADAM, 1.0, isa)[0] == [0, 0, num_vectors]
    assert roads(tiny, ADAM, 2.0**-45, isa)[0] == [0, 0, num_vectors]
    assert roads(tiny, replace(ADAM, beta1=0.0), 1.0, isa)[0] == [0, 0, num_vectors]


def test_roads_are_counted_only_where_there_are_some():
    """The probe refuses a set with one road, a 16-bit gradient and a table in the place of a row."""
    state = ordinary_state(64, torch.float32)
    with pytest.raises(ValueError, match="^isa: scalar has one road only$"):
        roads(state, ADAM, 1.0, "scalar")
    for isa in ROADS:
        with pytest.raises(ValueError, match="^grad: expected "):
            roads(replace(state, grad=state.grad.bfloat16()), ADAM, 1.0, isa)
        with pytest.raises(ValueError, match="^scalars: expected "):
            cpu.extension().adam_roads(*(torch.zeros(64) for _ in range(4)), torch.zeros(1, 9), 1.0, isa)
