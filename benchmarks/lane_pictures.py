"""A picture of one step of a trace, measured lanes above predicted ones, as an SVG file of its own.

python -m benchmarks.lane_pictures out/trace/share_0.json docs/images/lanes_cpu_bound.svg [--step -2]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from benchmarks.trace_overhead import split_steps
from deep_offload.plan.draw import read_trace
from deep_offload.report_charts import lanes_chart
from deep_offload.report_page import STYLE


def picture(trace: Path, step: int) -> str:
    """Return the SVG, in a report's light colors."""
    lanes = read_trace(json.loads(trace.read_text()))
    chart = lanes_chart(trace.stem, {name: split_steps(timeline)[step] for name, timeline in lanes.items()})
    for name, color in re.findall(r"--(\w+): (#\w+)", STYLE.split("@media")[0]):
        chart = chart.replace(f"var(--{name})", color)
    return chart.replace("<svg", '<svg style="background: #ffffff"', 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--step", type=int, default=-2, help="of those in the trace")
    options = parser.parse_args()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(picture(options.trace, options.step))


if __name__ == "__main__":
    main()
