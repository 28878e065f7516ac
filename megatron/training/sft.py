"""Instruction data (--sft): chats in JSONL files, through the tokenizer's chat template, packed into full samples.

A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}. The loss
counts what the assistant says. Chats of one sample do not attend to each other: positions start anew with each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from megatron.training.config import TrainingConfig
from megatron.training.data_check import NAMES, Wanted

Message = dict[str, str]
_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation and the place it comes from, such as `chats.jsonl line 3`."""

    messages: tuple[Message, ...]
    place: str


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """Tokens of a conversation, and for each whether the assistant says it."""

    tokens: list[int]
    is_target: list[bool]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """One sample of `seq_length` positions: int64 tokens, labels and position_ids, loss_mask 0 or 1."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


def read_chats(paths: Sequence[str]) -> list[Chat]:
    """Return the conversations of JSONL files. Raises ValueError naming file and line for anything else."""
    chats = []
    for path in paths:
        try:
            # Not splitlines: it also ends lines at characters that JSON allows in a text, such as U+2028.
            lines = Path(path).read_bytes().decode("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise ValueError(f"--sft reads chats from {path}, which cannot be read: {reason}") from None
        chats += [_chat(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    return chats


def _chat(line: str, place: str) -> Chat:
    try:
        messages = json.loads(line)["messages"]
        plain = tuple({"role": str(m["role"]), "content": m["content"]} for m in messages)
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f'{place} is no chat: --sft wants {{"messages": [{{"role": "user", "content": "..."}}, ...]}} on each line'
        ) from None
    if not all(isinstance(message["content"], str) for message in plain):
        raise ValueError(f"{place} has a message whose content is no text: only text is trained on")
    if not any(message["role"] == _ASSISTANT for message in plain):
        raise ValueError(f"{place} has no message of the role assistant: there is nothing to learn in it")
    return Chat(plain, place)


class ChatEncoder:
    """The chat template of a tokenizer's folder."""

    def __init__(self, source: str) -> None:
        """Raises ValueError, one sentence, for a tokenizer that has no template or cannot say where tokens begin."""
        try:
            import transformers
        except ImportError:
            raise ValueError("--sft needs the package transformers: pip install 'deep-offload[hf]'") from None
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError):
            raise ValueError(f"--tokenizer-model {source} holds no tokenizer that transformers reads") from None
        if not self._tokenizer.chat_template:
            raise ValueError(f"--tokenizer-model {source} has no chat template: put a chat_template.jinja beside it")
        if not self._tokenizer.is_fast:
            raise ValueError(f"--tokenizer-model {source} has no tokenizer.json, which --sft needs: convert it to one")

    def encode(self, chat: Chat) -> EncodedChat:
        """Return tokens and targets: all that the template writes for a message of the assistant, its end included."""
        messages = list(chat.messages)
        text = self._render(messages, chat.place)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_target = [False] * len(encoded["input_ids"])
        for number, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            if number == 0:
                start = self._first_words(message, text, chat.place)
            else:
                start = self._length(messages[:number], text, chat.place, asks=True)
            end = self._length(messages[: number + 1], text, chat.place, asks=False)
            for place, (first, last) in enumerate(encoded["offset_mapping"]):
                is_target[place] |= start <= first < end and last > first
        return EncodedChat(list(encoded["input_ids"]), is_target)

    def _render(self, messages: list[Message], place: str, asks: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"{place}: the chat template refuses this chat ({roles}): {error}") from None

    def _first_words(self, message: Message, text: str, place: str) -> int:
        """Return where an answer that stands first begins in the whole: behind what does not depend on its words.

        There is no chat before it whose length could be taken: transformers and many templates refuse an empty one.
        """
        other = {**message, "content": "b" if message["content"].lstrip()[:1] == "a" else "a"}
        prompt = os.path.commonprefix([self._render([message], place), self._render([other], place)])
        return len(prompt) if text.startswith(prompt) else 0

    def _length(self, messages: list[Message], text: str, place: str, asks: bool) -> int:
        """Return the characters that a part of the chat takes at the start of the whole."""
        part = self._render(messages, place, asks)
        if not text.startswith(part):
            raise ValueError(
                f"{place}: the chat template writes earlier messages differently once later ones follow, so what the "
                "assistant says cannot be found: split the chat after each answer, or change the template"
            )
        return len(part)


