"""Runs of pretrain_gpt.py one after another in one process, where a start of its own for each takes most of the time.

    python -m benchmarks.worker       # reads one JSON line a run: {"arguments": [...], "log": PATH}

Answers `done` when a run has ended well. A run that fails ends the process with its traceback in the log.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.training.arguments import parse_args
from megatron.training.dry_run import dry_run
from megatron.training.launch import find_ranks
from megatron.training.quiet import leave_out_known_warnings
from megatron.training.training import pretrain

ANSWER = "done"


def train(arguments: Sequence[str], log: Path) -> None:
    """Do what pretrain_gpt.py does with these arguments, its output in `log`. Peaks are those of this run alone."""
    _forget_peaks()
    with log.open("a", buffering=1) as out, contextlib.redirect_stdout(out):
        try:
            config = parse_args(arguments, world_size=1)
            if config.lifecycle.dry_run:
                print("\n".join(dry_run(config).lines))
            else:
                pretrain(config, find_ranks({}))
        except BaseException:
            traceback.print_exc(file=out)
            raise
    gc.collect()  # the next run's memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _forget_peaks() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # not every kernel has it: then the peak is that of all runs so far
        Path("/proc/self/clear_refs").write_text("5")


def main() -> int:
    leave_out_known_warnings()
    # What libraries print from C++, as NCCL does, goes to the errors: the reader takes any line for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        train(job["arguments"], Path(job["log"]))
        print(ANSWER, file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
