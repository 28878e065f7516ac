"""Tokenizers behind one small interface, chosen by Megatron's `--tokenizer-type`. Imports no torch.

Each library (`tokenizers`, `transformers`, `sentencepiece`, `tiktoken`) is imported when its type is asked for.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

_EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_TIKTOKEN_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_TIKTOKEN_DEFAULT_VOCAB_SIZE = 2**17
# The two splitting rules that Mistral-style (v1) and later (v2) vocabularies were trained with.
_TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class Tokenizer(Protocol):
    """What data preparation and the datasets need of a tokenizer.

    `vocab_size` counts ids (largest id + 1); `eod` is the id appended after each document; `unique_identifiers`
    goes into the key of cached dataset indices. There is no pad id: pretraining samples are full.
    """

    vocab_size: int
    eod: int
    unique_identifiers: Mapping[str, object]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...


def _identifiers(kind: str, path: str | None, vocab_size: int, eod: int) -> OrderedDict[str, object]:
    return OrderedDict(type=kind, path=path, vocab_size=vocab_size, eod=eod)


class NullTokenizer:
    """Text is whitespace-separated ids below `num_ids`; one more id, `num_ids`, ends documents."""

    def __init__(self, num_ids: int) -> None:
        self.vocab_size = num_ids + 1
        self.eod = num_ids
        self.unique_identifiers = _identifiers("NullTokenizer", None, self.vocab_size, self.eod)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids written in `text`. Raises ValueError for anything else."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(f"NullTokenizer reads whitespace-separated numbers, got {text[:40]!r}") from None
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"NullTokenizer got id {token}, allowed are 0 to {self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the ids as text."""
        return " ".join(str(token) for token in ids)