def pack(chats: Sequence[EncodedChat], seq_length: int, padding: int) -> Iterator[PackedSample]:
    """Yield samples filled with whole chats in their order; what does not fit starts the next one.

    A chat longer than a sample is cut there. padding: the token at the end of samples, without loss.
    """
    rows: list[list[int]] = [[], [], [], []]
    for chat in chats:
        length = min(len(chat.tokens) - 1, seq_length)
        if length < 1 or not any(chat.is_target[1 : length + 1]):
            continue
        if len(rows[0]) + length > seq_length:
            yield _sample(rows, seq_length, padding)
            rows = [[], [], [], []]
        rows[0] += chat.tokens[:length]
        rows[1] += chat.tokens[1 : length + 1]
        rows[2] += map(int, chat.is_target[1 : length + 1])
        rows[3] += range(length)
    if rows[0]:
        yield _sample(rows, seq_length, padding)


def _sample(rows: list[list[int]], seq_length: int, padding: int) -> PackedSample:
    rest = seq_length - len(rows[0])
    fills = ([padding] * rest, [padding] * rest, [0] * rest, list(range(rest)))
    tokens, labels, mask, positions = (torch.tensor(row + fill) for row, fill in zip(rows, fills))
    return PackedSample(tokens, labels, mask.float(), positions)


class ChatDataset(torch.utils.data.Dataset):
    """`num_samples` samples: passes over the packed chats, each pass in its own order."""

    def __init__(self, samples: Sequence[PackedSample], num_samples: int, seed: int) -> None:
        self._samples, self._num_samples, self._seed = samples, num_samples, seed
        self._order: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, place = divmod(int(index), len(self._samples))
        if self._order is None or self._order[0] != number:
            generator = torch.Generator().manual_seed(self._seed + number)
            self._order = (number, torch.randperm(len(self._samples), generator=generator).tolist())
        sample = self._samples[self._order[1][place]]
        return {name: getattr(sample, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}


def split_chats(config: TrainingConfig) -> list[list[Chat]]:
    """Return the chats of training, validation and test: --data-path cut by --split, or a flag for each."""
    data = config.data
    if data.data_path:
        chats = read_chats(data.data_path)
        assert data.split is not None, "DataConfig fills the split beside --data-path"
        weights = [float(part) for part in data.split.split(",")]
        ends = [round(len(chats) * share / sum(weights)) for share in accumulate(weights)]
        return [chats[start:end] for start, end in zip([0, *ends], ends)]
    return [read_chats(paths) for paths in (data.train_data_path, data.valid_data_path, data.test_data_path)]


def check_chats(config: TrainingConfig, wanted: Wanted) -> tuple[Wanted, tuple[str, ...], tuple[str, ...]]:
    """Return the samples that each split will have, a line for each, and notes.

    Splits without chats have none. Raises ValueError for files that are no chats, and for training without any.
    """
    if config.data.tokenizer_type != "HuggingFaceTokenizer":
        raise ValueError("--sft needs the chat template of --tokenizer-type HuggingFaceTokenizer: use that")
    ChatEncoder(config.data.tokenizer_model or "")
    splits = split_chats(config)
    if wanted[0] and not splits[0]:
        raise ValueError("--sft has no chats to train on: give --data-path FILE.jsonl with chats, or another --split")
    samples = [count if chats else 0 for count, chats in zip(wanted, splits)]
    notes = tuple(
        f"there are no chats for {name}, which is left out"
        for name, chats, count in zip(NAMES, splits, wanted)
        if count and not chats
    )
    lines = tuple(f"chats for {name}: {len(chats)}" for name, chats in zip(NAMES, splits) if chats)
    return (samples[0], samples[1], samples[2]), lines, notes


def build_chat_datasets(
    config: TrainingConfig, num_samples: Sequence[int], end_of_document: int
) -> list[torch.utils.data.Dataset | None]:
    """Return the datasets of the three splits, None where a split takes no samples."""
    encoder = ChatEncoder(config.data.tokenizer_model or "")
    datasets: list[torch.utils.data.Dataset | None] = []
    for chats, count in zip(split_chats(config), num_samples):
        encoded = [encoder.encode(chat) for chat in chats] if count else []
        samples = list(pack(encoded, config.model.seq_length, end_of_document))
        if count and not samples:
            raise ValueError(
                f"no chat has a word of the assistant within --seq-length {config.model.seq_length} tokens: raise it"
            )
        datasets.append(ChatDataset(samples, count, config.lifecycle.seed) if count else None)
    return datasets
