"""pretrain_gpt.py with a pause after each step, so that a tiny run lasts long enough to be preempted."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt  # noqa: E402 - the repository first, wherever this is started
from megatron.training.lifecycle import StopWatch  # noqa: E402

SECONDS = 0.25

if __name__ == "__main__":
    decide = StopWatch.reason

    def slowly(self: StopWatch, iteration: int) -> str | None:
        time.sleep(SECONDS)
        return decide(self, iteration)

    StopWatch.reason = slowly
    sys.exit(pretrain_gpt.main())
