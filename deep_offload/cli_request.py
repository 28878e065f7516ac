"""What `plan` and `simulate` are asked: their flags, checked, as one frozen request. Standard library only."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from deep_offload.config import OffloadConfig
from deep_offload.model.dry_run import ranks_per_host
from deep_offload.model.gpt import NAMED_SHAPES, SIZES, GPTShape, ParallelShape, named_shape, padded_to
from deep_offload.model.hardware import HardwareProfile
from deep_offload.model.machines import BUILT_IN_PROFILES, accelerator_of, has_bf16
from deep_offload.model.run import RecomputeShape, RunShape

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Without a named model all of these are needed."""

_SHAPE_FLAGS = (
    *_NEEDED,
    "ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
    "tie_embeddings",
    "swiglu",
    "normalization",
    "add_bias_linear",
    "position_embedding_type",
    "max_position_embeddings",
)
"""A named model sets all of these."""

_COUNTS = (
    *SIZES,
    "vocab_size",
    "max_position_embeddings",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
)


_MOST_LAYERS = 10_000
"""Every layer is laid out parameter by parameter: more of them would take minutes, and no model has so many."""

_MOST_GPUS = 10_000_000
"""More than any job has."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked. gpus None: the fewest that fit. is_cut: the parallel layout is given, not to be chosen.

    notes: lines on what was decided here, to be printed first.
    """

    run: RunShape
    config: OffloadConfig
    profile: HardwareProfile
    gpus: int | None
    is_cut: bool
    is_recompute_given: bool
    is_batch_given: bool
    tokens: float | None
    largest: bool
    show_alternatives: bool
    notes: tuple[str, ...] = ()


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """The model, the GPUs, the batch and the machine, with the meaning that pretrain_gpt.py gives them."""
    _add_model_flags(parser)
    add = parser.add_argument
    add("--gpus", default="1", help="number of GPUs; auto: the fewest that fit")
    add("--tensor-model-parallel-size", type=int, help="ranks that share each layer; not given: the least that fits")
    add("--pipeline-model-parallel-size", type=int, help="ranks in a pipeline; not given: the least that fits")
    add("--seq-length", type=int, default=2048, help="tokens of a sample; not given: 2048")
    add("--micro-batch-size", type=int, default=1, help="samples that a rank computes at once; not given: 1")
    add("--global-batch-size", type=int, help="not given: one micro-batch per data-parallel rank")
    types = parser.add_mutually_exclusive_group()
    types.add_argument("--bf16", action="store_true", help="bf16 parameters: the default where the GPU has bf16")
    types.add_argument("--fp16", action="store_true", help="fp16 parameters and a loss scale")
    add("--grad-buffer", choices=("bf16", "fp16", "fp32"), help="DDP's gradient buffer; not given: as the parameters")
    add("--recompute", choices=("none", "selective", "full"), help="not given: none, or full where only that fits")
    add(
        "--profile",
        help=f"a JSON file or one of {', '.join(BUILT_IN_PROFILES)}; not given: the newest measured one with a GPU, "
        "or h200",
    )
    add("--tokens", type=float, help="token budget of the whole training, such as 1e11")
    add("--largest", action="store_true", help="how many layers of this shape fit on the GPUs")
    add("--no-alternatives", action="store_true", help="only the run itself")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help=f"a known shape: {', '.join(NAMED_SHAPES)}; or give the sizes below")
    add("--num-layers", type=int, help="transformer layers")
    add("--hidden-size", type=int, help="width of the residual stream")
    add("--ffn-hidden-size", type=int, help="width of the MLP; not given: 8/3 of the hidden size, without SwiGLU 4")
    add("--num-attention-heads", type=int, help="query heads of a layer")
    add("--num-query-groups", type=int, help="key and value heads; not given: as many as query heads")
    add("--kv-channels", type=int, help="width of a head; not given: hidden size over heads")
    add("--vocab-size", type=int, help="rows of the embedding, padded here")
    add("--tie-embeddings", action="store_true", default=None, help="the output layer shares the embedding's weights")
    add("--swiglu", action=argparse.BooleanOptionalAction, help="gated MLP; not given: yes")
    add("--normalization", choices=("LayerNorm", "RMSNorm"), help="kind of norm; not given: RMSNorm")
    add("--add-bias-linear", action="store_true", default=None, help="linear layers have a bias; not given: none")
    add(
        "--position-embedding-type",
        choices=("rope", "learned_absolute", "none"),
        help="how positions are encoded; not given: rope",
    )
    add("--max-position-embeddings", type=int, help="rows of learned positions; not given: the sequence length")


