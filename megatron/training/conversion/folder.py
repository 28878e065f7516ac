"""Folders that are written whole or not at all, and the files that travel beside the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.training.checkpointing_layout import METADATA, TRACKER, find_checkpoint
from megatron.training.conversion.hf_config import CONFIG_FILE

TOKENIZER_FOLDER = "tokenizer"
FLAGS_FILE = "train_flags.sh"
GENERATION_FILE = "generation_config.json"

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "tokenizer.model.v3")


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer. Raises ValueError where it has none."""
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ValueError(
            f"{folder} has no tokenizer (no {', '.join(_VOCABULARIES[:3])}): copy the tokenizer's files there"
        )
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    templates = folder / "additional_chat_templates"
    return files + ([templates] if templates.is_dir() else [])


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, config and generation config, byte by byte."""
    target.mkdir()
    others = [source / name for name in (CONFIG_FILE, GENERATION_FILE) if (source / name).is_file()]
    for path in [*tokenizer_files(source), *others]:
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


@contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """Give a new folder beside `target` that becomes `target` when the block ends well, and else is removed.

    A killed process leaves a folder whose name ends in .partial, which nothing reads and the next attempt removes.
    Raises ValueError for a target that exists and is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: give another place or remove it")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{parent}, where {target.name} would be written, does not exist: make it first")
    partial = parent / f"{target.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{partial} cannot be written ({error.strerror}): give a place that can") from None
    try:
        yield partial
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def checkpoint_folder(load: Path) -> Path:
    """Return the checkpoint that --load means: the newest of the folder, or the folder itself if it is one."""
    if (load / METADATA).is_file():
        return load
    found = find_checkpoint(load, None)
    if found is None:
        raise ValueError(f"{load} holds no checkpoint (no {TRACKER}): give the folder that --save wrote into")
    return found[0]
