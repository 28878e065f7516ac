"""`python -m deep_offload report RUN_DIR`: one HTML file about a run. It loads nothing, from no network."""

from __future__ import annotations

import importlib
import json
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from deep_offload.model.memory import format_bytes
from deep_offload.report_page import PAGE, STYLE
from deep_offload.report_run import Event, RunData, read_run

_LOSS = "lm loss"
_PASSES = "forward-backward"


def write_report(folder: Path, output: Path) -> Path:
    """Make the page of the run in `folder`. Raises ValueError, one sentence, without a run or without matplotlib."""
    run = read_run(folder)
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError("a report needs matplotlib, which is not installed: pip install matplotlib") from error
    html = report_html(run)
    try:
        output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{output} cannot be written ({error.strerror}): give another file as --output") from error
    return output


def report_html(run: RunData) -> str:
    """The whole page."""
    sections = [
        _tiles(run),
        _section("Training", _figures(_training_charts(run)) or _nothing("no step was logged")),
        _section("Where the time went", _figures(_time_charts(run)) or _nothing("no step was logged")),
        _section("Lanes of the last steps", _lanes(run)),
        _section("Predicted and measured", _predictions(run)),
        _section("Memory", _figures(_memory_charts(run)) + _state_bytes(run)),
        _section("Placement", _placement(run)),
        _section("Warnings and notes", _notes(run)),
        _section("Evaluations and checkpoints", _evaluations(run) + _checkpoints(run)),
        _section("Command", f"<pre>{escape(run.start['command'])}</pre>"),
        _section("Environment", _environment(run.start["environment"])),
        _section("Settings", _settings(run.start["config"])),
    ]
    started = datetime.fromtimestamp(run.of_kind("start")[0]["time"]).strftime("%Y-%m-%d %H:%M")
    return PAGE.format(
        style=STYLE, title=escape(_title(run)), status=escape(run.status), started=started, body="\n".join(sections)
    )


# -- pieces of HTML -------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _nothing(why: str) -> str:
    return f'<p class="quiet">{escape(why)}</p>'


