"""The `plan` command: a run's forecast, its alternatives, and the command to paste. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deep_offload.cli_command import PLACEHOLDERS, command
from deep_offload.cli_request import Request
from deep_offload.model.choose import is_share_free
from deep_offload.model.dry_run import (
    Forecast,
    dry_run_report,
    forecast,
    milliseconds,
    unknown_limits,
    weights_problem,
)
from deep_offload.model.memory import format_bytes
from deep_offload.model.planning import (
    Alternative,
    alternatives,
    faster_cut,
    fewest_gpus,
    first_fitting,
    fits,
    fits_as_chosen,
    largest_model,
    leanest,
    other_cuts,
    save_seconds,
    token_budget,
)
from deep_offload.model.run import RunShape


def answer(request: Request) -> tuple[list[str], bool]:
    """Lines to print, and whether the run fits as far as limits are known."""
    lines, is_fitting = _answer_largest(request) if request.largest else _answer_run(request)
    return [*request.notes, *lines], is_fitting


def _answer_run(request: Request) -> tuple[list[str], bool]:
    run = layout_of(request)
    if run is None:
        return [nothing_fits()], False
    request, note = with_room(run, request)
    report = dry_run_report(run, request.config, request.profile)
    lines = [*note, *report.lines]
    # No table where weights and gradients alone are too much for any strategy.
    if request.show_alternatives and weights_problem(run, request.profile) is None:
        lines += _compared(run, request)
    if not report.fits:
        return lines + _what_would_fit(run, request), False
    result = forecast(run, request.config, request.profile)
    lines += costs(result, request.tokens)
    return [*lines, "", *_to_train(result, request)], True


def with_room(run: RunShape, request: Request) -> tuple[Request, list[str]]:
    """The request with a GPU share that fits, and a line that says so, where the one that training chooses does not."""
    config, profile = request.config, request.profile
    if not is_share_free(config) or fits_as_chosen(run, config, profile):
        return request, []
    lean = leanest(run, config, profile)
    if lean is None:
        return request, []
    share = f"{lean.offload_gpu_share:g}"
    note = f"planned with --offload-gpu-share {share}: it does not fit with the share that auto chooses"
    return replace(request, config=lean), [note]


def nothing_fits() -> str:
    """Where no number of GPUs helps."""
    return "does not fit on up to 1024 GPUs: use GPUs or hosts with more memory, or a smaller model"


def _compared(run: RunShape, request: Request) -> list[str]:
    """Tables of strategies and of other cuts, and what they show."""
    config, profile = request.config, request.profile
    found = alternatives(run, config, profile)
    lines = ["", "strategies on the same run:", *_alternatives_table(found)]
    is_known = "GPU memory" not in unknown_limits(profile)
    if found[-1].result is not None and not found[-1].problems and is_known:
        lines.append("no offload needed: all state fits on the GPUs, and no strategy is faster")
    cuts = other_cuts(run, config, profile)
    lines += [
        "",
        "cut otherwise, with the same global batch, on twice the GPUs with twice the batch:",
        *_alternatives_table(cuts),
    ]
    chosen = found[0].result
    faster = faster_cut(chosen, cuts) if chosen is not None and not found[0].problems else None
    if faster is not None:
        lines.append(_advice(chosen, faster))
    return lines


def _advice(chosen: Forecast, faster: Alternative) -> str:
    """The faster cut, with all flags that make it: what is given is no longer chosen."""
    run, cut = faster.result.run, faster.result.run.parallel
    text = (
        f"faster than the planned layout with the same batch: {faster.name}, "
        f"{faster.result.tokens_per_s_per_gpu:.0f} instead of {chosen.tokens_per_s_per_gpu:.0f} tokens/s/GPU"
    )
    if cut.tensor > chosen.run.parallel.tensor:
        text += ", but communication inside its layers (tensor parallel) is not counted: measure both"
    return (
        f"{text} (--gpus {cut.world_size} --tensor-model-parallel-size {cut.tensor} --pipeline-model-parallel-size "
        f"{cut.pipeline} --global-batch-size {run.global_batch_size} --recompute {run.recompute.granularity or 'none'})"
    )


def layout_of(request: Request) -> RunShape | None:
    """The run as asked, or cut so that it fits where the layout is ours to choose."""
    run, config, profile = request.run, request.config, request.profile
    if request.gpus is None:
        return fewest_gpus(run, config, profile, keeps_batch=request.is_batch_given)
    if request.is_cut or request.is_recompute_given or fits(run, config, profile):
        return run
    return first_fitting(run, request.gpus, config, profile, keeps_batch=request.is_batch_given) or run


def _answer_largest(request: Request) -> tuple[list[str], bool]:
    if request.gpus is None:
        raise ValueError("--largest asks what fits on given GPUs: give --gpus a number")
    is_cut = request.is_cut or request.is_recompute_given
    given = request.run, request.gpus, request.config, request.profile
    run = largest_model(*given, is_cut=is_cut, keeps_batch=request.is_batch_given)
    if run is None:
        advice = "drop the parallel sizes and --recompute, or narrow the model" if is_cut else "narrow the model"
        return [f"not even one layer a pipeline rank of this shape fits on {request.gpus} GPUs: {advice}"], False
    head = f"largest model of this width on {request.gpus} GPU(s) of {request.profile.name}: "
    head += f"{run.model.num_layers} layers, {run.model.num_params / 1e9:.2f} B parameters"
    config = leanest(run, request.config, request.profile)
    assert config is not None
    report, result = dry_run_report(run, config, request.profile), forecast(run, config, request.profile)
    to_train = _to_train(result, replace(request, config=config))
    return [head, *report.lines, *costs(result, request.tokens), "", *to_train], report.fits


def _what_would_fit(run: RunShape, request: Request) -> list[str]:
    keeps_batch = request.is_batch_given
    other = first_fitting(run, run.parallel.world_size, request.config, request.profile, keeps_batch=keeps_batch)
    if other is None:
        other = fewest_gpus(run, request.config, request.profile, keeps_batch=keeps_batch)
    if other is None:
        return [nothing_fits()]
    p = other.parallel
    recompute = " with full recomputation" if other.recompute.granularity == "full" else ""
    return [
        f"it would fit on {p.world_size} GPU(s) as tensor {p.tensor} x pipeline {p.pipeline} x data {p.data}{recompute}"
    ]


def _alternatives_table(found: Sequence[Alternative]) -> list[str]:
    rows = [("strategy", "GPU/rank", "host/rank", "update", "iteration", "batch", "tokens/s/GPU", "")]
    for item in found:
        if item.result is None:
            rows.append((item.name, *["-"] * 6, _short(item.problems)))
            continue
        slowest = item.result.slowest
        rows.append(
            (
                item.name,
                format_bytes(max(s.gpu_bytes for s in item.result.stages)),
                format_bytes(max(s.total_host_bytes for s in item.result.stages)),
                f"{milliseconds(slowest.choice.predicted_update_seconds)} ms",
                f"{milliseconds(item.result.iteration_seconds)} ms",
                str(item.result.run.global_batch_size),
                f"{item.result.tokens_per_s_per_gpu:.0f}",
                _short(item.problems) if item.problems else f"bound by {slowest.choice.binding_lane}",
            )
        )
    return table(rows)


def _short(problems: Sequence[str]) -> str:
    """All problems with their bytes, without the advice."""
    return f"does not fit: {'; '.join(problem.partition(': ')[0] for problem in problems)}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, numbers to the right, the last as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def costs(result: Forecast, tokens: float | None) -> list[str]:
    """What a number of tokens and a checkpoint take."""
    lines = []
    if tokens is not None:
        budget = token_budget(result, tokens)
        lines.append(
            f"{tokens:.3g} tokens: {budget.iterations} iterations, {budget.days:.1f} days, "
            f"{budget.gpu_hours:.0f} GPU-hours"
        )
    seconds = save_seconds(result)
    if seconds is None:
        lines.append(f"checkpoint time unknown: hardware profile {result.profile.name} has no disk speed")
    else:
        lines.append(f"one checkpoint: {seconds:.0f} s of writing")
    return lines


def _to_train(result: Forecast, request: Request) -> list[str]:
    text = command(result, request.config, request.tokens)
    open_words = [word for word in PLACEHOLDERS if f" {word}" in text]
    return [f"to train it, with {', '.join(open_words)} filled in:", text]
