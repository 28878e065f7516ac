"""Import: a HuggingFace folder becomes a release checkpoint, its tokenizer, and the flags to train it with."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpointing_layout import RELEASE, iteration_folder, write_file, write_tracker
from megatron.training.checkpointing_save import MODEL_METADATA, OUR_FORMAT, OUR_KEY, saved_arguments
from megatron.training.config import ModelConfig, ParallelConfig, PrecisionConfig
from megatron.training.conversion.architectures import Architecture, architecture_of, heads_of
from megatron.training.conversion.dist_checkpoint import Chunk, write_checkpoint
from megatron.training.conversion.folder import (
    FLAGS_FILE,
    TOKENIZER_FOLDER,
    copy_side_files,
    tokenizer_files,
    whole_or_nothing,
)
from megatron.training.conversion.hf_config import HFConfig, architecture_name, read_config, read_raw_config
from megatron.training.conversion.model_args import flags_script, training_config
from megatron.training.conversion.progress import ByteProgress
from megatron.training.conversion.source import FLOATS, Source
from megatron.training.conversion.weights import Rule

_TIED_OUTPUT = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What an import wrote. notes: sentences for the user."""

    architecture: str
    model: ModelConfig
    vocab_rows: int
    dtype: torch.dtype
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HFModel:
    """A HuggingFace folder whose tensors are all there, in the right shapes and in one dtype."""

    folder: Path
    config: HFConfig
    architecture: Architecture
    model: ModelConfig
    vocab_rows: int
    dtype: torch.dtype
    source: Source
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]

    def pack(self, rule: Rule) -> torch.Tensor:
        """Read what a rule names and return our tensor."""
        parts = [self.source.read(part.name) for part in rule.parts]
        return self.architecture.pack(rule, parts, heads_of(self.model)).contiguous()


def open_model(folder: Path, architecture: Architecture | None = None) -> HFModel:
    """Return a folder's model after reading its headers, no tensors.

    architecture: instead of the registry's. Raises ValueError, one sentence, for what is missing, unknown or wrong.
    """
    raw = read_raw_config(folder)
    known = architecture or architecture_of(architecture_name(raw, str(folder)), str(folder))
    config = read_config(folder)
    model, rows = known.model(config), int(config.get("vocab_size"))
    source, rules = Source(folder), known.rules(model, rows)
    _check_names(source, rules, known)
    notes = _check_tied(source, rules, known)
    dtype = _check_tensors(source, rules)
    return HFModel(folder, config, known, model, rows, dtype, source, rules, notes)


def _check_names(source: Source, rules: tuple[Rule, ...], known: Architecture) -> None:
    wanted = {part.name for rule in rules for part in rule.parts}
    missing = sorted(wanted - source.tensors.keys())
    if missing:
        raise ValueError(
            f"{source.folder} lacks {_some(missing)}, which its config.json asks for: fetch all files again"
        )
    extra = sorted(
        name for name in source.tensors.keys() - wanted if not known.ignored.search(name) and name not in _TIED_OUTPUT
    )
    if extra:
        raise ValueError(
            f"{source.folder} holds {_some(extra)}, which a {known.name} has not: its config.json is not the one of "
            "these weights, or they are of an extended model that is not built here"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def _check_tied(source: Source, rules: tuple[Rule, ...], known: Architecture) -> tuple[str, ...]:
    """A tied model may still carry its output layer, if that equals the embedding."""
    wanted = {part.name for rule in rules for part in rule.parts}
    for name in _TIED_OUTPUT:
        if name in source.tensors and name not in wanted:
            embedding = rules[0].parts[0].name
            if not torch.equal(source.read(name), source.read(embedding)):
                raise ValueError(
                    f"{source.folder} ties its output layer to the embedding, but {name} differs from {embedding}: set "
                    "tie_word_embeddings to false in config.json if the output layer is its own"
                )
            return (f"{name} equals the embedding, to which it is tied: it is not stored twice",)
    return ()


def _check_tensors(source: Source, rules: tuple[Rule, ...]) -> torch.dtype:
    dtypes: dict[torch.dtype, str] = {}
    for part in (part for rule in rules for part in rule.parts):
        info = source.tensors[part.name]
        if info.shape != part.shape:
            raise ValueError(
                f"the tensor {part.name} in {info.file} has the shape {info.shape}, config.json means {part.shape}: "
                "it is not the config of these weights"
            )
        if info.dtype not in FLOATS:
            raise ValueError(
                f"the tensor {part.name} in {info.file} is no float32, bfloat16 or float16 tensor: take an unquantized "
                "checkpoint"
            )
        dtypes.setdefault(info.dtype, part.name)
    if len(dtypes) > 1:
        (one, name), (other, other_name) = list(dtypes.items())[:2]
        raise ValueError(
            f"{source.folder} mixes types, {name} is {_plain(one)} and {other_name} {_plain(other)}: save it in one"
        )
    return next(iter(dtypes))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def import_checkpoint(
    hf: Path,
    save: Path,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    architecture: Architecture | None = None,
) -> Imported:
    """Write SAVE/release, SAVE/tokenizer, SAVE/train_flags.sh and the tracker; on any error SAVE does not appear.

    Memory: one of our tensors and its parts. Raises ValueError, one sentence, for a source that cannot be converted.
    """
    source = open_model(hf, architecture)
    tokenizer_files(hf)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor_parallel_size, pipeline_model_parallel_size=pipeline_parallel_size
    )
    precision = PrecisionConfig(bf16=source.dtype == torch.bfloat16, fp16=source.dtype == torch.float16)
    tokenizer = os.fspath(save.absolute() / TOKENIZER_FOLDER)
    run = training_config(source.model, source.vocab_rows, tokenizer=tokenizer, parallel=parallel, precision=precision)
    chunks = [_chunk(source, rule) for rule in source.rules]
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    progress = ByteProgress("importing", num_bytes)
    with whole_or_nothing(save) as partial:
        folder = iteration_folder(partial, RELEASE)
        folder.mkdir()
        write_checkpoint(folder, chunks, _common(saved_arguments(run)), progress.add)
        copy_side_files(hf, partial / TOKENIZER_FOLDER)
        write_file(partial / FLAGS_FILE, flags_script(source.model, source.vocab_rows, parallel).encode())
        write_tracker(partial, RELEASE)
    return Imported(
        architecture=source.architecture.name,
        model=source.model,
        vocab_rows=source.vocab_rows,
        dtype=source.dtype,
        num_tensors=len(chunks),
        num_bytes=num_bytes,
        notes=source.notes,
    )


def _chunk(source: HFModel, rule: Rule) -> Chunk:
    return Chunk(
        key=rule.key,
        shape=rule.shape,
        dtype=source.dtype,
        make=lambda: source.pack(rule),
        layer=rule.layer,
        num_layers=source.model.num_layers,
    )


def _common(args: dict[str, Any]) -> dict[str, Any]:
    progress = {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    return {
        "args": Namespace(**args, **progress),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": dict(MODEL_METADATA),
        OUR_KEY: {"format": OUR_FORMAT, "data": {}, **progress},
    }
