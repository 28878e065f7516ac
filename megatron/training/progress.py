"""How far a run is: one line with the remaining time on a terminal, and `SAVE/progress.txt` (`--log-progress`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TextIO

from megatron.training.side_files import SideFiles

_SECONDS_BETWEEN = 0.2
_CLOCK = "%Y-%m-%d %H:%M:%S"


def remaining(seconds: float) -> str:
    """Return a duration as people read it: 2d 03:04:05, or 03:04:05 below a day."""
    total = round(seconds)
    days, rest = divmod(total, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


class ProgressLine:
    """The last line of a terminal. It is not there where output goes to a file or a pipe, or the terminal is dumb.

    The first step of a process, which compiles and warms up, does not count for the remaining time.
    """

    def __init__(self, stream: TextIO, env: Mapping[str, str], num_iterations: int) -> None:
        self.is_on = stream.isatty() and env.get("TERM") != "dumb"
        self._stream, self._total = stream, num_iterations
        self._first: tuple[int, float] | None = None
        self._drawn = -_SECONDS_BETWEEN
        self._is_there = False

    def show(self, iteration: int, loss: float | None) -> None:
        """Draw the line after a step, at most a few times a second."""
        now = time.monotonic()
        if self._first is None:
            self._first = (iteration, now)
        if not self.is_on or now - self._drawn < _SECONDS_BETWEEN:
            return
        text = f" {iteration}/{self._total} ({100 * iteration / max(self._total, 1):.1f} %)"
        text += "" if loss is None else f" | loss {loss:.4f}"
        done = iteration - self._first[0]
        if done > 0:
            seconds = (now - self._first[1]) / done
            text += f" | {seconds:.2f} s a step | {remaining(seconds * (self._total - iteration))} left"
        # The cursor goes back to the start, so that whatever another process prints overwrites the line.
        self._stream.write(f"\r\x1b[K{text}\r")
        self._stream.flush()
        self._drawn, self._is_there = now, True

    def erase(self) -> None:
        """Take the line away, before a whole line is printed."""
        if self._is_there:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_there = False


class ProgressFile:
    """Megatron's `SAVE/progress.txt`: one line when a job starts and one for each checkpoint."""

    def __init__(self, save: str, num_gpus: int, env: Mapping[str, str], side_files: SideFiles) -> None:
        self._side_files = side_files
        self._path = Path(save) / "progress.txt"
        self._num_gpus = num_gpus
        self._job = env.get("SLURM_JOB_ID", "")
        self._start: tuple[float, float] | None = None

    def started(self, flops: float) -> None:
        """Note that a job starts, with `flops` done by jobs before it."""
        self._start = (time.monotonic(), flops)
        with self._side_files.writing(self._path):
            self._append("Starting job")

    def saved(self, iteration: int, flops: float, num_tokens: int) -> None:
        """Note a checkpoint: `flops` and `num_tokens` are those of the whole training until then."""
        assert self._start is not None, "a job starts before it saves"
        seconds, done = time.monotonic() - self._start[0], flops - self._start[1]
        here = done / (max(seconds, 1e-9) * self._num_gpus * 1e12)
        with self._side_files.writing(self._path):
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            everything = flops / (max(gpu_seconds(text, datetime.now()), 1e-9) * 1e12)
            self._append(
                f"Saved checkpoint\tIteration: {iteration}\tJob throughput: {here:.1f} TFLOP/s/GPU\tCumulative "
                f"throughput: {everything:.1f} TFLOP/s/GPU\tFloating-point operations: {flops:.2e}\tTokens (in "
                f"billions): {num_tokens / 1e9:.2f}"
            )

    def _append(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.now().strftime(_CLOCK)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{now}\tJob ID: {self._job}\t# GPUs: {self._num_gpus}\t{text}\n")


_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\tJob ID: [^\t]*\t# GPUs: (\d+)\t(Starting job|Saved)")


def gpu_seconds(text: str, now: datetime) -> float:
    """Return the GPU-seconds of all jobs in a progress file; the last job runs until `now`.

    Earlier jobs count until their last checkpoint: what came after it was done again.
    """
    total, span = 0.0, 0.0
    started, gpus = None, 0
    for clock, count, what in _LINE.findall(text):
        moment = datetime.strptime(clock, _CLOCK)
        if what == "Starting job":
            total, span, started, gpus = total + span, 0.0, moment, int(count)
        elif started is not None:
            span = (moment - started).total_seconds() * gpus
    if started is not None:
        span = (now - started).total_seconds() * gpus
    return total + span


def progress_file(save: str | None, is_wanted: bool, num_gpus: int, side_files: SideFiles) -> ProgressFile | None:
    """Return the file of this run, None without --log-progress and --save."""
    return ProgressFile(save, num_gpus, os.environ, side_files) if save is not None and is_wanted else None
