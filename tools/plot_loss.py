"""Draw the loss curve of one or several training logs: `python tools/plot_loss.py run.log --output loss.png`.

Reads Megatron's log lines (`iteration N/ M | ... | lm loss: X |` and `validation loss at iteration N | lm loss
value: X`), so logs of other Megatron-style programs work too.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

TRAINING = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?\blm loss: ([-+.\dEeinfa]+)", re.IGNORECASE)
VALIDATION = re.compile(r"validation loss at iteration (\d+) .*?lm loss value: ([-+.\dEeinfa]+)", re.IGNORECASE)

# One color for each log; validation is the same color, stronger and with marks.
COLORS = ("#1f6fb4", "#d1495b", "#2e8b57", "#8e5ea2", "#b8860b", "#444444")
INK = "#333333"


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Points (iteration, loss) of one log, in the order of the log."""

    training: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]


def read_losses(text: str) -> LossCurve:
    """Return the losses that a log holds; of two validations at one iteration (the last step's) the first counts."""
    training = [(int(m[1]), float(m[2])) for m in TRAINING.finditer(text)]
    validation = {}
    for match in VALIDATION.finditer(text):
        validation.setdefault(int(match[1]), float(match[2]))
    return LossCurve(tuple(training), tuple(sorted(validation.items())))


def draw_losses(curves: dict[str, LossCurve], output: Path, title: str = "") -> None:
    """Write a PNG with the curves by name. Raises ValueError for a log without losses."""
    for name, curve in curves.items():
        if not curve.training and not curve.validation:
            raise ValueError(f"{name} holds no line with an lm loss: give the output of a training run")
    import matplotlib  # optional and slow to import: only where something is drawn

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    for color, (name, curve) in zip(COLORS * len(curves), curves.items()):
        label = "" if len(curves) == 1 else f"{name}, "
        if curve.training:
            axes.plot(*zip(*curve.training), color=color, alpha=0.45, linewidth=1.2, label=f"{label}training")
        if curve.validation:
            axes.plot(
                *zip(*curve.validation), color=color, linewidth=2, marker="o", markersize=4, label=f"{label}validation"
            )
            for iteration, loss in (curve.validation[0], curve.validation[-1]):
                axes.annotate(
                    f"{loss:.2f}", (iteration, loss), (4, 6), textcoords="offset points", color=INK, fontsize=9
                )
    axes.set_xlabel("iteration", color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="output of a training run")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="PNG to write")
    parser.add_argument("--title", default="", help="text above the picture")
    options = parser.parse_args()
    try:
        curves = {str(path): read_losses(path.read_text(encoding="utf-8", errors="replace")) for path in options.logs}
        draw_losses(curves, options.output, options.title)
    except (OSError, ValueError) as error:
        print(f"plot_loss: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
