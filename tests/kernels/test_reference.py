"""The specification itself: against torch.optim, against exact rounding, and the split of a master."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deep_offload.kernels import reference
from deep_offload.kernels.scalars import AdamClass
from deep_offload.plan.layout import MasterStorage
from tests.kernels.kernel_cases import (
    CLASSES,
    GRAD_SCALE,
    assert_same_bits,
    bits,
    generator,
    ordinary_state,
    run_cpu,
    run_reference,
    table,
)

ULP = 2.0**-24


def test_each_step_stays_within_eight_roundings_of_torch_adamw():
    """From one state, our step and torch's fp32 AdamW differ by at most 8 * 2**-24 of the terms added."""
    numel, lr, betas, eps, decay = 20_000, 1e-3, (0.9, 0.95), 1e-8, 0.1
    rng = generator(3)
    p = torch.randn(numel, generator=rng)
    m, v = torch.zeros(numel), torch.zeros(numel)
    for step in range(1, 31):
        grad = torch.randn(numel, generator=rng) * 10.0 ** torch.randint(-6, 2, (numel,), generator=rng)
        theirs = torch.nn.Parameter(p.clone())
        theirs.grad = grad.clone()
        optimizer = torch.optim.AdamW([theirs], lr=lr, betas=betas, eps=eps, weight_decay=decay, foreach=False)
        optimizer.state[theirs] = {
            "step": torch.tensor(float(step - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()
        }  # fmt: skip
        optimizer.step()
        scalars = reference.scalar_table([AdamClass(lr, *betas, eps, decay, step)])
        old_p, old_m, old_v = p.double(), m.double(), v.double()
        reference.adam_update(
            p, m, v, grad, None, reference.one_segment(numel), scalars, 1.0, MasterStorage.FULL, True
        )  # fmt: skip
        terms_m = betas[0] * old_m.abs() + (1 - betas[0]) * grad.double().abs()
        terms_v = betas[1] * old_v + (1 - betas[1]) * grad.double() ** 2
        denominator = terms_v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
        terms_p = old_p.abs() * (1 + lr * decay) + lr / (1 - betas[0] ** step) * terms_m / denominator
        state = optimizer.state[theirs]
        pairs = ((m, state["exp_avg"], terms_m), (v, state["exp_avg_sq"], terms_v), (p, theirs, terms_p))
        for ours, other, terms in pairs:
            assert bool(((ours - other.detach()).double().abs() <= 8 * ULP * terms).all()), step


def test_l2_decay_follows_torch_adam():
    """With the L2 term a step follows torch's Adam, and differs from the decoupled one."""
    numel = 4_000
    state = ordinary_state(numel, torch.float32, seed=4)
    theirs = torch.nn.Parameter(state.master.clone())
    theirs.grad = state.grad * GRAD_SCALE
    c = CLASSES[0]
    optimizer = torch.optim.Adam([theirs], c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay, foreach=False)
    optimizer.state[theirs] = {
        "step": torch.tensor(float(c.step - 1)),
        "exp_avg": state.exp_avg.clone(),
        "exp_avg_sq": state.exp_avg_sq.clone(),
    }
    optimizer.step()
    ours, _ = run_reference(state, None, decoupled=False)
    assert torch.allclose(ours.master, theirs.detach(), rtol=1e-6, atol=1e-7)
    decoupled, _ = run_reference(state, None, decoupled=True)
    assert not torch.allclose(decoupled.exp_avg, ours.exp_avg, rtol=1e-6, atol=1e-7)


def _exact_step(state, row):
    """The formula in numpy, each operation rounded to fp32 from an exact or double result."""
    f32, f64 = np.float32, np.float64
    p, m, v, g = (t.numpy() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.grad))
    b1, c1, b2, c2, eps, step_size, decay, root_bias, _ = (f32(x) for x in row)
    mul = lambda a, b: (f64(a) * f64(b)).astype(f32)  # noqa: E731  (exact in double, so rounded once)
    x = mul(g, f32(GRAD_SCALE))
    m = mul(b1, m) + mul(c1, x)
    v = mul(b2, v) + mul(c2, mul(x, x))
    root = np.sqrt(v.astype(f64)).astype(f32)
    d = (root.astype(f64) / f64(root_bias)).astype(f32) + eps
    q = mul(p, decay) - mul(step_size, (m.astype(f64) / d.astype(f64)).astype(f32))
    return q, m, v


def test_every_operation_is_rounded_to_nearest_once():
    """The update equals one whose products, quotients and roots are computed in double and rounded once."""
    state = ordinary_state(200_000, torch.float32, seed=5)
    got, _ = run_reference(state, None)
    q, m, v = _exact_step(state, table()[0].tolist())
    for ours, exact in ((got.master, q), (got.exp_avg, m), (got.exp_avg_sq, v)):
        assert_same_bits(ours, torch.from_numpy(exact), "one rounding per operation")


def _fused(p, m, v, x, row, decoupled):
    """A break: multiply-add with one rounding, as a compiler with contraction would."""
    b1, c1, b2, c2, eps, step_size, decay, root_bias, _ = row
    m = (m.double() * b1 + (x * c1).double()).float()
    v = (v.double() * b2 + ((x * x) * c2).double()).float()
    d = torch.sqrt(v.double()).float() / torch.full_like(v, root_bias) + eps
    return (p.double() * decay - ((m / d) * step_size).double()).float(), m, v


def _by_reciprocal(p, m, v, x, row, decoupled):
    """A break: division by multiplying with the reciprocal."""
    b1, c1, b2, c2, eps, step_size, decay, root_bias, _ = row
    m, v = m * b1 + x * c1, v * b2 + (x * x) * c2
    d = torch.sqrt(v.double()).float() * (1.0 / torch.full_like(v, root_bias)) + eps
    return p * decay - (m / d) * step_size, m, v


def _other_association(p, m, v, x, row, decoupled):
    """A break: (step_size * m) / d instead of step_size * (m / d)."""
    b1, c1, b2, c2, eps, step_size, decay, root_bias, _ = row
    m, v = m * b1 + x * c1, v * b2 + (x * c2) * x
    d = torch.sqrt(v.double()).float() / torch.full_like(v, root_bias) + eps
    return p * decay - (m * step_size) / d, m, v


@pytest.mark.parametrize("broken", [_fused, _by_reciprocal, _other_association])
def test_a_broken_arithmetic_is_seen(monkeypatch, broken):
    """Fusing, a reciprocal or another association changes bits that the comparison with the kernel then finds."""
    state = ordinary_state(20_000, torch.float32, seed=6)
    kernel, _ = run_cpu(state, None, None)
    monkeypatch.setattr(reference, "_update", broken)
    wrong, _ = run_reference(state, None)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(kernel.master, wrong.master, "master")


# --- Rounding and the split of a master ---

UPPERS = torch.arange(1 << 16, dtype=torch.int32)
LOWS_AROUND_TIES = (0x0000, 0x0001, 0x0002, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)


def masters(upper: torch.Tensor, low: int | torch.Tensor) -> torch.Tensor:
    """fp32 values of these halves, without NaNs."""
    value = ((upper << 16) + low).to(torch.int32).view(torch.float32)
    return value[~value.isnan()]


def all_rounding_cases() -> torch.Tensor:
    """Every upper half with lows around ties; every low half under uppers of each kind, both signs."""
    cases = [masters(UPPERS, low) for low in LOWS_AROUND_TIES]
    for upper in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x4049, 0x7F7E, 0x7F7F):
        for sign in (0, 0x8000):
            cases.append(masters(torch.full((1 << 16,), upper | sign, dtype=torch.int32), UPPERS))
    return torch.cat(cases)


