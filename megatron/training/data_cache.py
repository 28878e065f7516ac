"""Index caches that a killed run left half written: removed before anyone reads them. numpy only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def cache_folders(prefixes: Sequence[str], data_cache_path: str | None) -> list[Path]:
    """Return where megatron-core keeps the indices of these prefixes: one folder for all, or one beside each."""
    if data_cache_path is not None:
        return [Path(data_cache_path)]
    return [Path(prefix) / "cache" / "GPTDataset_indices" for prefix in prefixes]


def remove_broken(folders: Sequence[Path], report: Callable[[str], None]) -> None:
    """Delete index files that do not hold what their headers announce, so that megatron-core builds them again.

    Only one rank may call this, before the others look for a cache. report: called with a line for each file.
    """
    for folder in folders:
        for path in sorted(folder.glob("*.npy")) if folder.is_dir() else []:
            reason = _fault(path)
            if reason is not None:
                os.unlink(path)
                report(f"the index cache {path} was left half written ({reason}): it is built again")


def _fault(path: Path) -> str | None:
    try:
        # Pickled arrays are refused: a cache holds numbers only.
        np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        return str(error)
    return None
