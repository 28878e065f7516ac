"""Reads JSONL files, plain or gzip, in blocks of whole lines, and says exactly what is wrong with a line."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

MAX_LINE_BYTES = 1 << 30  # beyond it a file is not JSONL; without a limit it would be read into memory whole
_READ_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_COMPRESSION = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"PK\x03\x04": "zip"}
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one input file."""

    path: str
    first_line: int
    """Line number, from 1, of the first line."""
    data: bytes
    """The lines, without the last newline."""
    position_bytes: int
    """Bytes of all input files, as they lie on the disk, read so far: for the progress display."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """Why one line of the input is no document."""

    path: str
    line: int
    kind: str
    """A few words to count by, such as "blank line"."""
    detail: str
    """The rest of the reason, or ""."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}{': ' if self.detail else ''}{self.detail}"


class LineError(Exception):
    """A line that is no document: kind and detail of its BadLine."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the files that `patterns` (paths or globs) name: patterns in the given order, each one's files sorted.

    Raises ValueError, one sentence, for a pattern that names no file and for what is not a readable file.
    """
    files: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ValueError(f"--input {pattern} matches no file: give a path or a quoted pattern of existing files")
        files += found
    for path in files:
        if os.path.isdir(path):
            raise ValueError(f"--input {path} is a directory: name its files, for example '{path.rstrip('/')}/*.jsonl'")
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path} cannot be read: permission denied")
    repeated = [path for path, times in Counter(files).items() if times > 1]
    if repeated:
        raise ValueError(f"--input names {repeated[0]} more than once: its documents would be written twice")
    return files


def input_bytes(files: Sequence[str]) -> int | None:
    """Return the size of all files on the disk, or None where one of them is a pipe."""
    if not all(os.path.isfile(path) for path in files):
        return None
    return sum(os.path.getsize(path) for path in files)


def read_blocks(files: Sequence[str], block_bytes: int) -> Iterator[Block]:
    """Yield all lines of `files` in order, in blocks of about `block_bytes` that never cut a line.

    Raises ValueError, naming file and line, for a broken or unknown compression and for a line beyond MAX_LINE_BYTES.
    """
    done_bytes = 0
    for path in files:
        with open(path, "rb") as raw:
            line = 1
            for data, end in _file_blocks(path, raw, block_bytes):
                yield Block(path, line, data, done_bytes + end)
                line += data.count(b"\n") + 1
            done_bytes += _position(raw)


def _file_blocks(path: str, raw: IO[bytes], block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines without the last newline, bytes of `raw` consumed)."""
    source = _decompressed(path, raw)
    pending: list[bytes] = []
    pending_bytes = 0
    line = 1
    while True:
        try:
            chunk = source.read(min(block_bytes, _READ_BYTES))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            line += sum(piece.count(b"\n") for piece in pending)
            raise ValueError(f"{path} is damaged gzip data after line {line - 1}: {error}") from None
        if not chunk:
            break
        pending.append(chunk)
        pending_bytes += len(chunk)
        cut = chunk.rfind(b"\n")
        if cut < 0 and pending_bytes > MAX_LINE_BYTES:
            raise ValueError(f"{path}:{line}: the line is longer than {MAX_LINE_BYTES} bytes: this is not JSONL")
        if cut < 0 or pending_bytes < block_bytes:
            continue
        data = b"".join(pending)
        cut += len(data) - len(chunk)
        yield data[:cut], _position(raw)
        line += data.count(b"\n")
        pending = [data[cut + 1 :]]
        pending_bytes = len(pending[0])
    data = b"".join(pending)
    if data:
        yield data.removesuffix(b"\n"), _position(raw)


def _decompressed(path: str, raw: IO[bytes]) -> IO[bytes]:
    # By content, not by name: curl and cloud tools unpack .gz files and keep the name, and the other way round.
    start = raw.peek(8)[:8]  # type: ignore[attr-defined]
    if start.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    for magic, name in _OTHER_COMPRESSION.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is compressed with {name}, which is not read here: unpack it or use gzip")
    return raw


def _position(raw: IO[bytes]) -> int:
    try:
        return raw.tell()
    except OSError:
        return 0


def parse_line(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """Return for each of `keys` the document's texts: one, or several where the value is a list of strings.

    Raises LineError for everything that is not a JSON object with text under each key.
    """
    if not line.strip():
        raise LineError("blank line")
    if line.startswith(_BYTE_ORDER_MARKS):
        raise LineError("byte order mark", "save the file as UTF-8 without one")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError("not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError("not JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; 100000 open brackets
        raise LineError("not JSON", f"{error}") from None
    if not isinstance(entry, dict):
        raise LineError("not a JSON object", f"it is {_json_type(entry)}")
    may_hold_surrogates = b"\\ud" in line or b"\\uD" in line  # UTF-8 itself cannot hold them, only escapes can
    return [_texts_of(entry, key, may_hold_surrogates) for key in keys]


def _texts_of(entry: dict[str, Any], key: str, may_hold_surrogates: bool) -> list[str]:
    if key not in entry:
        present = ", ".join(map(repr, list(entry)[:8])) or "none"
        raise LineError(f"no key {key!r}", f"the keys are {present}")
    value = entry[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            inside = "a list that holds " if isinstance(value, list) else ""
            raise LineError(f"{key!r} is not text", f"it is {inside}{_json_type(text)}")
        if may_hold_surrogates:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                code = ord(text[error.start])
                raise LineError("lone surrogate", f"\\u{code:04x} in {key!r} is half a character") from None
    return texts


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names[type(value)]