def nearest_bf16_ties_away(master: torch.Tensor) -> torch.Tensor:
    """An oracle by comparing distances in double: bits of the nearer bf16, of the larger magnitude where equal."""
    magnitude = (master.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    below, above = magnitude & ~0xFFFF, (magnitude & ~0xFFFF) + 0x10000
    as_double = lambda b: b.to(torch.int32).view(torch.float32).double()  # noqa: E731
    exact = as_double(magnitude)
    upper = as_double(above).nan_to_num(posinf=2.0**128)  # past the largest, where fp32's grid would go on
    chosen = torch.where(upper - exact <= exact - as_double(below), above, below) >> 16
    return torch.where(exact.isinf(), torch.tensor(0x7F80), chosen) | torch.where(master.signbit(), 0x8000, 0)


def test_bf16_rounds_to_nearest_with_ties_away_from_zero():
    """All rounding cases of bf16 agree with an oracle that compares distances."""
    cases = all_rounding_cases()
    rounded = bits(reference.round_to(cases, torch.bfloat16)).to(torch.int64) & 0xFFFF
    assert torch.equal(rounded, nearest_bf16_ties_away(cases))


def test_ties_to_even_would_be_seen():
    """Torch's own rounding to bf16 differs exactly at ties under an even upper half, so the oracle can fail."""
    cases = all_rounding_cases()
    theirs = bits(cases.to(torch.bfloat16)).to(torch.int64) & 0xFFFF
    differs = theirs != nearest_bf16_ties_away(cases)
    assert bool(differs.any())
    assert bool(((bits(cases)[differs] & 0x1FFFF) == 0x8000).all())


def test_split_and_merge_return_every_master_exactly():
    """merge(split(x)) has the bits of x for subnormals, ties, the largest values and infinities of both signs."""
    cases = all_rounding_cases()
    weight, low = reference.split_master(cases)
    assert weight.dtype is torch.bfloat16 and low.dtype is torch.int16
    assert_same_bits(reference.merge_master(weight, low), cases, "merged master")
    assert_same_bits(weight, reference.round_to(cases, torch.bfloat16), "upper half")


def test_a_nan_master_stays_a_nan():
    """Every NaN gives a NaN weight, also where plain integer rounding would carry into the sign and give a zero."""
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -4194304], dtype=torch.int32).view(torch.float32)
    weight, low = reference.split_master(nans)
    assert bool(weight.isnan().all())
    assert bool(reference.merge_master(weight, low).isnan().all())