def _figures(charts: dict[str, str]) -> str:
    if not charts:
        return ""
    figures = [
        f'<figure role="img" aria-label="{escape(title, quote=True)}"><figcaption>{escape(title)}</figcaption>'
        f"{svg}</figure>"
        for title, svg in charts.items()
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _title(run: RunData) -> str:
    model = run.start["config"].get("model", {})
    if "num_layers" not in model:
        return "Training run"
    return (
        f"GPT, {model['num_layers']} layers, hidden {model.get('hidden_size', '?')}, {run.start['world_size']} rank(s)"
    )


def _tiles(run: RunData) -> str:
    steps = run.steps
    if not steps:
        return ""
    last, seconds = steps[-1], median(_settled(steps, "seconds"))
    tiles = [
        ("iteration", f"{last['iteration']} of {run.start['num_iterations']}"),
        ("median time of an iteration", f"{1e3 * seconds:.1f} ms"),
    ]
    if _LOSS in last["losses"]:
        tiles.insert(1, ("last loss", f"{last['losses'][_LOSS]:.4f}"))
    updates = _updates(steps)
    if updates:
        tiles.append(("median time of an update", f"{1e3 * median(u['seconds'] for u in updates):.1f} ms"))
        tiles.append(
            ("of its bound", f"{100 * median(u['share_of_bound'] for u in updates):.0f} %, {updates[-1]['lane']}")
        )
    skipped = sum(step["skipped"] for step in steps)
    if skipped:
        tiles.append(("skipped iterations", str(skipped)))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{items}</dl>'


def _settled(steps: list[Event], name: str) -> list[float]:
    """Values without the first logged step, which compiles and warms up."""
    return [step[name] for step in (steps[1:] or steps)]


def _updates(steps: list[Event]) -> list[dict[str, Any]]:
    return [step["update"] for step in steps if step.get("update")]


# -- charts ---------------------------------------------------------------------------------------------------------


def _training_charts(run: RunData) -> dict[str, str]:
    from deep_offload.report_charts import Line, line_chart  # heavy: matplotlib

    steps = run.steps
    if not steps:
        return {}
    xs = [step["iteration"] for step in steps]
    losses = [Line(name, xs, [s["losses"].get(name) for s in steps]) for name in steps[-1]["losses"]]
    evaluations = run.evaluations("validation")
    if evaluations:
        at = [e["iteration"] for e in evaluations]
        losses.append(Line("validation", at, [e["losses"].get(_LOSS) for e in evaluations], True))
    charts = {}
    if losses:
        charts["Loss"] = line_chart("loss", losses, "loss")
    charts["Learning rate"] = line_chart("rate", [Line("rate", xs, [s["learning_rate"] for s in steps])], "rate")
    charts["Gradient norm before clipping"] = line_chart(
        "norm", [Line("norm", xs, [s["grad_norm"] for s in steps])], "norm"
    )
    return charts


def _busy_shares(steps: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(iteration, percent) by lane, of the steps that name it: older runs do not name host memory."""
    lanes: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for lane, share in step["update"]["busy"].items():
            lanes.setdefault(lane, []).append((step["iteration"], 100 * share))
    return lanes


def _time_charts(run: RunData) -> dict[str, str]:
    from deep_offload.report_charts import Line, line_chart, stacked_chart

    steps = run.steps[1:] or run.steps
    if not steps:
        return {}
    xs = [step["iteration"] for step in steps]
    held = run.placed_at
    # Runs of before do not say where they waited.
    is_inside = [held[x].get("waits_in_passes", False) for x in xs]
    charts = {"An iteration, in parts": stacked_chart("parts", xs, _parts(steps, is_inside), "ms")}
    with_update = [step for step in steps if step.get("update")]
    if with_update:
        at = [step["iteration"] for step in with_update]
        busy = [
            Line(lane, [x for x, _ in known], [share for _, share in known])
            for lane, known in _busy_shares(with_update).items()
        ]
        charts["Busy share of each lane and of host memory (dram) during the update"] = line_chart(
            "busy", busy, "%", from_zero=True
        )
        updates = [step["update"] for step in with_update]
        measured = Line("measured", at, [1e3 * u.get("in_place_seconds", u["seconds"]) for u in updates])
        lines = [measured]
        predicted = [(x, 1e3 * held[x]["predicted"]["update_seconds"]) for x in at if held[x].get("predicted")]
        if predicted:
            lines.append(Line("predicted", [x for x, _ in predicted], [y for _, y in predicted], is_predicted=True))
        charts["The update, until parameters are in place"] = line_chart("update", lines, "ms", from_zero=True)
    return charts


def _parts(steps: list[Event], is_inside: list[bool]) -> dict[str, list[float]]:
    """Milliseconds of an iteration that add up to it, from the timers where there were any.

    is_inside: whether a step waited for the update in its forward passes, whose timer then counts the wait as well.
    """
    wait = [1e3 * min(step["wait_seconds"], step["seconds"]) for step in steps]
    names = [name for name in (_PASSES, "optimizer") if all(name in step["times"] for step in steps)]
    parts = {name: [1e3 * step["times"][name] for step in steps] for name in names}
    for i, inside in enumerate(is_inside if _PASSES in parts else []):
        if inside:
            # At most the passes: their time is the mean of an interval's iterations, the wait is its last one's.
            wait[i] = min(wait[i], parts[_PASSES][i])
            parts[_PASSES][i] -= wait[i]
    parts["waiting for the update"] = wait
    rest = [
        max(0.0, 1e3 * step["seconds"] - sum(values[i] for values in parts.values())) for i, step in enumerate(steps)
    ]
    return {**parts, ("everything else" if names else "compute and everything else"): rest}


def _lanes(run: RunData) -> str:
    from deep_offload.report_charts import KINDS, LOOP, lanes_chart

    lanes = {name: timeline for name, timeline in run.lanes.items() if timeline.spans}
    if not lanes:
        return _nothing("the run wrote no trace: it did not end, or nothing is offloaded")
    names = [*KINDS.values(), *LOOP.values()]
    keys = "".join(f'<li><i style="background:var(--s{i})"></i>{escape(name)}</li>' for name, i in names)
    keys += '<li><i style="background:var(--ink)"></i>the loop waits</li>'
    label = "Lanes over time, measured and predicted"
    figure = f'<figure role="img" aria-label="{label}">{lanes_chart("lanes", lanes)}</figure>'
    return f'<ul class="keys">{keys}</ul><div class="wide lanes">{figure}</div>'


def _memory_charts(run: RunData) -> dict[str, str]:
    from deep_offload.report_charts import Line, line_chart

    steps, held = run.steps, dict(sorted(run.placed_at.items()))
    names = {"host_peak": "host, peak of the process", "device": "device", "device_peak": "device, peak"}
    found = [name for name in names if steps and all(name in step["memory"] for step in steps)]
    if not found:
        return {}
    xs = [step["iteration"] for step in steps]
    lines = [Line(names[name], xs, [step["memory"][name] / 2**30 for step in steps]) for name in found]
    planned = {"host": "host, planned state"} | ({"device_total": "device, planned peak"} if "device" in found else {})
    for name, title in planned.items():
        # Runs of before have no such bytes.
        known = [(x, placed["planned_bytes"][name]) for x, placed in held.items() if "planned_bytes" in placed]
        if known:
            lines.append(Line(title, [x for x, _ in known], [num / 2**30 for _, num in known], is_predicted=True))
    return {"Memory of the rank that logs": line_chart("memory", lines, "GiB", from_zero=True)}


# -- tables ---------------------------------------------------------------------------------------------------------


def _predictions(run: RunData) -> str:
    predicted, updates = run.placed["predicted"], _updates(run.placed_steps)
    rows = _update_rows(predicted, updates) if predicted and updates else []
    rows += [*_iteration_rows(run), *_byte_rows(run)]
    if predicted and not updates:
        why = "no update was measured"
    elif predicted:
        attributed = median(u["attributed"] for u in updates)
        why = (
            f"Times are medians. Rates of {predicted['profile']} ({predicted['profile_source']}). "
            f"Of the measured update {100 * attributed:.1f} % has at least one lane at work."
        )
    else:
        why = "nothing is offloaded, so " + ("no time was predicted" if rows else "nothing was predicted")
    if not rows:
        return _nothing(why)
    return _table(["", "predicted", "measured", "off by"], rows) + _nothing(why)


def _update_rows(predicted: dict[str, Any], updates: list[dict[str, Any]]) -> list[list[str]]:
    # Runs of before had no time of their own for parameters in place.
    measured = median(u.get("in_place_seconds", u["seconds"]) for u in updates)
    whole = median(u["seconds"] for u in updates)
    return [
        _time_row("update, until parameters are in place", predicted["update_seconds"], measured),
        ["update, until the last flush", "", f"{1e3 * whole:.1f} ms", ""],
        ["lane that binds", predicted["binding_lane"], updates[-1]["lane"], ""],
    ]


def _iteration_rows(run: RunData) -> list[list[str]]:
    """Without the first logged step; runs of before have no prediction."""
    seconds = (run.placed["predicted"] or {}).get("iteration_seconds")
    if seconds is None or not run.placed_steps:
        return []
    return [_time_row("iteration", seconds, median(_settled(run.placed_steps, "seconds")))]


def _byte_rows(run: RunData) -> list[list[str]]:
    """Runs of before have no planned bytes."""
    planned, state, steps = run.placed.get("planned_bytes"), run.placed["state_bytes"], run.placed_steps
    if planned is None or not steps:
        return []
    memory = steps[-1]["memory"]
    rows = []
    if "device_peak" in memory:
        rows.append(_bytes_row("GPU memory, peak", planned["device_total"], memory["device_peak"]))
    rows.append(_bytes_row("optimizer state on the device", planned["device"], state["device"]))
    rows.append(_bytes_row("optimizer state on the host", planned["host"], state["host"]))
    return [*rows, ["host memory of the process, peak", "", format_bytes(memory["host_peak"]), ""]]


def _time_row(name: str, predicted: float, measured: float) -> list[str]:
    return [name, f"{1e3 * predicted:.1f} ms", f"{1e3 * measured:.1f} ms", _error(predicted, measured)]


def _bytes_row(name: str, predicted: int, measured: int) -> list[str]:
    return [name, format_bytes(predicted), format_bytes(measured), _error(predicted, measured)]


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""


def _state_bytes(run: RunData) -> str:
    state = run.placed["state_bytes"]
    return _nothing(
        f"Optimizer state of the rank: {format_bytes(state['host'])} on the host, {format_bytes(state['device'])} on "
        "the device."
    )


def _placement(run: RunData) -> str:
    """The lines of each start and change: a resumed run may be placed otherwise, and more may stay on the GPU later."""
    parts, before = [], None
    for event in run.events:
        if event["event"] in ("start", "placement") and event["placement"] != before:
            when = datetime.fromtimestamp(event["time"]).strftime("%Y-%m-%d %H:%M:%S")
            lines = "".join(f"<li>{escape(line)}</li>" for line in event["placement"])
            parts.append(f"<h3>from {when}</h3><ul>{lines}</ul>")
            before = event["placement"]
    return "".join(parts)


def _notes(run: RunData) -> str:
    texts = list(dict.fromkeys(event["text"] for event in run.of_kind("note")))
    if run.num_broken:
        texts.append(f"{run.num_broken} lines of run.jsonl could not be read")
    bad = [step["iteration"] for step in run.steps if step["skipped"] or step["nan"]]
    if bad:
        texts.append(f"iterations were skipped or not finite up to iteration {', '.join(map(str, bad[:20]))}")
    if not texts:
        return _nothing("none")
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _evaluations(run: RunData) -> str:
    rows = [
        [str(e["iteration"]), e["split"], ", ".join(f"{name} {value:.4f}" for name, value in e["losses"].items())]
        for e in run.of_kind("evaluation")
    ]
    return _table(["iteration", "split", "loss"], rows[-50:]) if rows else _nothing("no evaluation")


def _checkpoints(run: RunData) -> str:
    rows = [[str(e["iteration"]), f"{e['seconds']:.2f} s"] for e in run.of_kind("checkpoint")]
    return (
        _table(["checkpoint of iteration", "training stood still for"], rows[-50:])
        if rows
        else _nothing("no checkpoint")
    )


def _environment(environment: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for name, value in environment.items():
        if isinstance(value, dict):
            rows += [[key, str(text)] for key, text in value.items()]
        elif value is not None:
            rows.append([name, str(value)])
    return _table(["", ""], rows)


def _settings(config: dict[str, Any]) -> str:
    parts = []
    for section, values in config.items():
        rows = [[name, json.dumps(value)] for name, value in values.items()]
        parts.append(f"<details><summary>{escape(section)}</summary>{_table(['setting', 'value'], rows)}</details>")
    return "".join(parts)
