"""Questions before a run: which strategy, which parallel layout, how many GPUs, how large a model. Standard library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import is_share_free
from deep_offload.model.dry_run import Forecast, forecast, ranks_per_host, usable_gpu_bytes, weights_problem
from deep_offload.model.gpt import GPTShape
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.run import RecomputeShape, RunShape, model_bytes

STATE_BYTES_PER_PARAM = 12
"""fp32 master and two moments, as a checkpoint holds them whatever their storage in memory."""

STRATEGIES: tuple[tuple[str, dict[str, object]], ...] = (
    ("chosen by the model", {}),
    ("nothing resident", {"offload_resident_fraction": 0.0}),
    ("all on the CPU (ZeRO-Offload style)", {"offload_gpu_share": 0.0, "offload_resident_fraction": 0.0}),
    ("half resident, rest on the CPU (TwinFlow style)", {"offload_gpu_share": 0.0, "offload_resident_fraction": 0.5}),
    ("stride 2 (Deep Optimizer States style)", {"offload_stride": 2, "offload_resident_fraction": 0.0}),
    ("stride 3", {"offload_stride": 3, "offload_resident_fraction": 0.0}),
    ("stride 4", {"offload_stride": 4, "offload_resident_fraction": 0.0}),
    ("all streamed to the GPU", {"offload_gpu_share": 1.0, "offload_resident_fraction": 0.0}),
    ("no offload", {"interleaved_offload": False, "offload_resident_fraction": 1.0}),
)
"""Known ways to place state, as settings of one engine."""


_WORTH_A_WORD = 1.02
"""How much faster another cut must be: less is within what predictions are wrong by."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One strategy's forecast; problems: why it does not fit, or empty. result is None when no placement exists."""

    name: str
    result: Forecast | None
    problems: tuple[str, ...]