class ByteLevelTokenizer:
    """The UTF-8 bytes of the text are the ids 0..255; 256 ends documents."""

    vocab_size = 257
    eod = 256
    unique_identifiers = _identifiers("ByteLevelTokenizer", None, vocab_size, eod)

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; ends of documents vanish, broken sequences become replacement characters."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class FastTokenizer:
    """A tokenizer of the `tokenizers` library: byte-level BPE, a tokenizer.json, ..."""

    def __init__(self, kind: str, tokenizer: Any, eod: int, path: str) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eod = eod
        self.unique_identifiers = _identifiers(kind, path, self.vocab_size, eod)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens (such as a start token) its post-processor adds."""
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class TransformersTokenizer:
    """A folder that has no tokenizer.json, or the name of a model, read through `transformers` (imports torch)."""

    def __init__(self, source: str) -> None:
        transformers = _require("transformers", f"HuggingFaceTokenizer without a tokenizer.json in {source}")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError):
            raise ValueError(
                f"--tokenizer-model {source} is no local folder or file that holds a tokenizer, and no tokenizer of "
                "that name could be loaded: give a folder with a tokenizer.json"
            ) from None
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {source} names no end-of-text token: set eos_token in its config")
        self.vocab_size = len(self._tokenizer)
        self.eod = int(self._tokenizer.eos_token_id)
        self.unique_identifiers = _identifiers("HuggingFaceTokenizer", source, self.vocab_size, self.eod)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens the folder's settings ask for."""
        return list(self._tokenizer(text).input_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer:
    """A SentencePiece model. `adds_start`: put the start token before each text, as Llama 2 was trained."""

    def __init__(self, kind: str, path: Path, adds_start: bool) -> None:
        sentencepiece = _require("sentencepiece", kind)
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self._adds_start = adds_start
        self.vocab_size = int(self._processor.vocab_size())
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise ValueError(f"the SentencePiece model {path} has no end-of-text token: train it with an eos_id")
        self.unique_identifiers = _identifiers(kind, str(path), self.vocab_size, self.eod)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return list(self._processor.encode(text, add_bos=self._adds_start))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._processor.decode(list(ids))


class TikTokenizer:
    """A tiktoken vocabulary: Megatron's JSON list, ids moved up behind special tokens; or a `.tiktoken` file."""

    def __init__(self, path: Path, vocab_size: int | None, pattern: str, num_special_tokens: int) -> None:
        tiktoken = _require("tiktoken", "TikTokenizer")
        if pattern not in _TIKTOKEN_PATTERNS:
            raise ValueError(f"--tiktoken-pattern is {pattern!r}, allowed are {', '.join(_TIKTOKEN_PATTERNS)}")
        if path.suffix == ".json":
            wanted = _TIKTOKEN_DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
            ranks = _read_tiktoken_json(path, wanted, num_special_tokens)
            names = [*_TIKTOKEN_SPECIALS]
            names += [f"<SPECIAL_{i}>" for i in range(len(names), num_special_tokens)]
            specials = {name: i for i, name in enumerate(names)}
            self.eod = specials["</s>"]
        else:
            ranks = _read_tiktoken_ranks(path)
            specials = {"<|endoftext|>": len(ranks)}
            self.eod = len(ranks)
        self._encoding = tiktoken.Encoding(
            name=path.stem, pat_str=_TIKTOKEN_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = int(self._encoding.max_token_value) + 1
        self.unique_identifiers = _identifiers("TikTokenizer", str(path), self.vocab_size, self.eod)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`; the spelling of a special token in a document is plain text."""
        return self._encoding.encode(text, disallowed_special=())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._encoding.decode(list(ids))


def _require(module: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"{what} needs the package {module}, which is not installed: pip install {module}") from None


def _existing(path: str | None, kind: str, flag: str) -> Path:
    if path is None:
        raise ValueError(f"--tokenizer-type {kind} needs {flag}")
    found = Path(path)
    if not found.exists():
        raise ValueError(f"{flag} {path} does not exist: give a local file or folder")
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _read_tiktoken_json(path: Path, vocab_size: int, num_special_tokens: int) -> dict[bytes, int]:
    if num_special_tokens < len(_TIKTOKEN_SPECIALS):
        raise ValueError(
            f"--tiktoken-num-special-tokens is {num_special_tokens}, at least {len(_TIKTOKEN_SPECIALS)} are needed"
        )
    entries = _read_json(path)
    num_ranks = vocab_size - num_special_tokens
    if not isinstance(entries, list) or not 256 <= num_ranks <= len(entries):
        have = len(entries) if isinstance(entries, list) else "no list of"
        raise ValueError(
            f"{path} holds {have} ranks, but --vocab-size {vocab_size} wants {num_ranks} of them beside "
            f"{num_special_tokens} special tokens: change --vocab-size"
        )
    return {base64.b64decode(e["token_bytes"]): e["rank"] + num_special_tokens for e in entries[:num_ranks]}


def _read_tiktoken_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{path} line {number} is not a base64 token and its rank") from None
    return ranks


def _token_text(entry: object) -> str | None:
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _named_end_token(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            text = _token_text(_read_json(folder / name).get("eos_token"))
            if text is not None:
                return text
    return None


def _build_huggingface(model: str | None) -> Tokenizer:
    if model is None:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")
    path = Path(model)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        return TransformersTokenizer(model)
    tokenizers = _require("tokenizers", "HuggingFaceTokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any fault in the file
        raise ValueError(f"{file} is not a tokenizer file of the tokenizers library: {error}") from None
    named = _named_end_token(file.parent)
    candidates = _EOD_NAMES if named is None else (named,)
    for candidate in candidates:
        eod = tokenizer.token_to_id(candidate)
        if eod is not None:
            return FastTokenizer("HuggingFaceTokenizer", tokenizer, eod, model)
    raise ValueError(
        f"{file} has no end-of-text token (looked for {', '.join(candidates)}): name one as eos_token in "
        "tokenizer_config.json beside it"
    )


def _build_gpt2(vocab: Path, merges: Path) -> Tokenizer:
    tokenizers = _require("tokenizers", "GPT2BPETokenizer")
    try:
        tokenizer = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any fault in the files
        raise ValueError(f"{vocab} and {merges} are not a byte-level BPE vocabulary: {error}") from None
    eod = tokenizer.token_to_id("<|endoftext|>")
    if eod is None:
        raise ValueError(f"{vocab} has no <|endoftext|> token, which ends documents: add it to the vocabulary")
    return FastTokenizer("GPT2BPETokenizer", tokenizer, eod, str(vocab))


TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "GPTSentencePieceTokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)


def build_tokenizer(
    type: str,  # the flag's own name
    model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
) -> Tokenizer:
    """Return the tokenizer that `--tokenizer-type type` names.

    model: local folder or file (`--tokenizer-model`); vocab_file, merge_file: for GPT2BPETokenizer;
    vocab_size: for NullTokenizer (ids without the end-of-document id) and TikTokenizer (all ids).
    Raises ValueError, one sentence, for an unknown type, a missing file or a missing package.
    """
    if type == "NullTokenizer":
        if vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if type == "HuggingFaceTokenizer":
        return _build_huggingface(model)
    if type == "GPT2BPETokenizer":
        return _build_gpt2(_existing(vocab_file, type, "--vocab-file"), _existing(merge_file, type, "--merge-file"))
    if type not in TOKENIZER_TYPES:
        raise ValueError(f"--tokenizer-type is {type!r}, allowed are {', '.join(TOKENIZER_TYPES)}")
    path = _existing(model, type, "--tokenizer-model")
    if type == "TikTokenizer":
        return TikTokenizer(path, vocab_size, tiktoken_pattern or "v2", tiktoken_num_special_tokens)
    return SentencePieceTokenizer(type, path, adds_start=type == "Llama2Tokenizer")
