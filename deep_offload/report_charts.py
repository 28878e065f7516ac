"""Charts of a report as inline SVG, drawn by matplotlib. Colors are CSS variables, so that light and dark both work."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deep_offload.plan.ops import Lane, OpKind
from deep_offload.plan.timeline import BACKWARD, FORWARD, Timeline
from deep_offload.report_run import averaged, thinned

# Colors that nothing else in a figure has; in the SVG each becomes a variable of the page.
_INK, _GRID = "#0000e0", "#0000e1"
_SERIES = tuple(f"#0000f{i}" for i in range(8))
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--line)"} | {c: f"var(--s{i})" for i, c in enumerate(_SERIES)}

KINDS = {
    OpKind.UPDATE_CPU: ("update on CPU", 0),
    OpKind.UPDATE_GPU: ("update on GPU", 1),
    OpKind.PREFETCH: ("state up", 2),
    OpKind.FLUSH: ("state down", 3),
    OpKind.GRAD_FLUSH: ("gradients down", 4),
    OpKind.PARAM_H2D: ("weights up", 5),
}
"""Names and colors of what the lanes do."""

LOOP = {FORWARD: ("forward", 6), BACKWARD: ("backward", 7)}
"""The same of the training loop. Simulated, its passes are the operations below."""
_LOOP_OPS = {OpKind.PARAMS_NEEDED: FORWARD, OpKind.GRADS_READY: BACKWARD}

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. Points that are not finite are left out; markers show each point; predictions are dashed."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    has_markers: bool = False
    is_predicted: bool = False


def line_chart(name: str, lines: Sequence[Line], y_label: str, *, from_zero: bool = False) -> str:
    """SVG of curves over iterations. name: unique in the page."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.8, 2.9))
        axes = figure.add_subplot()
        for i, line in enumerate(lines):
            points = [(x, y) for x, y in zip(line.xs, line.ys) if y is not None and math.isfinite(y)]
            xs, ys = thinned([x for x, _ in points], [y for _, y in points])
            marker = "o" if line.has_markers or len(xs) == 1 else ""
            style = "--" if line.is_predicted else "-"
            color = _SERIES[i % len(_SERIES)]
            axes.plot(xs, ys, style, color=color, label=line.name, marker=marker, markersize=3.5)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(y_label)
        if from_zero:
            axes.set_ylim(bottom=0)
        if len(lines) > 1:
            _legend(figure)
        return _svg(figure, name)


def stacked_chart(name: str, xs: Sequence[float], parts: dict[str, Sequence[float]], y_label: str) -> str:
    """SVG of parts that add up, over iterations."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.8, 2.9))
        axes = figure.add_subplot()
        heights = [averaged(values) for values in parts.values()]
        axes.stackplot(averaged(xs), *heights, labels=list(parts), colors=_SERIES[: len(parts)], step="mid")
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        _legend(figure)
        return _svg(figure, name)


def _legend(figure: Figure) -> None:
    """Below the chart, where it hides no line."""
    figure.legend(loc="outside lower left", ncols=2)
    figure.set_figheight(3.4)


def lanes_chart(name: str, lanes: dict[str, Timeline]) -> str:
    """SVG of every lane of every timeline over milliseconds, measured and predicted below each other."""
    work = [lane for lane in Lane if lane is not Lane.MAIN]
    with matplotlib.rc_context({**_STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(9.6, 1.1 + 1.25 * len(lanes)))
        all_axes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (title, timeline) in zip(all_axes, lanes.items()):
            axes.set_title(title, loc="left", fontsize=10)
            rows = [*work, Lane.MAIN]
            for row, lane in enumerate(rows):
                _bars(axes, row, timeline, lane)
            axes.set_yticks(range(len(rows)), [lane.value for lane in work] + ["loop"])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            for span in timeline.spans:
                if span.op.kind is OpKind.NORM_READY:
                    axes.axvline(1e3 * span.end, color=_INK, linewidth=0.8, linestyle="--")
        first, last = _extent(next(iter(lanes.values())))
        ends = [_extent(timeline)[1] for timeline in lanes.values()]
        # Where a prediction is far off, it is cut rather than what was measured squeezed.
        all_axes[-1].set_xlim(first, min(max(ends), last + 0.5 * (last - first)))
        all_axes[-1].set_xlabel("ms; dashed: the gradient norm is known and the update starts")
        return _svg(figure, name)


def _extent(timeline: Timeline) -> tuple[float, float]:
    """Milliseconds of the first start and the last end."""
    parts = (*timeline.spans, *timeline.phases)
    return 1e3 * min(part.start for part in parts), 1e3 * max(part.end for part in parts)


def _bars(axes, row: int, timeline: Timeline, lane: Lane) -> None:  # noqa: ANN001 - matplotlib has no public type
    by_color: dict[str, list[tuple[float, float]]] = {}

    def add(color: str, start: float, seconds: float) -> None:
        if seconds > 0:
            by_color.setdefault(color, []).append((1e3 * start, 1e3 * seconds))

    if lane is Lane.MAIN:
        for phase in timeline.phases:
            if phase.kind in LOOP:
                add(_SERIES[LOOP[phase.kind][1]], phase.start, phase.seconds)
        for span in timeline.lane(lane):
            if span.op.kind in _LOOP_OPS:
                add(_SERIES[LOOP[_LOOP_OPS[span.op.kind]][1]], span.start, span.seconds)
        for span in timeline.lane(lane):  # last, since it is drawn over the pass that waits
            add(_INK, span.start - span.waited, span.waited)
    else:
        for span in timeline.lane(lane):
            add(_SERIES[KINDS[span.op.kind][1]], span.start, span.seconds)
    for color, bars in by_color.items():
        axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=color, linewidth=0)


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element of an HTML page: no header, no fixed size, ids that are the page's only ones."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', text)
    text = re.sub(r'(url\(|xlink:href=")#', rf"\1#{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text