def alternatives(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> tuple[Alternative, ...]:
    """Forecast every strategy on the same run."""
    return tuple(try_forecast(name, run, _with(config, changes), profile) for name, changes in STRATEGIES)


def free_gpu_bytes(run: RunShape, profile: HardwareProfile) -> int:
    """Whole GiB of a GPU that weights, gradients and activations leave on the fullest pipeline stage."""
    fullest = max(model_bytes(run, rank).total for rank in range(run.parallel.pipeline))
    return max(0, (usable_gpu_bytes(profile) - fullest) // 2**30 * 2**30)


def _with(config: OffloadConfig, changes: dict[str, object]) -> OffloadConfig:
    if not changes:
        return config
    return replace(config, **{"offload_gpu_share": "auto", "offload_stride": "auto", **changes})  # type: ignore[arg-type]


def try_forecast(name: str, run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> Alternative:
    """A forecast under a name, or why there is none."""
    try:
        result = forecast(run, config, profile)
    except ValueError as error:
        return Alternative(name, None, (str(error),))
    return Alternative(name, result, result.problems)


def other_cuts(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> tuple[Alternative, ...]:
    """Forecast the run on twice the GPUs, data-parallel, and with twice and half the tensor parallelism.

    On as many GPUs the global batch stays, on twice the GPUs it doubles. Cuts that the model, the host or the batch
    does not allow are left out.
    """
    p, found = run.parallel, []
    cuts = [replace(p, data=2 * p.data)]
    if p.data % 2 == 0 and ranks_per_host(p.world_size, profile) % (2 * p.tensor) == 0:
        cuts.append(replace(p, tensor=2 * p.tensor, data=p.data // 2))
    if p.tensor % 2 == 0:
        cuts.append(replace(p, tensor=p.tensor // 2, data=2 * p.data))
    for cut in cuts:
        batch = run.global_batch_size * cut.world_size // p.world_size
        try:
            cut.check(run.model)
            other = replace(run, parallel=cut, global_batch_size=batch)  # checks that the batch divides
        except ValueError:
            continue
        name = f"{cut.world_size} GPUs: tensor {cut.tensor} x pipeline {cut.pipeline} x data {cut.data}"
        found.append(try_forecast(name, other, config, profile))
    return tuple(found)


def faster_cut(result: Forecast, cuts: Sequence[Alternative]) -> Alternative | None:
    """The cut of the same GPUs and batch that fits and trains fastest, where it beats the run's own layout."""
    own = (result.run.parallel.world_size, result.run.global_batch_size)
    fitting = [cut for cut in cuts if cut.result is not None and not cut.problems]
    found = [cut for cut in fitting if (cut.result.run.parallel.world_size, cut.result.run.global_batch_size) == own]
    best = max(found, key=lambda cut: cut.result.tokens_per_s_per_gpu, default=None)
    if best is None or best.result.tokens_per_s_per_gpu <= _WORTH_A_WORD * result.tokens_per_s_per_gpu:
        return None
    return best


def layouts(run: RunShape, num_gpus: int, profile: HardwareProfile, *, keeps_batch: bool = False) -> Iterator[RunShape]:
    """The run on `num_gpus`, cut in every allowed way: least recomputation and model parallelism first.

    Tensor parallelism stays inside a host. keeps_batch: the global batch stays, and cuts that it does not divide over
    are left out; else each data-parallel rank keeps its micro-batches.
    """
    per_host = ranks_per_host(num_gpus, profile)
    shape = run.model
    recomputes = [run.recompute]
    if run.recompute.granularity != "full":
        recomputes.append(RecomputeShape(granularity="full", method="uniform"))
    cuts = sorted(
        ((tensor, pipeline) for tensor in (1, 2, 4, 8) for pipeline in (1, 2, 4, 8, 16)),
        key=lambda cut: (cut[0] * cut[1], cut[1]),
    )
    for tensor, pipeline in cuts:
        if per_host % tensor or num_gpus % (tensor * pipeline):
            continue
        parallel = replace(run.parallel, tensor=tensor, pipeline=pipeline, data=num_gpus // (tensor * pipeline))
        try:
            parallel.check(shape)
        except ValueError:
            continue
        batch = run.global_batch_size if keeps_batch else run.num_micro_batches * run.micro_batch_size * parallel.data
        if batch % (run.micro_batch_size * parallel.data):
            continue
        for recompute in recomputes:
            yield replace(run, parallel=parallel, recompute=recompute, global_batch_size=batch)


def first_fitting(
    run: RunShape, num_gpus: int, config: OffloadConfig, profile: HardwareProfile, *, keeps_batch: bool = False
) -> RunShape | None:
    """The first of the run's `layouts` on `num_gpus` that fits GPU and host memory, or None."""
    cuts = layouts(run, num_gpus, profile, keeps_batch=keeps_batch)
    return next((cut for cut in cuts if fits(cut, config, profile)), None)


def fits(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> bool:
    """Whether the run fits with its settings, and where the share is free with any."""
    return leanest(run, config, profile) is not None


def leanest(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> OffloadConfig | None:
    """The settings with which the run fits, or None.

    Where the share is free, either everything is streamed, which takes least of the host, or nothing, which takes no
    slots on the GPU: if neither fits, no share does.
    """
    if weights_problem(run, profile) is not None:
        return None  # first of all: it costs nothing, whatever the number of layers
    usable = usable_gpu_bytes(profile)
    if profile.gpu_memory_bytes and any(model_bytes(run, r).total > usable for r in range(run.parallel.pipeline)):
        return None  # cheap: no placement can help
    shares = (1.0, 0.0) if is_share_free(config) else (config.offload_gpu_share,)
    tried = (replace(config, offload_gpu_share=share) for share in shares)
    return next((one for one in tried if fits_as_chosen(run, one, profile)), None)


def fits_as_chosen(run: RunShape, config: OffloadConfig, profile: HardwareProfile) -> bool:
    """Whether the run fits with what is chosen where settings are free, as training would choose."""
    return not try_forecast("as chosen", run, config, profile).problems


def fewest_gpus(
    run: RunShape,
    config: OffloadConfig,
    profile: HardwareProfile,
    most: int = 1024,
    *,
    keeps_batch: bool = False,
) -> RunShape | None:
    """The run on the fewest GPUs on which it fits, of 1, 2, 3, 4, 6, 8, 12 and so on, or None up to `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    for count in sorted({*powers, *(3 * power for power in powers)}):
        found = first_fitting(run, count, config, profile, keeps_batch=keeps_batch) if count <= most else None
        if found is not None:
            return found
    return None


def largest_model(
    run: RunShape,
    num_gpus: int,
    config: OffloadConfig,
    profile: HardwareProfile,
    *,
    is_cut: bool = False,
    keeps_batch: bool = False,
) -> RunShape | None:
    """The run's model with as many layers as fit on `num_gpus`, or None if not even one does.

    is_cut: layout and recomputation stay as they are, with as many layers on every pipeline rank. keeps_batch: as
    `layouts` takes it.
    """
    step = run.parallel.pipeline if is_cut else 1

    def with_layers(count: int) -> RunShape | None:
        shape: GPTShape = replace(run.model, num_layers=count * step)
        wanted = replace(run, model=shape)
        if is_cut:
            return wanted if fits(wanted, config, profile) else None
        return first_fitting(wanted, num_gpus, config, profile, keeps_batch=keeps_batch)

    best, low, high = None, 0, 8
    while (found := with_layers(high)) is not None and high * step < 4096:
        best, low, high = found, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        found = with_layers(middle)
        best, low, high = (found, middle, high) if found is not None else (best, low, middle)
    return best


@dataclass(frozen=True, slots=True)
class Budget:
    """What a number of tokens costs."""

    iterations: int
    days: float
    gpu_hours: float


def token_budget(result: Forecast, num_tokens: float) -> Budget:
    """Iterations, days and GPU-hours of training on `num_tokens` tokens at the forecast's pace."""
    per_iteration = result.run.global_batch_size * result.run.seq_length
    iterations = math.ceil(num_tokens / per_iteration)
    seconds = iterations * result.iteration_seconds
    return Budget(iterations, seconds / 86400, seconds / 3600 * result.run.parallel.world_size)


def save_seconds(result: Forecast) -> float | None:
    """Seconds to write a checkpoint with all hosts at once; None when the disk's rate is not known."""
    rate = result.profile.disk_write_bytes_per_s
    if rate == 0:
        return None
    run = result.run
    num_hosts = -(-run.parallel.world_size // result.ranks_per_host)
    return run.model.num_params * (run.param_bytes + STATE_BYTES_PER_PARAM) / rate / num_hosts
