"""Verify: a checkpoint of ours against the HuggingFace model that it should be, tensors first, then logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.training.conversion.architectures import Architecture
from megatron.training.conversion.exporter import OurModel
from megatron.training.conversion.importer import HFModel, open_model
from megatron.training.conversion.model_args import training_config
from megatron.training.conversion.parity import (
    BOUND,
    Parity,
    compare,
    load_chunk,
    model_logits,
    reference_logits,
    sample_tokens,
    single_process,
)
from megatron.training.conversion.progress import ByteProgress
from megatron.training.conversion.weights import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What a verification found. different: names of our tensors that are not bit for bit the source's."""

    architecture: str
    num_tensors: int
    different: tuple[str, ...]
    num_tokens: int
    parity: Parity

    @property
    def is_good(self) -> bool:
        """Whether both tensors and logits agree."""
        return not self.different and self.parity.is_good

    def lines(self) -> list[str]:
        """Return the report."""
        parity = self.parity
        tensors = f"tensors: {self.num_tensors - len(self.different)} of {self.num_tensors} are equal bit for bit"
        if self.different:
            tensors += f", different are {', '.join(self.different[:3])}" + (", ..." if len(self.different) > 3 else "")
        return [
            f"architecture: {self.architecture}",
            tensors,
            f"logits in fp32 on {self.num_tokens} tokens: largest error {parity.error:.2e} of their standard deviation "
            f"(bound {BOUND:.0e}), same most likely token on {100 * parity.agreement:.2f} %",
            f"loss: {parity.reference_loss:.6f} in transformers, {parity.loss:.6f} here",
            "verified" if self.is_good else "NOT THE SAME MODEL",
        ]


def verify_checkpoint(
    hf: Path, load: Path, *, seq_length: int | None = None, architecture: Architecture | None = None
) -> Verified:
    """Compare; memory: the model twice in fp32. Our side is built from the checkpoint's own arguments.

    Raises ValueError, one sentence, where one of the two cannot be read.
    """
    source = open_model(hf, architecture)
    ours = OurModel(load, hf, architecture)
    different = different_tensors(source, ours)
    config = training_config(ours.model, ours.vocab_rows)
    tokens = sample_tokens(config, source.vocab_rows, seq_length)
    reference = reference_logits(hf, tokens)
    with single_process(config) as device:
        logits = model_logits(load_chunk(config, ours.folder, device), tokens, source.vocab_rows)
    return Verified(
        architecture=source.architecture.name,
        num_tensors=len(source.rules),
        different=different,
        num_tokens=tokens.numel(),
        parity=compare(reference, logits, tokens),
    )


def different_tensors(source: HFModel, ours: OurModel) -> tuple[str, ...]:
    """Return the names of our tensors that are not the packed tensors of the source, in values and dtype."""
    progress = ByteProgress("comparing", sum(part_bytes(source, rule) for rule in source.rules))
    different = []
    for rule in source.rules:
        rows = rule.shape[0] if rule.kind == "vocabulary" else None
        mine = ours.reader.read(rule.key, rule.layer, rows)
        theirs = source.pack(rule)
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            different.append(rule.key if rule.layer is None else f"{rule.key} of layer {rule.layer}")
        progress.add(part_bytes(source, rule))
    return tuple(different)


def part_bytes(source: HFModel, rule: Rule) -> int:
    """Return the bytes of what a rule makes."""
    return math.prod(rule.shape) * source.dtype.itemsize