def test_fp16_and_fp32_weights():
    """fp16 rounds ties to even as numpy does; an fp32 weight is a copy of the master; other types are refused."""
    cases = all_rounding_cases()
    with np.errstate(over="ignore"):
        want = torch.from_numpy(cases.numpy().astype(np.float16))
    assert_same_bits(reference.round_to(cases, torch.float16), want, "fp16")
    copy = reference.round_to(cases, torch.float32)
    assert_same_bits(copy, cases, "fp32")
    assert copy.data_ptr() != cases.data_ptr()
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        reference.round_to(cases, torch.float64)


@pytest.mark.parametrize("decoupled", [True, False])
def test_storage_never_changes_a_bit(decoupled):
    """FULL, SPLIT and WEIGHT storage give the same masters and moments over five steps, HOLD included."""
    numel = 10_000
    segments = torch.tensor([[0, 1000, 0], [1000, 3000, reference.HOLD], [3000, 3001, 1], [3001, numel, 0]])
    scalars = table(decoupled)
    start = ordinary_state(numel, torch.bfloat16, seed=7)
    full, split, weight = start.copy(), start.copy(), start.copy()
    full_weight = torch.empty(numel, dtype=torch.bfloat16)
    split_weight, low = reference.split_master(start.master)
    for step in range(5):
        grad = ordinary_state(numel, torch.bfloat16, seed=100 + step).grad
        for master, state, out, storage in (
            (full.master, full, full_weight, MasterStorage.FULL),
            (low, split, split_weight, MasterStorage.SPLIT),
            (None, weight, weight.master, MasterStorage.WEIGHT),
        ):
            reference.adam_update(
                master, state.exp_avg, state.exp_avg_sq, grad, out, segments, scalars, GRAD_SCALE, storage, decoupled
            )
    assert_same_bits(reference.merge_master(split_weight, low), full.master, "SPLIT master")
    assert_same_bits(weight.master, full.master, "WEIGHT master")
    assert_same_bits(split_weight, full_weight, "bf16 weight")
    for state in (split, weight):
        assert_same_bits(state.exp_avg, full.exp_avg, "exp_avg")
        assert_same_bits(state.exp_avg_sq, full.exp_avg_sq, "exp_avg_sq")
    held = slice(1000, 3000)
    assert_same_bits(full.master[held], start.master[held], "held master")
    assert_same_bits(full.exp_avg[held], start.exp_avg[held], "held moment")


def test_storage_with_the_wrong_types_is_refused():
    """A split master with an fp16 weight, or a WEIGHT storage with a master, is refused with what it takes."""
    state = ordinary_state(10, torch.float32)
    scalars, segments = table(), reference.one_segment(10)
    with pytest.raises(ValueError, match="storage SPLIT takes a master of torch.int16 and a weight of torch.bfloat16"):
        reference.adam_update(
            torch.zeros(10, dtype=torch.int16), state.exp_avg, state.exp_avg_sq, state.grad, state.master.half(),
            segments, scalars, 1.0, MasterStorage.SPLIT, True,
        )  # fmt: skip
    with pytest.raises(ValueError, match="storage WEIGHT takes a master of None"):
        reference.adam_update(
            state.master, state.exp_avg, state.exp_avg_sq, state.grad, state.master, segments, scalars, 1.0,
            MasterStorage.WEIGHT, True,
        )  # fmt: skip
