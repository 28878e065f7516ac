"""Small indexed datasets for tests, written byte by byte from the format's definition."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    """Write PREFIX.bin and PREFIX.idx (uint16 tokens, one sequence per document); returns the prefix as text."""
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * 2]).astype(np.int64)
    boundaries = np.arange(len(documents) + 1, dtype=np.int64)
    tokens = np.concatenate([np.array(document, dtype=np.uint16) for document in documents])
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(documents), len(documents) + 1)
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    return str(prefix)


def counting_corpus(prefix: Path, num_documents: int, length: int, vocab_size: int = 100) -> str:
    """Write documents that count up from their number, each ended by `vocab_size`."""
    documents = [[(n + i) % vocab_size for i in range(length - 1)] + [vocab_size] for n in range(num_documents)]
    return write_corpus(prefix, documents)
