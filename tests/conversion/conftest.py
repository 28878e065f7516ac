"""Tiny models, converted once per session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


@dataclass(frozen=True)
class Converted:
    """A HuggingFace folder and our checkpoint of it. Tests must not write into either."""

    hf: Path
    ours: Path


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Return a function (name of tiny_models.MODELS, dtype) -> Converted."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    from megatron.training.conversion.importer import import_checkpoint
    from tests.conversion import tiny_models

    made = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            # Several small files, as large models have.
            tiny_models.save(tiny_models.build(name), folder / "hf", dtype, shard="100KB")
            import_checkpoint(folder / "hf", folder / "ours")
            made[name, dtype] = Converted(folder / "hf", folder / "ours")
        return made[name, dtype]

    return get
