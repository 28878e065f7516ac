"""Export: a checkpoint of ours becomes a folder that transformers' from_pretrained opens as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpointing_save import OUR_KEY
from megatron.training.config import ModelConfig
from megatron.training.conversion.architectures import Architecture, architecture_of, heads_of
from megatron.training.conversion.dist_checkpoint import LayerReader
from megatron.training.conversion.export_config import describe_model
from megatron.training.conversion.folder import (
    GENERATION_FILE,
    checkpoint_folder,
    tokenizer_files,
    whole_or_nothing,
)
from megatron.training.conversion.hf_config import CONFIG_FILE, HFConfig, read_config
from megatron.training.conversion.model_args import differences, fuses_gelu, model_of
from megatron.training.conversion.progress import ByteProgress
from megatron.training.conversion.safetensors_file import (
    DEFAULT_SHARD_BYTES,
    Entry,
    file_names,
    split_into_files,
    write_file,
    write_index,
)
from megatron.training.conversion.source import FLOATS
from megatron.training.conversion.weights import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export wrote."""

    architecture: str
    dtype: torch.dtype
    num_tensors: int
    num_files: int
    num_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """What the exported config is: the file of the original model, or one that describes the checkpoint.

    side_files: folder with tokenizer and generation config, None where there is none.
    is_original: whether the folder is the original model's, whose generation config goes with the weights.
    """

    config: HFConfig
    text: str
    architecture: Architecture
    side_files: Path | None
    is_original: bool
    notes: tuple[str, ...]


class OurModel:
    """A checkpoint of ours and the HuggingFace model that it is, tensors read when asked for."""

    def __init__(self, load: Path, hf: Path | None = None, architecture: Architecture | None = None) -> None:
        """hf: folder of the original model, for its config and tokenizer; found through --tokenizer-model if None.

        architecture: instead of the registry's.

        Raises ValueError, one sentence, for a checkpoint that is incomplete, damaged or not that model.
        """
        self.folder = checkpoint_folder(load)
        self.reader = LayerReader(self.folder)
        self.reader.verify()
        common = self.reader.common()
        self.args: dict[str, Any] = vars(common["args"]) if "args" in common else {}
        self.model: ModelConfig = model_of(self.args, self.folder)
        vocab_size = common.get(OUR_KEY, {}).get("vocab_size")
        self.template = find_template(self.model, self.args, self.folder, hf, architecture, vocab_size)
        self.vocab_rows = int(self.template.config.get("vocab_size"))
        self.rules: tuple[Rule, ...] = self.template.architecture.rules(self.model, self.vocab_rows)
        self.dtype = self._check()

    def _check(self) -> torch.dtype:
        dtypes = set()
        for rule in self.rules:
            shape, dtype = self.reader.info(rule.key, rule.layer)
            is_padded = rule.kind == "vocabulary" and shape[0] >= rule.shape[0] and shape[1:] == rule.shape[1:]
            if shape != rule.shape and not is_padded:
                raise ValueError(
                    f"{self.folder} holds {rule.key} of shape {shape}, but its arguments mean {rule.shape}: they are "
                    "not the ones of these weights"
                )
            dtypes.add(dtype)
        wrong = [str(dtype) for dtype in dtypes if dtype not in FLOATS]
        if wrong or len(dtypes) > 1:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ValueError(
                f"{self.folder} holds weights of type {found}: it must be one of float32, bfloat16, float16"
            )
        return dtypes.pop()

    def unpack(self, rule: Rule) -> list[torch.Tensor]:
        """Read one of our tensors and return HuggingFace's, padding of the vocabulary left out."""
        rows = rule.shape[0] if rule.kind == "vocabulary" else None
        packed = self.reader.read(rule.key, rule.layer, rows)
        return self.template.architecture.unpack(rule, packed, heads_of(self.model))


def find_template(
    model: ModelConfig,
    args: Mapping[str, Any],
    folder: Path,
    hf: Path | None,
    architecture: Architecture | None,
    vocab_size: int | None = None,
) -> Template:
    """Return the config to export with: of `hf`, of the tokenizer's folder, or one made from the arguments.

    vocab_size: ids of the tokenizer that trained, None where the checkpoint does not know.
    """
    if hf is not None:
        return _original(model, args, folder, hf, architecture)
    named = args.get("tokenizer_model")
    beside = Path(named) if named and Path(named).is_dir() else None
    reason = "no config.json of an original model was found"
    if beside is not None and (beside / CONFIG_FILE).is_file():
        try:
            return _original(model, args, folder, beside, architecture)
        except ValueError as error:  # a model that was born here may use the tokenizer of any other
            reason = f"the model beside the tokenizer is another one ({error})"
    rows = args.get("unpadded_vocab_size") or vocab_size or args.get("padded_vocab_size")
    config, text = describe_model(model, rows, folder)
    known = architecture_of(config.architecture, str(folder))
    notes = (f"{reason}: a config that describes the checkpoint is written",)
    return Template(config, text, known, beside, False, notes)


