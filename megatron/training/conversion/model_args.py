"""A model's settings as flags for pretrain_gpt.py and as the arguments that a checkpoint keeps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.training.config import (
    BatchConfig,
    DataConfig,
    LifecycleConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.training.conversion.folder import FLAGS_FILE, TOKENIZER_FOLDER
from megatron.training.flags import all_flags

# Settings of a run that do not change the function which the weights compute.
NOT_THE_FUNCTION = (
    "seq_length",
    "max_position_embeddings",
    "group_query_attention",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "bias_gelu_fusion",
    "transformer_impl",
    "use_cpu_initialization",
    "apply_query_key_layer_scaling",
)
_WITH_ROPE_SCALING = "rope_scaling_"
_HIDDEN = ("transformer_impl", "use_cpu_initialization", "make_vocab_size_divisible_by")


def model_flags(model: ModelConfig) -> list[str]:
    """Return the flags of a model, one string each, defaults included where they are numbers."""
    out = []
    for flag in all_flags():
        value = getattr(model, flag.field) if flag.section == "model" else None
        if value is None or flag.field in _HIDDEN or _is_idle(model, flag.field):
            continue
        if isinstance(value, bool):
            if value != flag.default:
                out.append(flag.names[0])
        elif isinstance(value, tuple):
            out.append(f"{flag.names[0]} {','.join(map(str, value))}")
        else:
            out.append(f"{flag.names[0]} {value}")
    return out


def _is_idle(model: ModelConfig, field: str) -> bool:
    """Whether another flag would be needed to give this one a meaning."""
    if field == "num_query_groups":
        return not model.group_query_attention
    return field.startswith(_WITH_ROPE_SCALING) and not model.use_rope_scaling


def flags_script(model: ModelConfig, vocab_rows: int, parallel: ParallelConfig) -> str:
    """Return train_flags.sh: an array of flags for pretrain_gpt.py, beside the tokenizer that it names."""
    lines = model_flags(model)
    lines.append(f"--unpadded-vocab-size {vocab_rows}")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if getattr(parallel, name) > 1:
            lines.append(f"--{name.replace('_', '-')} {getattr(parallel, name)}")
    lines.append("--tokenizer-type HuggingFaceTokenizer")
    text = "".join(f"    {line}\n" for line in lines)
    return (
        "# Flags of this model. In bash:\n"
        f"#     source {FLAGS_FILE}\n"
        '#     python pretrain_gpt.py "${MODEL_FLAGS[@]}" --finetune --load FOLDER_OF_THIS_FILE ...\n'
        "# A flag that is given again later replaces the one here: --seq-length is free up to the longest position.\n"
        f'_here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)\n'
        f'MODEL_FLAGS=(\n{text}    --tokenizer-model "$_here/{TOKENIZER_FOLDER}"\n)\n'
    )


def read_flags_script(folder: Path) -> list[str]:
    """Return the words of the array in a folder's train_flags.sh, without starting a shell."""
    text = (folder / FLAGS_FILE).read_text(encoding="utf-8")
    array = text.split("MODEL_FLAGS=(", 1)[1].rsplit(")", 1)[0]
    return [word.replace("$_here", str(folder)) for word in shlex.split(array)]


def training_config(
    model: ModelConfig,
    vocab_rows: int,
    *,
    tokenizer: str | None = None,
    parallel: ParallelConfig | None = None,
    precision: PrecisionConfig | None = None,
) -> TrainingConfig:
    """Return settings of a run of this model, whose other sections have their defaults."""
    parallel = parallel or ParallelConfig()
    data = DataConfig(
        mock_data=True,
        tokenizer_type="HuggingFaceTokenizer" if tokenizer else None,
        tokenizer_model=tokenizer,
        unpadded_vocab_size=vocab_rows,
    )
    return TrainingConfig(
        model=model,
        data=data,
        batch=BatchConfig(micro_batch_size=1, train_iters=1),
        parallel=parallel,
        precision=precision or PrecisionConfig(),
        lifecycle=LifecycleConfig(use_cpu=True),
        world_size=parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size,
    ).with_vocab(vocab_rows)


def fuses_gelu(args: Mapping[str, Any]) -> bool:
    """Whether training with a checkpoint's arguments fused GELU with its bias, where no one said that CPUs trained."""
    others = ("swiglu", "squared_relu", "openai_gelu", "use_cpu")
    return (
        bool(args.get("bias_gelu_fusion", True))
        and bool(args.get("add_bias_linear", True))
        and not any(args.get(name) for name in others)
    )


def model_of(args: Mapping[str, Any], where: Path) -> ModelConfig:
    """Return the model that a checkpoint's arguments describe. Raises ValueError where they do not.

    GELU is the tanh approximation (openai_gelu) also where only the fusion on GPUs made it that.
    """
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    missing = [name for name in needed if args.get(name) is None]
    if missing:
        raise ValueError(f"{where} keeps no {', '.join(missing)} of its model: save it again with this program")
    known = {item.name: args[item.name] for item in fields(ModelConfig) if item.name in args}
    window = known.get("window_size")
    known["openai_gelu"] = bool(args.get("openai_gelu")) or fuses_gelu(args)
    return ModelConfig(**{**known, "window_size": None if window is None else tuple(window)})


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return the settings in which two models compute another function, such as `norm_epsilon 1e-05 and 1e-06`."""
    names = [item.name for item in fields(ModelConfig) if item.name not in NOT_THE_FUNCTION]
    return [
        f"{name} {getattr(ours, name)} and {getattr(theirs, name)}"
        for name in names
        if getattr(ours, name) != getattr(theirs, name) and not (_is_idle(ours, name) and _is_idle(theirs, name))
    ]
