"""How far a long data job is: a bar with the remaining time on terminals, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

_MIB = 1 << 20


class Progress:
    """Shows documents, speed and remaining time. Use as a context manager, after all forks: the bar has a thread."""

    def __init__(self, total_bytes: int | None, log_interval: int, stream: TextIO | None = None) -> None:
        """total_bytes: of the input, None where unknown; log_interval: documents between two plain lines."""
        self._stream = sys.stderr if stream is None else stream
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._start = time.monotonic()
        self._logged_documents = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._open_bar()
        return self

    def _open_bar(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress
        except ImportError:
            return  # rich is optional: plain lines then
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
        )
        self._task = self._bar.add_task("tokenizing", total=self._total_bytes)
        self._bar.start()

    def update(self, num_documents: int, position_bytes: int, num_tokens: int) -> None:
        """Show totals since the start: documents and tokens written, bytes of input read."""
        seconds = max(time.monotonic() - self._start, 1e-6)
        rate = f"{num_documents / seconds:.1f} docs/s, {position_bytes / seconds / _MIB:.2f} MB/s"
        if self._bar is not None:
            description = f"{num_documents} documents, {num_tokens} tokens ({rate})"
            self._bar.update(self._task, completed=position_bytes, description=description)
        elif num_documents // self._log_interval > self._logged_documents // self._log_interval:
            self._logged_documents = num_documents
            self._print(f"Processed {num_documents} documents ({rate}){self._remaining(seconds, position_bytes)}.")

    def note(self, text: str) -> None:
        """Print one line without disturbing the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _remaining(self, seconds: float, position_bytes: int) -> str:
        if not self._total_bytes or not position_bytes:
            return ""
        share = min(position_bytes / self._total_bytes, 1.0)
        return f", {100 * share:.0f} % of the input, {format_seconds(seconds * (1 - share) / share)} left"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def format_seconds(seconds: float) -> str:
    """Return h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