def request_from(arguments: argparse.Namespace, config: OffloadConfig, profile: HardwareProfile) -> Request:
    """Check the command line. Raises ValueError, one sentence, for what cannot be."""
    for name in _COUNTS:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{_flag(name)} is {value}, it must be at least 1")
    if (arguments.num_layers or 1) > _MOST_LAYERS:
        raise ValueError(f"--num-layers is {arguments.num_layers}, allowed are numbers from 1 to {_MOST_LAYERS}")
    gpus = _gpus(arguments.gpus)
    is_cut = arguments.tensor_model_parallel_size is not None or arguments.pipeline_model_parallel_size is not None
    if profile.gpu_memory_bytes == 0 and (gpus is None or arguments.largest):
        raise ValueError(
            f"{'--largest' if arguments.largest else '--gpus auto'} needs the memory of a GPU, which hardware profile "
            f"{profile.name} does not know: give --profile one of a machine with GPUs"
        )
    run = _run(arguments, gpus, is_cut, profile)
    _check_types(config, run, profile)
    tokens = arguments.tokens
    if tokens is not None and not (tokens > 0 and math.isfinite(tokens)):
        raise ValueError(f"--tokens is {tokens}, it must be a finite number of more than 0")
    return Request(
        run=run,
        config=config,
        profile=profile,
        gpus=gpus,
        is_cut=is_cut,
        is_recompute_given=arguments.recompute is not None,
        is_batch_given=arguments.global_batch_size is not None,
        tokens=tokens,
        largest=arguments.largest,
        show_alternatives=not arguments.no_alternatives,
        notes=_notes(arguments, run, profile, gpus),
    )


