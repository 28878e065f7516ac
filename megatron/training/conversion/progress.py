"""How far a conversion is: a bar with the remaining time on terminals, a line every tenth elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from megatron.training.datasets.progress import format_seconds

_MIB = 1 << 20
_BAR_WIDTH = 30
_SECONDS_BETWEEN_DRAWINGS = 0.1


class ByteProgress:
    """Shows bytes done of `total_bytes`, speed and remaining time."""

    def __init__(self, what: str, total_bytes: int, stream: TextIO | None = None) -> None:
        """what: the word in front, such as `importing`."""
        self._what, self._total = what, max(total_bytes, 1)
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._done = 0
        self._drawn_at = 0.0
        self._tenths = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._done += num_bytes
        now = time.monotonic()
        share = min(self._done / self._total, 1.0)
        seconds = max(now - self._start, 1e-6)
        left = format_seconds(seconds * (1 - share) / share) if share else "?"
        text = f"{self._what}: {100 * share:3.0f} %, {self._done / _MIB / seconds:.0f} MiB/s, ETA {left}"
        if self._is_terminal:
            if now - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS or share == 1.0:
                self._drawn_at = now
                filled = int(share * _BAR_WIDTH)
                bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
                print(f"\r[{bar}] {text}", end="\n" if share == 1.0 else "", file=self._stream, flush=True)
        elif int(share * 10) > self._tenths:
            self._tenths = int(share * 10)
            print(text, file=self._stream, flush=True)
