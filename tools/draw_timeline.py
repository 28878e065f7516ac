"""Draw the lanes of a Chrome trace (of --offload-trace): `python tools/draw_timeline.py trace.json --output t.png`.

Standard trace events are read: complete events ("ph": "X", microseconds) and the names of threads ("ph": "M").
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# From the training loop outward, as in every drawing of this project; other lanes follow by name.
LANE_ORDER = ("main", "gpu", "cpu", "h2d", "d2h")
LANE_TITLES = {"main": "loop", "gpu": "GPU", "cpu": "CPU", "h2d": "host to device", "d2h": "device to host"}
KIND_COLORS = {
    "update_cpu": "#d1495b",
    "update_gpu": "#2e8b57",
    "prefetch": "#7fb3d5",
    "flush": "#f0b67f",
    "grad_flush": "#b7a6cf",
    "param_h2d": "#1f6fb4",
}
KIND_TITLES = {
    "update_cpu": "update on the CPU",
    "update_gpu": "update on the GPU",
    "prefetch": "state up",
    "flush": "state down",
    "grad_flush": "gradients down",
    "param_h2d": "parameters up",
}
OTHER_COLOR = "#bbbbbb"
INK = "#333333"


@dataclass(frozen=True, slots=True)
class Bar:
    """One piece of work: its lane, kind (the name without its [subgroup]), start and length in milliseconds."""

    lane: str
    kind: str
    start_ms: float
    length_ms: float


def read_trace(text: str) -> list[Bar]:
    """Return the complete events of a Chrome trace. Raises ValueError where the text is no trace or has none."""
    try:
        trace = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no Chrome trace, JSON ends at {error}: give the file of --offload-trace") from error
    events: list[dict[str, Any]] = trace.get("traceEvents", []) if isinstance(trace, dict) else trace
    names = {
        (event.get("pid"), event.get("tid")): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    bars = [
        Bar(
            lane=names.get((event.get("pid"), event.get("tid")), str(event.get("tid"))).lower(),
            kind=re.split(r"[\[ ]", event["name"], maxsplit=1)[0],
            start_ms=event["ts"] / 1000,
            length_ms=event.get("dur", 0) / 1000,
        )
        for event in events
        if event.get("ph") == "X"
    ]
    if not bars:
        raise ValueError("the trace holds no complete events: give the file that --offload-trace wrote after a step")
    first = min(bar.start_ms for bar in bars)
    return [Bar(bar.lane, bar.kind, bar.start_ms - first, bar.length_ms) for bar in bars]


def order_lanes(bars: list[Bar]) -> list[str]:
    """Return the lanes from top to bottom."""
    found = {bar.lane for bar in bars}
    return [lane for lane in LANE_ORDER if lane in found] + sorted(found - set(LANE_ORDER))


def draw_bars(bars: list[Bar], output: Path, title: str = "") -> None:
    """Write a PNG with one row for each lane."""
    import matplotlib  # optional and slow to import: only where something is drawn

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    lanes = order_lanes(bars)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.55 * len(lanes)), dpi=150)
    for row, lane in enumerate(lanes):
        for bar in (b for b in bars if b.lane == lane):
            color = KIND_COLORS.get(bar.kind, OTHER_COLOR)
            if bar.length_ms > 0:
                axes.broken_barh(
                    [(bar.start_ms, bar.length_ms)],
                    (row - 0.36, 0.72),
                    facecolors=color,
                    edgecolors="white",
                    linewidth=0.4,
                )
            else:
                axes.plot([bar.start_ms], [row], marker="|", markersize=12, color=color)
    axes.set_yticks(range(len(lanes)), [LANE_TITLES.get(lane, lane) for lane in lanes], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds", color=INK)
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    kinds = [kind for kind in KIND_COLORS if any(bar.kind == kind for bar in bars)]
    marks = [patches.Patch(color=KIND_COLORS[kind], label=KIND_TITLES[kind]) for kind in kinds]
    if any(bar.kind not in KIND_COLORS for bar in bars):
        marks.append(patches.Patch(color=OTHER_COLOR, label="other"))
    figure.legend(handles=marks, loc="lower center", ncols=len(marks), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="Chrome trace in JSON")
    parser.add_argument("--output", type=Path, default=Path("timeline.png"), help="PNG to write")
    parser.add_argument("--title", default="", help="text above the picture")
    options = parser.parse_args()
    try:
        draw_bars(read_trace(options.trace.read_text(encoding="utf-8")), options.output, options.title)
    except (OSError, ValueError) as error:
        print(f"draw_timeline: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
