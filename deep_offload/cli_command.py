"""The command that `plan` ends with: the planned run for pretrain_gpt.py, capital words to be filled in."""

from __future__ import annotations

from dataclasses import replace

from deep_offload.config import OffloadConfig
from deep_offload.model.choose import FEW_SLOTS
from deep_offload.model.dry_run import Forecast
from deep_offload.model.gpt import GPTShape
from deep_offload.model.planning import token_budget
from deep_offload.model.run import RunShape
from deep_offload.plan.ops import Place

PLACEHOLDERS = ("MASTER_ADDR", "DATA_PATH", "TOKENIZER", "TRAIN_ITERS", "LR")
"""Words that the reader replaces, those of them that a command has."""


def command(result: Forecast, config: OffloadConfig, tokens: float | None = None) -> str:
    """A command that starts the planned run, on each host the same, once its capital words are filled in.

    tokens: budget of the whole training, from which its length follows.
    """
    run = result.run
    words = [_launcher(result) + " pretrain_gpt.py", *_model_words(run.model, run), *_run_words(run)]
    length = "TRAIN_ITERS" if tokens is None else str(token_budget(result, tokens).iterations)
    words += [
        "--data-path DATA_PATH --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER",
        f"--padded-vocab-size {run.model.padded_vocab_size} --train-iters {length} --lr LR",
    ]
    changed = _changed_flags(_with_chosen_slots(config, result))
    # Where all state stays on the GPU a given flag may still change its bytes.
    if result.is_offloaded or changed:
        words.append(" ".join(["--interleaved-offload", *changed]))
    return " \\\n  ".join(words)


def _launcher(result: Forecast) -> str:
    world_size, per_host = result.run.parallel.world_size, result.ranks_per_host
    if world_size == 1:
        return "python"
    launcher = f"torchrun --nproc-per-node {per_host}"
    if world_size == per_host:
        return launcher
    return f"{launcher} --nnodes {world_size // per_host} --rdzv-backend c10d --rdzv-endpoint MASTER_ADDR:29500"


def _model_words(shape: GPTShape, run: RunShape) -> list[str]:
    words = [
        f"--num-layers {shape.num_layers} --hidden-size {shape.hidden_size} --ffn-hidden-size {shape.ffn_hidden_size}",
        f"--num-attention-heads {shape.num_attention_heads} --kv-channels {shape.kv_channels}",
    ]
    if shape.num_query_groups != shape.num_attention_heads:
        words.append(f"--group-query-attention --num-query-groups {shape.num_query_groups}")
    kind = ["--swiglu"] if shape.swiglu else []
    kind += [f"--normalization {shape.normalization}"]
    kind += [] if shape.add_bias_linear else ["--disable-bias-linear"]
    positions = "rope" if run.has_rope else "learned_absolute" if shape.positions else "none"
    words.append(" ".join([*kind, f"--position-embedding-type {positions}"]))
    words += [] if shape.tie_embeddings else ["--untie-embeddings-and-output-weights"]
    return [*words, "--attention-dropout 0 --hidden-dropout 0"]


def _run_words(run: RunShape) -> list[str]:
    parallel = run.parallel
    words = [
        f"--tensor-model-parallel-size {parallel.tensor} --pipeline-model-parallel-size {parallel.pipeline}",
        f"--seq-length {run.seq_length} --max-position-embeddings {run.model.positions or run.seq_length}",
        f"--micro-batch-size {run.micro_batch_size} --global-batch-size {run.global_batch_size}",
        _precision_words(run),
        "--use-distributed-optimizer --overlap-grad-reduce",
    ]
    if run.recompute.granularity == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif run.recompute.granularity == "selective":
        words.append("--recompute-granularity selective")
    return words


def _precision_words(run: RunShape) -> str:
    if run.is_bf16:
        return "--bf16" + (" --grad-reduce-in-bf16" if run.grad_bytes == 2 else "")
    return "--fp16" + (" --accumulate-allreduce-grads-in-fp32" if run.grad_bytes == 4 else "")


def _with_chosen_slots(config: OffloadConfig, result: Forecast) -> OffloadConfig:
    """Where the number of slots was open, the chosen one: of stages that would use more, the smallest, else the
    largest.

    Training would choose anew and knows less: neither its activations nor its compute before the first step.
    """
    if config.offload_num_slots != "auto" or config.offload_resident_fraction != 0:
        return config
    placed = [(stage.choice.num_slots, stage.choice.placement.count(Place.GPU)) for stage in result.stages]
    most, streamed = max(placed)
    if streamed <= FEW_SLOTS:
        return config
    # A stage with a slot for each streamed subgroup says nothing of others.
    return replace(config, offload_num_slots=min((slots for slots, count in placed if slots < count), default=most))


def _changed_flags(config: OffloadConfig) -> list[str]:
    default = OffloadConfig(interleaved_offload=True)
    names = [name for name in OffloadConfig.__dataclass_fields__ if name.startswith("offload_")]
    changed = [name for name in names if getattr(config, name) != getattr(default, name)]
    return [f"--{name.replace('_', '-')} {getattr(config, name)}" for name in changed]
