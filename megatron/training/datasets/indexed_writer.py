"""Writes an indexed dataset so that under its final name there is never a half-written file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

import numpy as np

from megatron.training.datasets.indexed_format import IndexHeader, bin_path, idx_path

PARTIAL_SUFFIX = ".partial"
_POINTERS_PER_WRITE = 1 << 20  # 8 MiB of pointers at a time, whatever the number of sequences


class IndexedWriter:
    """Appends documents to PREFIX.bin and writes PREFIX.idx at the end.

    All bytes go to PREFIX.bin.partial and PREFIX.idx.partial; `publish` renames them. Leaving the `with` block
    without `publish` removes them, and a dataset that stood under PREFIX before is untouched. A killed process leaves
    only `.partial` files, which the next writer of the same PREFIX overwrites.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        """Open PREFIX.bin.partial. Raises ValueError when another process is writing it, OSError as open does."""
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._tmp_bin = bin_path(prefix) + PARTIAL_SUFFIX
        self._tmp_idx = idx_path(prefix) + PARTIAL_SUFFIX
        self._bin = _open_exclusive(self._tmp_bin, prefix)
        self._is_published = False

    @property
    def num_documents(self) -> int:
        """Documents appended so far."""
        return len(self._boundaries) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of tokens appended so far."""
        return self.num_tokens * self.dtype.itemsize

    def append(
        self, tokens: np.ndarray | bytes, sequence_lengths: np.ndarray, sequences_per_document: np.ndarray
    ) -> None:
        """Append whole documents.

        tokens: [sum(sequence_lengths)] of the writer's dtype (or its bytes); sequence_lengths: int [sequences];
        sequences_per_document: int [documents], summing to the number of sequences (0 is an empty document).
        """
        data = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens, dtype=self.dtype).data
        num_tokens = int(np.sum(sequence_lengths, dtype=np.int64))
        assert len(memoryview(data).cast("B")) == num_tokens * self.dtype.itemsize
        assert int(np.sum(sequences_per_document, dtype=np.int64)) == len(sequence_lengths)
        self._bin.write(data)
        self.num_tokens += num_tokens
        boundaries = self._boundaries[-1] + np.cumsum(sequences_per_document, dtype=np.int64)
        self._lengths.frombytes(np.ascontiguousarray(sequence_lengths, dtype=np.int32).tobytes())
        self._boundaries.frombytes(boundaries.astype(np.int64, copy=False).tobytes())

    def append_document(self, tokens: Sequence[int] | np.ndarray, sequence_lengths: Sequence[int]) -> None:
        """Append one document of `len(sequence_lengths)` sequences, whose tokens stand one after the other."""
        lengths = np.asarray(sequence_lengths, dtype=np.int32)
        self.append(np.asarray(tokens, dtype=self.dtype), lengths, np.asarray([len(lengths)]))

    def append_dataset(
        self, source: IO[bytes], num_tokens: int, sequence_lengths: np.ndarray, boundaries: np.ndarray
    ) -> None:
        """Append another dataset of the same dtype: its .bin as an open file, its lengths and its boundaries."""
        first_sequence = self._boundaries[-1]
        copied = 0
        while chunk := source.read(1 << 24):
            self._bin.write(chunk)
            copied += len(chunk)
        assert copied == num_tokens * self.dtype.itemsize, "a source changed while it was copied"
        self.num_tokens += num_tokens
        self._lengths.frombytes(np.ascontiguousarray(sequence_lengths, dtype=np.int32).tobytes())
        self._boundaries.frombytes((boundaries[1:].astype(np.int64) + first_sequence).tobytes())

    def finish(self) -> None:
        """Write the index and push both files to the disk, still under their temporary names."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        with open(self._tmp_idx, "wb") as out:
            lengths, boundaries = np.asarray(self._lengths, np.int32), np.asarray(self._boundaries, np.int64)
            write_index(out, self.dtype, lengths, boundaries)
            out.flush()
            os.fsync(out.fileno())

    def publish(self) -> None:
        """Give both files their final names, after `finish`; no reader sees an old .idx with a new .bin."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(idx_path(self.prefix))
        os.replace(self._tmp_bin, bin_path(self.prefix))
        os.replace(self._tmp_idx, idx_path(self.prefix))
        self._is_published = True
        self._bin.close()

    def close(self) -> None:
        """Remove the temporary files unless they were published. Never raises OSError: it runs while others do."""
        if self._is_published:
            return
        for path in (self._tmp_bin, self._tmp_idx):
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(OSError):  # a full disk fails again when buffered bytes are flushed
            self._bin.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_exclusive(path: str, prefix: str) -> IO[bytes]:
    while True:
        file = open(path, "ab")  # not "wb": another writer's bytes must survive until the lock is ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"another process is writing {bin_path(prefix)}: wait for it or choose another --output-prefix"
            ) from None
        except OSError:
            pass  # some network file systems have no locks; then only the user keeps two writers apart
        # Between open and lock another writer may have published this very file: emptying it would destroy its work.
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            file.truncate(0)
            return file
        file.close()


def write_index(out: IO[bytes], dtype: np.dtype[Any], sequence_lengths: np.ndarray, boundaries: np.ndarray) -> None:
    """Write the index of sequences that follow one another: int32 [sequences], int64 [documents + 1]."""
    out.write(IndexHeader(np.dtype(dtype), len(sequence_lengths), len(boundaries)).pack())
    out.write(np.ascontiguousarray(sequence_lengths, dtype=np.int32).data)
    # int64 throughout: with int32 the offsets of a .bin beyond 2 GiB would wrap.
    first = 0
    for start in range(0, len(sequence_lengths), _POINTERS_PER_WRITE):
        sizes = sequence_lengths[start : start + _POINTERS_PER_WRITE].astype(np.int64) * np.dtype(dtype).itemsize
        ends = np.cumsum(sizes, dtype=np.int64) + first
        out.write((ends - sizes).data)
        first = int(ends[-1])
    out.write(np.ascontiguousarray(boundaries, dtype=np.int64).data)
