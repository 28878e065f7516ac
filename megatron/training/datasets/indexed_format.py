"""The indexed dataset on disk: PREFIX.bin holds the raw token ids, PREFIX.idx says where each sequence lies.

PREFIX.idx, little endian, no padding:
    9 bytes   magic "MMIDIDX" and two zero bytes
    uint64    version, always 1
    uint8     code of the token type, see TOKEN_DTYPES
    uint64    number of sequences, S
    uint64    number of document boundaries, D
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in PREFIX.bin
    int64[D]  document boundaries in sequences: the first is 0, the last is S
A document is a run of sequences; without sentence splitting it is one sequence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size

TOKEN_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
_CODES = {dtype: code for code, dtype in TOKEN_DTYPES.items()}

# Megatron's border, below 2**16 by a margin for ids that are added later.
_SMALL_VOCAB = 65500


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The first HEADER_BYTES bytes of PREFIX.idx."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_boundaries: int

    @property
    def body_bytes(self) -> int:
        """Bytes of the three arrays behind the header."""
        return self.num_sequences * (4 + 8) + self.num_boundaries * 8

    def pack(self) -> bytes:
        """Return the header as it stands in the file."""
        return _HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], self.num_sequences, self.num_boundaries)


def unpack_header(data: bytes, path: str) -> IndexHeader:
    """Return the header that `data`, the first bytes of `path`, holds. Raises ValueError for anything else."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{path} has {len(data)} bytes, its header alone takes {HEADER_BYTES}: make the dataset again")
    magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(data[:HEADER_BYTES])
    if magic != MAGIC:
        raise ValueError(f"{path} starts with {magic!r}, an index starts with {MAGIC!r}: it is not an indexed dataset")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, only version {VERSION} is known: make the dataset again")
    if code not in TOKEN_DTYPES:
        raise ValueError(
            f"{path} has token type code {code}, allowed are {min(TOKEN_DTYPES)} to {max(TOKEN_DTYPES)}: "
            "make the dataset again"
        )
    return IndexHeader(TOKEN_DTYPES[code], num_sequences, num_boundaries)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which ids of a vocabulary of `vocab_size` are stored: uint16 where they fit, else int32."""
    return np.dtype(np.uint16) if vocab_size < _SMALL_VOCAB else np.dtype(np.int32)


def bin_path(prefix: str) -> str:
    """Return the file that holds the tokens of `prefix`."""
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    """Return the file that holds the index of `prefix`."""
    return prefix + ".idx"
