"""English text found wherever Python is: its language reference, and the docstrings and comments of its library.

Nothing is downloaded and no module is imported (docstrings are read from the sources), so the result depends on the
Python release alone. Standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Folders of the standard library whose docstrings are not prose, or are not part of it.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "test", "tests"}
MIN_CHARS = 40
"""Shorter pieces ("Return x.") teach a model little."""
MAX_DOCUMENT_CHARS = 6000
"""A module's pieces are joined into documents of about this size."""
MIN_CORPUS_BYTES = 2_000_000
"""Less than this means that the Python at hand was stripped of its sources."""

COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^\n]*\n){2,}", re.MULTILINE)
# Anything but line breaks and tabs, and what a wrong encoding leaves behind.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd\ud800-\udfff]")


def build_corpus(output: Path) -> tuple[int, int]:
    """Write the documents as JSON lines {"text": ...} to `output` and return (documents, bytes of text).

    Deterministic for one Python release: pieces are unique, and documents are ordered by their hash, so that the end
    of the file (the validation split) is of the same kind as its beginning. Raises ValueError where this Python has
    less than MIN_CORPUS_BYTES of text.
    """
    seen: set[str] = set()
    documents: list[str] = []
    for pieces in [*_reference_topics(), *_library_texts()]:
        documents.extend(_join_unique(pieces, seen))
    size_bytes = sum(len(text.encode()) for text in documents)
    if size_bytes < MIN_CORPUS_BYTES:
        raise ValueError(
            f"the library of this Python at {sysconfig.get_path('stdlib')} holds {size_bytes} bytes of text, the demo "
            f"needs {MIN_CORPUS_BYTES}: name a Python that has its .py sources with PYTHON="
        )
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as stream:
        for text in documents:
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return len(documents), size_bytes


def _reference_topics() -> Iterator[list[str]]:
    """Yield the pieces of each topic of the language reference; nothing where this Python ships without it."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        return
    for _, text in sorted(topics.items()):
        yield text.split("\n\n\n")


def _library_texts() -> Iterator[list[str]]:
    """Yield the docstrings and comments of each module of the standard library, in the order of its source."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            source = path.read_text(encoding="utf-8", errors="replace")
            yield [text for _, text in sorted([*_docstrings(source, path.stem), *_comments(source)])]


def _docstrings(source: str, module_name: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, each under the name of what it describes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # the library holds a few files that are wrong on purpose
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield getattr(node, "lineno", 0), f"{getattr(node, 'name', module_name)}: {inspect.cleandoc(text)}"


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment of two lines or more."""
    for match in COMMENT_BLOCK.finditer(source):
        lines = [line.strip().lstrip("#").strip() for line in match.group().splitlines()]
        yield source.count("\n", 0, match.start()) + 1, "\n".join(lines)


def _join_unique(pieces: list[str], seen: set[str]) -> Iterator[str]:
    """Yield documents made of the pieces that no earlier document had."""
    part: list[str] = []
    size = 0
    for piece in pieces:
        text = piece.strip()
        key = re.sub(r"\W+", " ", text.split(": ", 1)[-1]).lower()
        if len(text) < MIN_CHARS or key in seen or CONTROL_CHARACTERS.search(text):
            continue
        seen.add(key)
        part.append(text)
        size += len(text)
        if size >= MAX_DOCUMENT_CHARS:
            yield "\n\n".join(part)
            part, size = [], 0
    if part:
        yield "\n\n".join(part)
