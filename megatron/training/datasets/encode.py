"""Turns one block of JSONL lines into token ids: the work of one worker process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from megatron.training.datasets.jsonl import BadLine, Block, LineError, parse_line
from megatron.training.tokenizer import Tokenizer

_MAX_DETAILS = 21  # bad lines of one block that keep their reason; the others are only counted
_SUBBATCH_CHARS = 1 << 18  # texts go to the tokenizer by this many characters, which bounds its memory


@dataclass(frozen=True, slots=True)
class EncodedKey:
    """The documents of one block under one JSON key, as bytes because they travel between processes."""

    tokens: bytes
    """[tokens] of the dataset's dtype."""
    sequence_lengths: bytes
    """int32 [sequences]."""
    sequences_per_document: bytes
    """int32 [documents]."""


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """What became of one block."""

    keys: tuple[EncodedKey, ...]
    num_documents: int
    num_empty: int
    """Documents without a token under at least one key."""
    position_bytes: int
    bad_lines: list[BadLine] = field(default_factory=list)
    bad_kinds: Counter[str] = field(default_factory=Counter)


class BlockEncoder:
    """Encodes blocks with one tokenizer. Not thread safe; each worker process has its own copy."""

    def __init__(
        self, tokenizer: Tokenizer, keys: Sequence[str], dtype: np.dtype[Any], append_eod: bool, stop_at_bad_line: bool
    ) -> None:
        self._encode_texts = _batch_encoder(tokenizer)
        self._keys = tuple(keys)
        self._dtype = dtype
        self._vocab_size = tokenizer.vocab_size
        self._eod = tokenizer.eod if append_eod else None
        self._stop_at_bad_line = stop_at_bad_line

    def encode(self, block: Block) -> EncodedBlock:
        """Return the ids of the block's documents and the bad lines among them, in the order of the lines."""
        bad: list[BadLine] = []
        documents: list[list[list[str]]] = []
        lines: list[int] = []
        for number, line in enumerate(block.data.split(b"\n"), start=block.first_line):
            try:
                documents.append(parse_line(line, self._keys))
                lines.append(number)
            except LineError as error:
                bad.append(BadLine(block.path, number, error.kind, error.detail))
                if self._stop_at_bad_line:
                    break
        encoded, refused = self._encode_documents(documents)
        bad += [BadLine(block.path, lines[i], error.kind, error.detail) for i, error in refused.items()]
        bad.sort(key=lambda entry: entry.line)
        kept = [ids for i, ids in enumerate(encoded) if i not in refused]
        return EncodedBlock(
            keys=tuple(self._pack([ids[k] for ids in kept]) for k in range(len(self._keys))),
            num_documents=len(kept),
            num_empty=sum(not all(any(sentences) for sentences in ids) for ids in kept),
            position_bytes=block.position_bytes,
            bad_lines=bad[:_MAX_DETAILS],
            bad_kinds=Counter(entry.kind for entry in bad),
        )

    def _encode_documents(
        self, documents: list[list[list[str]]]
    ) -> tuple[list[list[list[list[int]]]], dict[int, LineError]]:
        """Return ids[document][key][sentence], and for the documents that were refused why."""
        refused: dict[int, LineError] = {}
        flat = [text for document in documents for texts in document for text in texts]
        try:
            ids = self._encode_flat(flat)
        except LineError:
            # Someone in this block is at fault: find out who, one document at a time.
            ids = []
            for i, document in enumerate(documents):
                texts = [text for texts in document for text in texts]
                try:
                    ids += self._encode_flat(texts)
                except LineError as error:
                    refused[i] = error
                    ids += [[] for _ in texts]
        position = iter(ids)
        return [[[next(position) for _ in texts] for texts in document] for document in documents], refused

    def _encode_flat(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = []
        first, size = 0, 0
        for i, text in enumerate(texts):
            size += len(text)
            if size >= _SUBBATCH_CHARS or i == len(texts) - 1:
                try:
                    ids += self._encode_texts(texts[first : i + 1])
                except Exception as error:  # noqa: BLE001 - every tokenizer library has its own exceptions
                    raise LineError("refused by the tokenizer", " ".join(str(error).split())[:200]) from None
                first, size = i + 1, 0
        largest = max((max(row) for row in ids if row), default=0)
        if largest >= self._vocab_size:
            raise LineError("id outside the vocabulary", f"id {largest}, the tokenizer has {self._vocab_size} ids")
        return ids

    def _pack(self, documents: list[list[list[int]]]) -> EncodedKey:
        """Lay out ids[document][sentence]; sentences without a token vanish, an end-of-document id joins the last."""
        sentences: list[list[int]] = []
        per_document: list[int] = []
        for document in documents:
            filled = [ids for ids in document if ids]
            if filled and self._eod is not None:
                filled[-1].append(self._eod)
            sentences += filled
            per_document.append(len(filled))
        lengths = np.fromiter(map(len, sentences), dtype=np.int32, count=len(sentences))
        total = int(lengths.sum(dtype=np.int64))
        tokens = np.fromiter(chain.from_iterable(sentences), dtype=self._dtype, count=total)
        return EncodedKey(tokens.tobytes(), lengths.tobytes(), np.asarray(per_document, dtype=np.int32).tobytes())


def _batch_encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """Return the fastest way to the ids of many texts; it gives the same ids as `tokenizer.tokenize` on each."""
    batch = getattr(tokenizer, "tokenize_batch", None)
    if batch is not None:
        return batch
    inner = getattr(tokenizer, "_tokenizer", None)
    for name in ("encode_batch_fast", "encode_batch"):
        encode_batch = getattr(inner, name, None)
        if encode_batch is not None and type(inner).__module__.startswith("tokenizers"):
            return lambda texts: [encoding.ids for encoding in encode_batch(texts)]
    if type(inner).__module__.startswith("transformers"):
        return lambda texts: inner(texts).input_ids
    return lambda texts: [tokenizer.tokenize(text) for text in texts]