def _original(
    model: ModelConfig, args: Mapping[str, Any], folder: Path, source: Path, architecture: Architecture | None
) -> Template:
    """Return the config of a HuggingFace folder. Raises ValueError, one sentence, where that is another model."""
    config = read_config(source)
    known = architecture or architecture_of(config.architecture, str(source))
    different = differences(model, known.model(config))
    rows, theirs = args.get("unpadded_vocab_size"), config.get("vocab_size")
    padded = args.get("padded_vocab_size")
    if rows not in (None, theirs):
        different.append(f"vocab_size {rows} and {theirs}")
    elif padded is not None and padded < theirs:
        different.append(f"vocab_size of at most {padded} and {theirs}")
    if different:
        raise ValueError(
            f"{folder} is not the model of {source}/{CONFIG_FILE}, they differ in {'; '.join(different)}: name the "
            "folder of its original with --hf"
        )
    return Template(config, (source / CONFIG_FILE).read_text(encoding="utf-8"), known, source, True, ())


def export_checkpoint(
    load: Path, out: Path, *, hf: Path | None = None, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Exported:
    """Write a folder for from_pretrained: weights, index, config, generation config, tokenizer; or nothing at all.

    Memory: one of our tensors and its parts. Raises ValueError, one sentence, for a checkpoint that cannot be exported.
    """
    ours = OurModel(load, hf)
    owner = {part.name: (rule, i) for rule in ours.rules for i, part in enumerate(rule.parts)}
    entries = [Entry(part.name, part.shape, ours.dtype) for rule in ours.rules for part in rule.parts]
    num_bytes = sum(entry.num_bytes for entry in entries)
    progress = ByteProgress("exporting", num_bytes)
    last: list[tuple[Rule, list[torch.Tensor]]] = []

    def read(name: str) -> torch.Tensor:
        rule, place = owner[name]
        if not last or last[0][0] is not rule:
            last[:] = []  # the parts of one rule follow each other, so one read serves them all
            last[:] = [(rule, ours.unpack(rule))]
        tensor = last[0][1][place]
        progress.add(tensor.numel() * tensor.element_size())
        return tensor

    files = split_into_files(entries, max_shard_bytes)
    names = file_names(len(files))
    with whole_or_nothing(out) as partial:
        for name, part in zip(names, files):
            write_file(partial / name, part, read)
        if len(files) > 1:
            write_index(partial, dict(zip(names, files)))
        (partial / CONFIG_FILE).write_text(_config_text(ours), encoding="utf-8")
        notes = ours.template.notes + _activation_notes(ours) + _copy_side_files(ours.template, partial)
    return Exported(
        architecture=ours.template.architecture.name,
        dtype=ours.dtype,
        num_tensors=len(entries),
        num_files=len(files),
        num_bytes=num_bytes,
        notes=notes,
    )


def _config_text(ours: OurModel) -> str:
    """Return the template's text, changed only where the weights have another type than it says."""
    raw, dtype = dict(ours.template.config.raw), str(ours.dtype).removeprefix("torch.")
    name = "torch_dtype" if "torch_dtype" in raw else "dtype"
    if raw.get(name) == dtype:
        return ours.template.text
    return json.dumps({**raw, name: dtype}, indent=2) + "\n"


def _activation_notes(ours: OurModel) -> tuple[str, ...]:
    """Say what was taken for granted, since no checkpoint keeps the device that it was trained on."""
    if not fuses_gelu(ours.args):
        return ()
    name = ours.template.config.get("hidden_act")
    return (
        f"hidden_act is {name}, the tanh approximation that the fused GELU of GPUs computes: write gelu into "
        f"{CONFIG_FILE} if the model was trained on CPUs without --use-cpu",
    )


def _copy_side_files(template: Template, target: Path) -> tuple[str, ...]:
    source = template.side_files
    try:
        files = tokenizer_files(source) if source is not None else []
    except ValueError:
        files = []
    for path in files:
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
    if source is not None and template.is_original and (source / GENERATION_FILE).is_file():
        shutil.copyfile(source / GENERATION_FILE, target / GENERATION_FILE)
    return () if files else ("no tokenizer was found: copy its files beside the weights",)
