"""Index caches: which data they belong to, and which a killed run left half written. numpy only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron.training.datasets.indexed_format import bin_path, idx_path

_WHOLE_BYTES = 64 << 20  # an index up to this size is hashed as a whole, in a tenth of a second
_END_BYTES = 1 << 20


def cache_folders(prefixes: Sequence[str], data_cache_path: str | None) -> list[Path]:
    """Return where megatron-core keeps the indices of these prefixes: one folder for all, or one beside each."""
    if data_cache_path is not None:
        return [Path(data_cache_path)]
    return [Path(prefix) / "cache" / "GPTDataset_indices" for prefix in prefixes]


def content_stamp(prefix: str) -> str:
    """Return what identifies the lengths and the order of the documents of `prefix`, wherever its files lie.

    The sizes of both files and a hash of PREFIX.idx; of an index above 64 MiB its first and last MiB are hashed. Token
    ids do not count: an index cache holds none.
    """
    digest = hashlib.blake2b(digest_size=16)
    path = idx_path(prefix)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        digest.update(file.read(size if size <= _WHOLE_BYTES else _END_BYTES))
        if size > _WHOLE_BYTES:
            file.seek(size - _END_BYTES)
            digest.update(file.read())
    return f"{os.path.getsize(bin_path(prefix))}-{size}-{digest.hexdigest()}"


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
