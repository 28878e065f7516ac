"""States, gradients and comparisons shared by the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deep_offload.kernels import cpu, reference
from deep_offload.kernels.scalars import AdamClass
from deep_offload.plan.layout import MasterStorage

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)
CLASSES = (
    AdamClass(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3),
    AdamClass(lr=3e-4, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.0, step=50),
)
GRAD_SCALE = 0.37


def table(decoupled: bool = True) -> Tensor:
    """The fp32 scalars of CLASSES, with decoupled or L2 weight decay."""
    return reference.scalar_table([replace(adam, decoupled=decoupled) for adam in CLASSES])


@dataclass(frozen=True)
class State:
    """fp32 [numel] tensors of one case, never updated in place: each run works on a copy."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor

    @property
    def numel(self) -> int:
        return self.master.numel()

    def copy(self) -> State:
        return State(self.master.clone(), self.exp_avg.clone(), self.exp_avg_sq.clone(), self.grad.clone())

    def cut(self, start: int, end: int) -> State:
        return State(self.master[start:end], self.exp_avg[start:end], self.exp_avg_sq[start:end], self.grad[start:end])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(numel: int, low: int, high: int, rng: torch.Generator) -> Tensor:
    """Normal numbers times powers of ten from 10**low to 10**high, as fp32."""
    exponents = torch.randint(low, high + 1, (numel,), generator=rng)
    return (torch.randn(numel, generator=rng, dtype=torch.float64) * 10.0**exponents).to(torch.float32)


def ordinary_state(numel: int, grad_dtype: torch.dtype, seed: int = 0) -> State:
    """A state in the middle of training; gradients of 1e-12 to 1e2."""
    rng = generator(seed)
    grad = spread(numel, -12, 2, rng).to(grad_dtype)
    exp_avg, exp_avg_sq = spread(numel, -8, -1, rng), spread(numel, -12, -2, rng).abs()
    return State(torch.randn(numel, generator=rng), exp_avg, exp_avg_sq, grad)


def extreme_state(numel: int, grad_dtype: torch.dtype, seed: int = 1) -> State:
    """Every magnitude of fp32 at once: subnormals, zeros of both signs, values whose squares overflow."""
    rng = generator(seed)
    state = State(
        spread(numel, -45, 8, rng), spread(numel, -45, 10, rng), spread(numel, -45, 20, rng).abs(),
        spread(numel, -45, 20, rng),
    )  # fmt: skip
    for tensor in (state.master, state.exp_avg, state.exp_avg_sq, state.grad):
        tensor[torch.rand(numel, generator=rng) < 0.1] = 0.0
    for tensor in (state.master, state.exp_avg, state.grad):
        tensor[torch.rand(numel, generator=rng) < 0.05] = -0.0
    largest = torch.finfo(grad_dtype).max  # infinities have a test of their own
    return replace(state, grad=state.grad.clamp(-largest, largest).to(grad_dtype))


def subnormal_state(numel: int, grad_dtype: torch.dtype, seed: int = 2) -> State:
    """Rows that got no gradient for long: moments that have decayed into fp32's subnormals."""
    rng = generator(seed)
    state = State(torch.randn(numel, generator=rng), spread(numel, -43, -38, rng),
                  spread(numel, -44, -38, rng).abs(), spread(numel, -43, -20, rng))  # fmt: skip
    state.grad[torch.rand(numel, generator=rng) < 0.5] = 0.0
    return replace(state, grad=state.grad.to(grad_dtype))


def empty_weight(numel: int, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else torch.full((numel,), 7.0, dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns, so that NaNs and the signs of zeros are compared."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(got: Tensor | None, want: Tensor | None, what: str) -> None:
    if got is None or want is None:
        assert got is None and want is None, what
        return
    differing = int((bits(got) != bits(want)).sum())
    assert differing == 0, f"{what}: {differing} of {got.numel()} elements differ"


def assert_same_but_for_nans(got: Tensor, want: Tensor, what: str) -> None:
    """The same elements are NaNs, of any payload, and all others have the same bits."""
    assert torch.equal(got.isnan(), want.isnan()), what
    assert_same_bits(got[~got.isnan()], want[~want.isnan()], what)


def run_reference(
    state: State,
    weight_dtype: torch.dtype | None,
    decoupled: bool = True,
    segments: Tensor | None = None,
    grad_scale: float = GRAD_SCALE,
) -> tuple[State, Tensor | None]:
    """The specification's result for FULL storage: (new state, weight)."""
    new, weight = state.copy(), empty_weight(state.numel, weight_dtype)
    segments = reference.one_segment(state.numel) if segments is None else segments
    reference.adam_update(
        new.master, new.exp_avg, new.exp_avg_sq, new.grad, weight, segments, table(decoupled),
        grad_scale, MasterStorage.FULL, decoupled,
    )  # fmt: skip
    return new, weight


def run_cpu(
    state: State,
    weight_dtype: torch.dtype | None,
    isa: str | None,
    decoupled: bool = True,
    segments: Tensor | None = None,
    num_threads: int = 1,
    grad_scale: float = GRAD_SCALE,
) -> tuple[State, Tensor | None]:
    """The compiled kernel's result for the same arguments."""
    new, weight = state.copy(), empty_weight(state.numel, weight_dtype)
    segments = reference.one_segment(state.numel) if segments is None else segments
    cpu.adam_update(
        new.master, new.exp_avg, new.exp_avg_sq, new.grad, weight, segments, table(decoupled),
        grad_scale, decoupled, num_threads, isa,
    )  # fmt: skip
    return new, weight


def assert_same_result(got: tuple[State, Tensor | None], want: tuple[State, Tensor | None], what: str) -> None:
    assert_same_bits(got[0].master, want[0].master, f"{what}: master")
    assert_same_bits(got[0].exp_avg, want[0].exp_avg, f"{what}: exp_avg")
    assert_same_bits(got[0].exp_avg_sq, want[0].exp_avg_sq, f"{what}: exp_avg_sq")
    assert_same_bits(got[1], want[1], f"{what}: weight")
