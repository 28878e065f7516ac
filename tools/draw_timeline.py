"""Draw a step's lanes from a trace of --offload-trace: `python tools/draw_timeline.py trace.json --output step.png`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deep_offload.plan.draw import read_trace  # noqa: E402 - the path must be set first
from deep_offload.plan.ops import Lane, OpKind  # noqa: E402
from deep_offload.plan.timeline import Timeline  # noqa: E402

LANE_TITLES = {
    Lane.MAIN: "loop",
    Lane.GPU: "GPU",
    Lane.CPU: "CPU",
    Lane.H2D: "host to device",
    Lane.D2H: "device to host",
}
WORK = {
    OpKind.UPDATE_CPU: ("#d1495b", "update on the CPU"),
    OpKind.UPDATE_GPU: ("#2e8b57", "update on the GPU"),
    OpKind.PREFETCH: ("#7fb3d5", "state up"),
    OpKind.FLUSH: ("#f0b67f", "state down"),
    OpKind.GRAD_FLUSH: ("#b7a6cf", "gradients down"),
    OpKind.PARAM_H2D: ("#1f6fb4", "parameters up"),
}
# What the loop tells or asks: no work of its own, drawn as ticks.
MOMENT_COLOR, MOMENT_TITLE = "#9a9a9a", "ready or needed"
INK = "#333333"


def read_timeline(path: Path) -> Timeline:
    """Return the first timeline of a trace file. Raises ValueError, one sentence, for another kind of file."""
    try:
        timelines = read_trace(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give the file that --offload-trace wrote") from error
    found = next((timeline for timeline in timelines.values() if timeline.spans), None)
    if found is None:
        raise ValueError(f"{path} holds no operations: give the file that --offload-trace wrote after a step")
    return found


def draw_timeline(timeline: Timeline, output: Path, title: str = "") -> None:
    """Write a PNG: the whole iteration, and below it the update phase; one row for each lane, times from the start."""
    import matplotlib  # optional and slow to import: only where something is drawn

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    figure, (whole, update) = pyplot.subplots(2, 1, figsize=(10, 7), dpi=150)
    _draw_lanes(whole, timeline, *whole_window(timeline))
    whole.set_title(title or "One iteration", color=INK, fontsize=11, loc="left")
    _draw_lanes(update, timeline, *update_window(timeline))
    update.set_title("The update, from the norm on (numbers are subgroups)", color=INK, fontsize=10, loc="left")
    present = {span.op.kind for span in timeline.spans}
    marks = [patches.Patch(color=color, label=text) for kind, (color, text) in WORK.items() if kind in present]
    if not present <= set(WORK):
        marks.append(patches.Patch(color=MOMENT_COLOR, label=MOMENT_TITLE))
    figure.legend(handles=marks, loc="lower center", ncols=len(marks), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def whole_window(timeline: Timeline) -> tuple[float, float]:
    """Return the first start and the last end, seconds."""
    return min(span.start for span in timeline.spans), max(span.end for span in timeline.spans)


def update_window(timeline: Timeline) -> tuple[float, float]:
    """Return the seconds from the norm to the last work after it; the whole where there is no norm or no such work."""
    norm = timeline.start_of(OpKind.NORM_READY)
    ends = [span.end for span in timeline.update_spans]
    return whole_window(timeline) if norm is None or not ends else (norm, max(ends))


def _draw_lanes(axes: Axes, timeline: Timeline, start: float, end: float) -> None:
    """Draw what lies between two times; even the shortest work is wide enough to be seen."""
    origin, seconds = whole_window(timeline)[0], max(end - start, 1e-9)
    thinnest = 0.002 * seconds
    for row, lane in enumerate(LANE_TITLES):
        for span in timeline.lane(lane):
            if span.end < start or span.start > end:
                continue
            left = 1e3 * (span.start - origin)
            if span.op.kind not in WORK:
                axes.plot([left], [row], marker="|", markersize=12, color=MOMENT_COLOR)
                continue
            width = 1e3 * max(span.seconds, thinnest)
            axes.broken_barh([(left, width)], (row - 0.36, 0.72), facecolors=WORK[span.op.kind][0])
            if width > 1e3 * 0.005 * seconds:
                # The right edge alone separates neighbors, and only where it does not cover short work.
                axes.plot([left + width] * 2, [row - 0.36, row + 0.36], color="white", linewidth=0.5)
            if width > 1e3 * 0.02 * seconds:
                middle = left + width / 2
                axes.text(
                    middle,
                    row,
                    str(span.op.subgroup),
                    color="white",
                    fontsize=7,
                    ha="center",
                    va="center",
                    clip_on=True,
                )
    axes.set_yticks(range(len(LANE_TITLES)), list(LANE_TITLES.values()), color=INK)
    axes.set_ylim(len(LANE_TITLES) - 0.5, -0.5)
    margin = 0.01 * seconds
    axes.set_xlim(1e3 * (start - origin - margin), 1e3 * (end - origin + margin))
    axes.set_xlabel("milliseconds", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="file that --offload-trace wrote")
    parser.add_argument("--output", type=Path, default=Path("timeline.png"), help="PNG to write")
    parser.add_argument("--title", default="", help="text above the picture")
    options = parser.parse_args()
    try:
        draw_timeline(read_timeline(options.trace), options.output, options.title)
    except (OSError, ValueError) as error:
        print(f"draw_timeline: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
