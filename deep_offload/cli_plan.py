"""The `plan` command: a run's forecast, its alternatives, and the command to paste. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import FEW_SLOTS, MANY_SLOTS
from deep_offload.model.dry_run import Forecast, dry_run_report, forecast
from deep_offload.model.gpt import GPTShape, ParallelShape, named_shape, padded_to
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.memory import format_bytes
from deep_offload.model.planning import (
    Alternative,
    alternatives,
    fewest_gpus,
    first_fitting,
    fits,
    largest_model,
    other_cuts,
    save_seconds,
    token_budget,
)
from deep_offload.model.run import RecomputeShape, RunShape
from deep_offload.plan.ops import Place

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked. gpus None: the fewest that fit. is_cut: the parallel layout is given, not to be chosen."""

    run: RunShape
    config: OffloadConfig
    profile: HardwareProfile
    gpus: int | None
    is_cut: bool
    is_recompute_given: bool
    tokens: float | None
    largest: bool
    show_alternatives: bool


def request_from(arguments: argparse.Namespace, config: OffloadConfig, profile: HardwareProfile) -> Request:
    """Check the command line. Raises ValueError, one sentence, for what cannot be."""
    gpus = _gpus(arguments.gpus)
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    is_cut = tensor is not None or pipeline is not None
    tensor, pipeline = tensor or 1, pipeline or 1
    if gpus is None and is_cut:
        raise ValueError("--gpus auto chooses the parallel layout: drop the parallel sizes or give --gpus a number")
    if gpus is not None and gpus % (tensor * pipeline):
        raise ValueError(
            f"--gpus {gpus} is not a multiple of tensor {tensor} times pipeline {pipeline}: change one of them"
        )
    parallel = ParallelShape(tensor=tensor, pipeline=pipeline, data=(gpus or 1) // (tensor * pipeline))
    shape = padded_to(_shape(arguments), tensor)
    parallel.check(shape)
    step = arguments.micro_batch_size * parallel.data
    run = RunShape(
        model=shape,
        parallel=parallel,
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        global_batch_size=arguments.global_batch_size or step,
        grad_bytes=2 if arguments.grad_buffer == "bf16" else 4,
        overlap_grad_reduce=True,
        recompute=_recompute(arguments.recompute),
    )
    if arguments.tokens is not None and not arguments.tokens > 0:
        raise ValueError(f"--tokens is {arguments.tokens}, it must be more than 0")
    return Request(
        run,
        config,
        profile,
        gpus,
        is_cut,
        arguments.recompute is not None,
        arguments.tokens,
        arguments.largest,
        not arguments.no_alternatives,
    )


def _gpus(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--gpus is {text!r}, allowed are auto and whole numbers from 1")
    return int(text)


def _recompute(name: str | None) -> RecomputeShape:
    if name == "full":
        return RecomputeShape(granularity="full", method="uniform")
    return RecomputeShape(granularity="selective") if name == "selective" else RecomputeShape()


def _shape(arguments: argparse.Namespace) -> GPTShape:
    given = [name for name in _SIZES if getattr(arguments, name) is not None]
    if arguments.model is not None:
        shape = named_shape(arguments.model)
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise ValueError(f"--model {arguments.model} already sets {flag}: give one of them")
        return shape
    missing = ["--" + name.replace("_", "-") for name in _SIZES if name not in given]
    if missing:
        raise ValueError(f"the model's shape is incomplete: give --model, or also {', '.join(missing)}")
    heads, hidden = arguments.num_attention_heads, arguments.hidden_size
    if arguments.kv_channels is None and (heads < 1 or hidden % heads):
        raise ValueError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: change one of them"
        )
    return GPTShape(
        num_layers=arguments.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=arguments.ffn_hidden_size or int(hidden * 8 / 3 / 64) * 64,
        num_attention_heads=heads,
        num_query_groups=arguments.num_query_groups or heads,
        kv_channels=arguments.kv_channels or hidden // heads,
        padded_vocab_size=arguments.vocab_size,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        tie_embeddings=arguments.tie_embeddings,
    )


def answer(request: Request) -> tuple[list[str], bool]:
    """Lines to print, and whether the run fits."""
    if request.largest:
        return _answer_largest(request)
    run = layout_of(request)
    if run is None:
        return ["does not fit on up to 1024 GPUs: use GPUs or hosts with more memory, or a smaller model"], False
    report = dry_run_report(run, request.config, request.profile)
    lines = list(report.lines)
    found = alternatives(run, request.config, request.profile) if request.show_alternatives else ()
    if found:
        lines += ["", "strategies on the same run:", *_alternatives_table(found)]
        if found[-1].result is not None and not found[-1].problem:
            lines.append("no offload needed: all state fits on the GPUs, and nothing is faster")
        cuts = other_cuts(run, request.config, request.profile)
        lines += [
            "",
            "cut otherwise, with as many micro-batches for each data-parallel rank:",
            *_alternatives_table(cuts),
        ]
    if not report.fits:
        return lines + _what_would_fit(run, request), False
    result = forecast(run, request.config, request.profile)
    lines += _costs(result, request.tokens)
    return lines + ["", "to train it:", command(result, request.config)], True


def layout_of(request: Request) -> RunShape | None:
    """The run as asked, or cut so that it fits where the layout is ours to choose."""
    run, config, profile = request.run, request.config, request.profile
    if request.gpus is None:
        return fewest_gpus(run, config, profile)
    if request.is_cut or request.is_recompute_given or fits(run, config, profile):
        return run
    return first_fitting(run, request.gpus, config, profile) or run


def _answer_largest(request: Request) -> tuple[list[str], bool]:
    if request.gpus is None:
        raise ValueError("--largest asks what fits on given GPUs: give --gpus a number")
    run = largest_model(request.run, request.gpus, request.config, request.profile)
    if run is None:
        return [f"not even one layer of this shape fits on {request.gpus} GPUs: narrow the model"], False
    head = f"largest model of this width on {request.gpus} GPU(s) of {request.profile.name}: "
    head += f"{run.model.num_layers} layers, {run.model.num_params / 1e9:.2f} B parameters"
    # With the least host memory: everything streamed.
    config = request.config
    if config.offload_gpu_share == "auto" and config.offload_stride == "auto":
        config = replace(config, offload_gpu_share=1.0)
    report = dry_run_report(run, config, request.profile)
    to_train = command(forecast(run, config, request.profile), config)
    return [head, *report.lines, "", "to train it:", to_train], report.fits


def _what_would_fit(run: RunShape, request: Request) -> list[str]:
    other = first_fitting(run, run.parallel.world_size, request.config, request.profile)
    if other is None:
        other = fewest_gpus(run, request.config, request.profile)
    if other is None:
        return ["nothing fits on up to 1024 GPUs: use GPUs or hosts with more memory, or a smaller model"]
    p = other.parallel
    recompute = " with full recomputation" if other.recompute.granularity == "full" else ""
    return [
        f"it would fit on {p.world_size} GPU(s) as tensor {p.tensor} x pipeline {p.pipeline} x data {p.data}{recompute}"
    ]


def _alternatives_table(found: Sequence[Alternative]) -> list[str]:
    rows = [("strategy", "GPU/rank", "host/rank", "update", "iteration", "")]
    for item in found:
        if item.result is None:
            rows.append((item.name, "-", "-", "-", "-", _short(item.problem)))
            continue
        slowest = item.result.slowest
        rows.append(
            (
                item.name,
                format_bytes(max(s.gpu_bytes for s in item.result.stages)),
                format_bytes(max(s.host_bytes for s in item.result.stages)),
                f"{1e3 * slowest.choice.predicted_update_seconds:.0f} ms",
                f"{1e3 * item.result.iteration_seconds:.0f} ms",
                _short(item.problem) if item.problem else f"bound by {slowest.choice.binding_lane}",
            )
        )
    return table(rows)


def _short(problem: str) -> str:
    memory = "host" if "of host memory" in problem else "GPU"
    return f"does not fit in {memory} memory" if "need" in problem or "exceed" in problem else problem


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, numbers to the right, the last as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def _costs(result: Forecast, tokens: float | None) -> list[str]:
    lines = []
    if tokens is not None:
        budget = token_budget(result, tokens)
        lines.append(
            f"{tokens:.3g} tokens: {budget.iterations} iterations, {budget.days:.1f} days, "
            f"{budget.gpu_hours:.0f} GPU-hours"
        )
    seconds = save_seconds(result)
    if seconds is not None:
        lines.append(f"one checkpoint: {seconds:.0f} s of writing")
    return lines


def command(result: Forecast, config: OffloadConfig) -> str:
    """A command that starts the run (on each host), but for data and learning rate."""
    run = result.run
    shape, parallel = run.model, run.parallel
    per_host = result.ranks_per_host
    nodes = -(-parallel.world_size // per_host)
    launcher = f"torchrun --nproc-per-node {per_host}" + (f" --nnodes {nodes}" if nodes > 1 else "")
    words = [
        ("python" if parallel.world_size == 1 else launcher) + " pretrain_gpt.py",
        f"--num-layers {shape.num_layers} --hidden-size {shape.hidden_size} --ffn-hidden-size {shape.ffn_hidden_size}",
        f"--num-attention-heads {shape.num_attention_heads} --kv-channels {shape.kv_channels}",
    ]
    if shape.num_query_groups != shape.num_attention_heads:
        words.append(f"--group-query-attention --num-query-groups {shape.num_query_groups}")
    words += ["--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"]
    words += [] if shape.tie_embeddings else ["--untie-embeddings-and-output-weights"]
    words += [
        f"--tensor-model-parallel-size {parallel.tensor} --pipeline-model-parallel-size {parallel.pipeline}",
        f"--seq-length {run.seq_length} --micro-batch-size {run.micro_batch_size} "
        f"--global-batch-size {run.global_batch_size}",
        "--bf16" + (" --grad-reduce-in-bf16" if run.grad_bytes == 2 else ""),
        "--use-distributed-optimizer --overlap-grad-reduce",
    ]
    if run.recompute.granularity == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif run.recompute.granularity == "selective":
        words.append("--recompute-granularity selective")
    words.append(" ".join(["--interleaved-offload", *_changed_flags(_with_chosen_slots(config, result))]))
    return " \\\n  ".join(words)


def _with_chosen_slots(config: OffloadConfig, result: Forecast) -> OffloadConfig:
    """Where the number of slots was open, the chosen one, for all stages the smallest.

    Training would choose anew and knows less: neither its activations nor its compute before the first step.
    """
    if config.offload_num_slots != "auto" or config.offload_resident_fraction != 0:
        return config
    choices = [stage.choice for stage in result.stages]
    chosen = [choice.num_slots for choice in choices if choice.placement.count(Place.GPU) > FEW_SLOTS]
    if not chosen:
        return config
    return replace(config, offload_num_slots=MANY_SLOTS if min(chosen) > FEW_SLOTS else FEW_SLOTS)


def _changed_flags(config: OffloadConfig) -> list[str]:
    default = OffloadConfig(interleaved_offload=True)
    names = [name for name in OffloadConfig.__dataclass_fields__ if name.startswith("offload_")]
    changed = [name for name in names if getattr(config, name) != getattr(default, name)]
    return [f"--{name.replace('_', '-')} {getattr(config, name)}" for name in changed]