def _check_types(config: OffloadConfig, run: RunShape, profile: HardwareProfile) -> None:
    """Refuse settings that no layout of the run could honor: a search would call them missing memory."""
    if config.offload_split_master == "on" and not run.is_bf16:
        if has_bf16(profile):
            why, change = "--fp16 was given", "drop --fp16 or leave it at auto"
        else:
            why, change = f"{accelerator_of(profile)} computes in fp16", "leave it at auto or off"
        raise ValueError(f"--offload-split-master on needs bf16 parameters, but {why}: {change}")
    if config.offload_grad_wire == "param" and run.grad_bytes == 4:
        raise ValueError(
            "--offload-grad-wire param sends gradients in the buffer's own 16-bit type, but --grad-buffer is fp32: "
            "drop --grad-buffer or leave the wire at auto"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _run(arguments: argparse.Namespace, gpus: int | None, is_cut: bool, profile: HardwareProfile) -> RunShape:
    tensor = arguments.tensor_model_parallel_size or 1  # None is the only other thing: 0 was refused
    pipeline = arguments.pipeline_model_parallel_size or 1
    if gpus is None and is_cut:
        raise ValueError("--gpus auto chooses the parallel layout: drop the parallel sizes or give --gpus a number")
    if gpus is not None and gpus % (tensor * pipeline):
        raise ValueError(
            f"--gpus {gpus} is not a multiple of tensor {tensor} times pipeline {pipeline}: change one of them"
        )
    parallel = ParallelShape(tensor=tensor, pipeline=pipeline, data=(gpus or 1) // (tensor * pipeline))
    shape = padded_to(_shape(arguments), tensor)
    parallel.check(shape)
    step, batch = arguments.micro_batch_size * parallel.data, arguments.global_batch_size
    is_bf16 = _is_bf16(arguments, profile)
    return RunShape(
        model=shape,
        parallel=parallel,
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        global_batch_size=step if batch is None else batch,
        grad_bytes=_grad_bytes(arguments.grad_buffer, is_bf16),
        is_bf16=is_bf16,
        overlap_grad_reduce=True,
        recompute=_recompute(arguments.recompute),
        has_rope=arguments.position_embedding_type in (None, "rope"),
    )


def _is_bf16(arguments: argparse.Namespace, profile: HardwareProfile) -> bool:
    if arguments.bf16 and not has_bf16(profile):
        raise ValueError(f"--bf16 is given, but {accelerator_of(profile)} does not compute in bf16: use --fp16")
    return not arguments.fp16 and has_bf16(profile)


def _grad_bytes(name: str | None, is_bf16: bool) -> int:
    own = "bf16" if is_bf16 else "fp16"
    if name not in (None, own, "fp32"):
        raise ValueError(f"--grad-buffer is {name!r}, allowed are {own} and fp32 with {own} parameters")
    return 4 if name == "fp32" else 2


def _gpus(text: str) -> int | None:
    if text == "auto":
        return None
    # isdigit() alone takes superscripts, which int() refuses, as it does thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_GPUS))
    if not is_number or not 1 <= int(text) <= _MOST_GPUS:
        raise ValueError(f"--gpus is {text!r}, allowed are auto and whole numbers from 1 to {_MOST_GPUS}")
    return int(text)


def _recompute(name: str | None) -> RecomputeShape:
    if name == "full":
        return RecomputeShape(granularity="full", method="uniform")
    return RecomputeShape(granularity="selective") if name == "selective" else RecomputeShape()


def _shape(arguments: argparse.Namespace) -> GPTShape:
    if arguments.model is not None:
        shape = named_shape(arguments.model)
        given = [name for name in _SHAPE_FLAGS if getattr(arguments, name) is not None]
        if given:
            raise ValueError(f"--model {arguments.model} already sets {_flag(given[0])}: give one of them")
        return shape
    missing = [_flag(name) for name in _NEEDED if getattr(arguments, name) is None]
    if missing:
        raise ValueError(f"the model's shape is incomplete: give --model, or also {', '.join(missing)}")
    heads, hidden = arguments.num_attention_heads, arguments.hidden_size
    if arguments.kv_channels is None and hidden % heads:
        raise ValueError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: change one of them"
        )
    swiglu = arguments.swiglu is not False
    return GPTShape(
        num_layers=arguments.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=arguments.ffn_hidden_size or _derived_width(hidden, swiglu),
        num_attention_heads=heads,
        num_query_groups=arguments.num_query_groups or heads,
        kv_channels=arguments.kv_channels or hidden // heads,
        padded_vocab_size=arguments.vocab_size,
        swiglu=swiglu,
        normalization=arguments.normalization or "RMSNorm",
        add_bias_linear=bool(arguments.add_bias_linear),
        tie_embeddings=bool(arguments.tie_embeddings),
        positions=_positions(arguments),
    )


def _derived_width(hidden: int, swiglu: bool) -> int:
    width = int(hidden * 8 / 3 / 64) * 64 if swiglu else 4 * hidden
    if width == 0:
        raise ValueError(
            f"--ffn-hidden-size is not given, and 8/3 of --hidden-size {hidden} in multiples of 64 is 0: give "
            "--ffn-hidden-size, or a --hidden-size of at least 24"
        )
    return width


def _positions(arguments: argparse.Namespace) -> int:
    rows = arguments.max_position_embeddings
    if arguments.position_embedding_type != "learned_absolute":
        if rows is not None:
            raise ValueError(
                f"--max-position-embeddings {rows} is for learned positions: add --position-embedding-type "
                "learned_absolute or drop it"
            )
        return 0
    if rows is not None and rows < arguments.seq_length:
        raise ValueError(
            f"--max-position-embeddings {rows} is less than --seq-length {arguments.seq_length}: change one of them"
        )
    return arguments.seq_length if rows is None else rows


def _notes(arguments: argparse.Namespace, run: RunShape, profile: HardwareProfile, gpus: int | None) -> tuple[str, ...]:
    notes = []
    if arguments.model is not None:
        # The nominal name overstates some sizes.
        notes.append(f"published {arguments.model.upper()} shape, {run.model.num_params / 1e9:.2f} B parameters")
    if not has_bf16(profile):
        name = accelerator_of(profile)
        notes.append(f"{name} does not compute in bf16: planned with --fp16, whose masters are not split")
    if gpus is not None and gpus > profile.num_gpus > 0 and gpus % profile.num_gpus:
        per_host = ranks_per_host(gpus, profile)
        notes.append(
            f"--gpus {gpus} does not fill hosts of {profile.num_gpus} GPUs: planned on {gpus // per_host} hosts with "
            f"{per_host} GPU(s) each"
        )
    return tuple(notes)
