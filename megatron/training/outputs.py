"""Whether what a run writes at its end can be written: looked at when it starts, not hours later."""

from __future__ import annotations

import os
from pathlib import Path

from deep_offload.optimizer.ranks import from_all_ranks
from megatron.training.config import TrainingConfig
from megatron.training.launch import Ranks
from megatron.training.run_record import RUN_FILE, TRACE_FILE


def check_outputs(config: TrainingConfig, ranks: Ranks) -> None:
    """Make the folders of --offload-trace and --run-dir. Raises ValueError on every rank where one cannot be used.

    Collective: only the rank that writes knows its disk, and one that ended alone would be waited for.
    """
    if config.offload.offload_trace is None and not config.logging.run_dir:
        return
    everywhere = from_all_ranks(_problem(config, ranks))
    found = next((problem for problem in everywhere if problem is not None), None)
    if found is not None:
        raise ValueError(found)


def _problem(config: TrainingConfig, ranks: Ranks) -> str | None:
    """One sentence if this rank cannot write what it is to write."""
    trace, folder = config.offload.offload_trace, config.logging.run_dir
    if trace is not None and ranks.is_first:
        reason = why_not_writable(Path(trace))
        if reason is not None:
            return f"--offload-trace {trace} cannot be written ({reason}): give a file in a folder that can be written"
    if folder and ranks.is_last:
        for name in (RUN_FILE, TRACE_FILE):
            reason = why_not_writable(Path(folder) / name)
            if reason is not None:
                return f"--run-dir {folder} cannot be used ({name}: {reason}): give a directory that can be written"
    return None


def why_not_writable(path: Path) -> str | None:
    """Return why no file can be written at `path`, None if it can. Makes its folder; leaves what is there as it is."""
    try:
        if path.is_dir():
            return "it is a directory"
        if path.parent.exists() and not path.parent.is_dir():
            return "its folder is a file"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return None if os.access(path, os.W_OK) else "it is there and may not be written"
        path.open("x").close()
        path.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
