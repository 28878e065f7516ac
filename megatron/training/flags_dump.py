"""Finished settings as text (Megatron's dump of all arguments) and as Megatron's namespace for checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron.training.config import TrainingConfig
from megatron.training.flags import SECTIONS

_DOTS = 48


def flat_values(config: TrainingConfig) -> dict[str, object]:
    """Return every setting by its field's name, sections dropped (names are unique), tuples as lists."""
    values: dict[str, object] = {}
    for section in SECTIONS:
        part = getattr(config, section)
        values |= {field.name: _plain(getattr(part, field.name)) for field in dataclasses.fields(part)}
    values["world_size"] = config.world_size
    values["data_parallel_size"] = config.data_parallel_size
    values["virtual_pipeline_model_parallel_size"] = config.virtual_pipeline_model_parallel_size
    values["params_dtype"] = config.precision.params_dtype
    return values


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def config_dump(config: TrainingConfig) -> list[str]:
    """Return the lines of Megatron's dump: one argument a line, sorted, dots up to its value."""
    lines = ["------------------------ arguments ------------------------"]
    for name, value in sorted(flat_values(config).items(), key=lambda item: item[0].lower()):
        lines.append(f"  {name} {'.' * (_DOTS - len(name))} {value}")
    lines.append("-------------------- end of arguments ---------------------")
    return lines


def notes_list(config: TrainingConfig) -> list[str]:
    """Return the numbered list of what was accepted without effect, mapped or changed; empty without any."""
    if not config.notes:
        return []
    return ["flags that were accepted without effect, mapped or changed:"] + [
        f"  {number}. {note}" for number, note in enumerate(config.notes, start=1)
    ]


def to_megatron_namespace(config: TrainingConfig) -> dict[str, object]:
    """Return the settings under the names that Megatron's checkpoints carry in `args`: plain values only."""
    values = flat_values(config)
    model, parallel = config.model, config.parallel
    positions = model.position_embedding_type
    renamed: Mapping[str, object] = {
        "add_position_embedding": positions == "learned_absolute",
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "expert_model_parallel_size": 1,
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "num_experts": None,
        "transformer_pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "use_dist_ckpt": True,
        "use_rotary_position_embeddings": positions == "rope",
    }
    return values | dict(renamed)
