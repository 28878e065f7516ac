"""A small engine over synthetic shards, driven for some steps; what the engine's tests vary."""

from dataclasses import dataclass, field

import torch

from deep_offload.kernels.scalars import AdamClass
from deep_offload.optimizer.engine import STATE_NAMES, EngineSettings, OffloadEngine
from deep_offload.optimizer.grad_norm import counted_runs, sum_of_squares
from deep_offload.optimizer.shards import Segment, Shard
from deep_offload.plan.layout import build_layout
from deep_offload.plan.placement import place_by_share, place_by_stride

PARAM_SIZES = ((700, 128, 65), (1200, 3), (64, 1500, 7), (999,))
"""Elements of the parameters in each of four buckets; their borders fall inside subgroups and the other way round."""

GROUPS = (  # lr, betas, eps, weight decay
    (1e-2, (0.9, 0.95), 1e-8, 0.1),
    (3e-3, (0.8, 0.99), 1e-6, 0.0),
)
CLIP = 1.0


@dataclass(frozen=True)
class Case:
    """One way to place and move the state."""

    share: float | None = None
    stride: int | None = None
    resident: float = 0.0
    slots: int = 2
    subgroup: int = 300
    threads: int = 1
    wire: str = "fp32"
    split: bool = True
    accumulation: int = 1
    dtype: torch.dtype = torch.bfloat16
    grad_dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    reserve: bool = False
    """Every subgroup owns the host memory that lets the CPU update it after a move."""
    fixed_scale: float | None = None
    """Multiplier of the gradients instead of the clip coefficient, whose bits depend on the device's summation."""


ALL_RESIDENT = dict(share=0.0, stride=None, resident=1.0)


@dataclass
class Model:
    """Shards of a model and their parameters' sizes; parameter numbers run through all buckets."""

    shards: list[Shard]
    group_of: list[int]
    grads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """parameter -> (shard, start, end)"""


def make_model(case: Case) -> Model:
    generator = torch.Generator().manual_seed(7)
    shards, group_of, where = [], [], {}
    for sizes in PARAM_SIZES:
        segments, position = [], 0
        for size in sizes:
            where[len(group_of)] = (len(shards), position, position + size)
            segments.append(Segment(position, position + size, len(group_of)))
            group_of.append(len(group_of) % 2)
            position += -(-size // 64) * 64
        param = torch.zeros(position)
        for s in segments:
            param[s.start : s.end] = torch.randn(s.end - s.start, generator=generator) * 0.3
        weight = param.to(case.dtype).to(case.device)
        shards.append(Shard(weight, torch.zeros(position, dtype=case.grad_dtype, device=case.device), tuple(segments)))
    return Model(shards, group_of, where)


def make_engine(case: Case, model: Model, warn=None) -> OffloadEngine:
    layout = build_layout([s.spec for s in model.shards], case.subgroup)
    num = len(layout.subgroups)
    if case.stride is not None:
        placement = place_by_stride(num, case.stride, case.resident)
    else:
        placement = place_by_share(num, case.share or 0.0, case.resident)
    wire = torch.float32 if case.wire == "fp32" else case.grad_dtype
    reserved = frozenset(range(num)) if case.reserve else frozenset()
    settings = EngineSettings(placement, case.slots, case.split, wire, case.threads, reserved)
    return OffloadEngine(model.shards, layout, settings, warn=warn or _no_warning)


def _no_warning(text: str) -> None:
    raise AssertionError(text)


def fill_grads(case: Case, model: Model, step: int) -> None:
    """Accumulate `accumulation` micro-gradients, of very different sizes, into the gradient buffers."""
    for shard in model.shards:
        shard.grad.zero_()
    for micro in range(case.accumulation):
        for number, (shard, start, end) in model.grads.items():
            generator = torch.Generator().manual_seed(1000 * step + 50 * micro + number)
            grad = torch.randn(end - start, generator=generator) * 10.0 ** ((number + step) % 5 - 3)
            model.shards[shard].grad[start:end] += grad.to(case.grad_dtype).to(case.device)


def grad_scale(model: Model) -> float:
    """The clip coefficient of the gradients in the buffers."""
    runs = counted_runs([[(s.start, s.end, True) for s in shard.segments] for shard in model.shards])
    total = sum_of_squares([s.grad for s in model.shards], runs, model.shards[0].grad.device)
    return min(1.0, CLIP / (float(total.sqrt()) + 1e-6))


def adam_classes(step: int) -> list[AdamClass]:
    return [AdamClass(lr, *betas, eps, wd, step) for lr, betas, eps, wd in GROUPS]


def drive(case: Case, num_steps: int, watch=None, before=None, after=None) -> dict[str, torch.Tensor]:
    """Run the case; returns weights and all states, flat. watch(step, model, scale) sees final gradients; before and
    after (step, engine) are called around each step."""
    model = make_model(case)
    engine = make_engine(case, model)
    try:
        for step in range(1, num_steps + 1):
            if before is not None:
                before(step, engine)
            engine.wait_until_reusable()
            fill_grads(case, model, step)
            for i in range(0, len(engine.layout.subgroups), 2):  # half of them early, as hooks would, out of order
                engine.grads_ready(i)
            scale = grad_scale(model) if case.fixed_scale is None else case.fixed_scale
            if watch is not None:
                watch(step, model, scale)
            engine.update(adam_classes(step), model.group_of, scale)
            if after is not None:
                after(step, engine)
        engine.synchronize()
        return collect(engine, model)
    finally:
        engine.close()


def collect(engine: OffloadEngine, model: Model) -> dict[str, torch.Tensor]:
    out = {"weight": torch.cat([s.param.detach().cpu().clone() for s in model.shards])}
    for name in STATE_NAMES:
        flat = [torch.empty(s.param.numel()) for s in model.shards]
        for s in engine.layout.subgroups:
            flat[s.shard][s.start : s.start + s.numel] = engine.read_state(s.index)[name].cpu()
        out[name] = torch.cat(flat)
    return out


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str) -> None:
    for name, tensor in want.items():
        differing = int((bits(got[name]) != bits(tensor)).sum())
        assert differing == 0, f"{what}: {differing} of {tensor.numel()} elements of {name} differ"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)
