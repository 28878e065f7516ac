"""What flags do to each other before the settings are built: Megatron's own rules, and ours. Standard library only.

Each rule reads and changes a `Draft`. Rules that concern finished values only live in the config classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deep_offload.config import OffloadConfig
from megatron.training.config_model import require
from megatron.training.flags_accepted import NOT_YET


@dataclass(slots=True)
class Draft:
    """What was given, before it becomes a frozen TrainingConfig."""

    values: dict[str, object] = field(default_factory=dict)
    """Field name: value. Only what was given or what a rule decided."""

    typed: dict[str, str] = field(default_factory=dict)
    """Field name: the spelling of the flag that set it."""

    mapped: dict[str, list[str]] = field(default_factory=dict)
    """Flag of `flags_accepted.MAPPED`: its words."""

    notes: list[str] = field(default_factory=list)
    """Sentences for start-up."""

    def get(self, name: str, default: object = None) -> object:
        """Return a value that was given, or `default`."""
        return self.values.get(name, default)


def apply_rules(draft: Draft) -> None:
    """Run every rule. Raises ValueError, one sentence, for flags that contradict each other."""
    for rule in _RULES:
        rule(draft)


def _position_flags(draft: Draft) -> None:
    kind = draft.get("position_embedding_type")
    if "--use-rotary-position-embeddings" in draft.mapped:
        require(
            kind in (None, "rope"),
            f"--use-rotary-position-embeddings and --position-embedding-type {kind} exclude each other: give only one",
        )
        kind = draft.values["position_embedding_type"] = "rope"
    if "--no-position-embedding" in draft.mapped:
        require(
            kind in ("rope", "none"),
            "--no-position-embedding needs --position-embedding-type rope or none: add it",
        )
        draft.notes.append(
            f"--no-position-embedding: accepted, no effect because --position-embedding-type {kind} learns none"
        )
    if draft.get("reset_position_ids") and kind in ("rope", "none"):
        reason = "rope counts places in the sample" if kind == "rope" else "--position-embedding-type none learns none"
        draft.notes.append(
            f"--reset-position-ids: accepted, no effect because {reason}; use --reset-attention-mask to keep documents "
            "apart"
        )


def _attention_flags(draft: Draft) -> None:
    if "num_query_groups" in draft.values and not draft.get("group_query_attention"):
        draft.notes.append(
            f"--num-query-groups {draft.values.pop('num_query_groups')}: accepted, no effect because "
            "--group-query-attention is not given, as in Megatron"
        )


def _recompute_flags(draft: Draft) -> None:
    if "--recompute-activations" in draft.mapped:
        granularity = draft.get("recompute_granularity")
        require(
            granularity in (None, "selective"),
            f"--recompute-activations and --recompute-granularity {granularity} exclude each other: give only one",
        )
        draft.values["recompute_granularity"] = "selective"


def _tokenizer_flags(draft: Draft) -> None:
    path = draft.mapped.get("--tokenizer-name-or-path")
    if path is not None and draft.get("tokenizer_model") is None:
        draft.values["tokenizer_model"] = path[0]
    words = draft.mapped.get("--patch-tokenizer-type")
    if words is None:
        return
    if draft.get("tokenizer_type") is None:
        source = draft.get("tokenizer_model") or draft.get("load")
        require(
            source is not None,
            f"--patch-tokenizer-type {words[0]} needs a tokenizer's folder: add --tokenizer-model DIR",
        )
        draft.values.update(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=source)
        draft.notes.append(
            f"--patch-tokenizer-type {words[0]}: mapped to --tokenizer-type HuggingFaceTokenizer "
            f"--tokenizer-model {source}"
        )
    else:
        draft.notes.append(
            f"--patch-tokenizer-type {words[0]}: accepted, no effect because --tokenizer-type chooses the tokenizer"
        )


def _precision_flags(draft: Draft) -> None:
    main_grads = (draft.mapped.get("--main-grads-dtype") or ["fp32"])[0]
    require(main_grads in ("fp32", "bf16"), f"--main-grads-dtype is {main_grads!r}, allowed are fp32 and bf16")
    if main_grads == "bf16":
        require(
            not draft.get("accumulate_allreduce_grads_in_fp32"),
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give only one",
        )
        require(bool(draft.get("bf16")), "--main-grads-dtype bf16 needs --bf16: add it")
        draft.values["grad_reduce_in_bf16"] = True
    elif "--main-grads-dtype" in draft.mapped:
        draft.notes.append(
            "--main-grads-dtype fp32: accepted, no effect because --grad-reduce-in-bf16 and "
            "--accumulate-allreduce-grads-in-fp32 choose the type of gradients"
        )
    if draft.get("grad_reduce_in_bf16") and draft.values.pop("accumulate_allreduce_grads_in_fp32", False):
        draft.notes.append(
            "--accumulate-allreduce-grads-in-fp32: dropped because --grad-reduce-in-bf16 is given, as Megatron does"
        )


def _parallel_flags(draft: Draft) -> None:
    if draft.get("sequence_parallel") and draft.get("tensor_model_parallel_size", 1) == 1:
        draft.values["sequence_parallel"] = False
        draft.notes.append("--sequence-parallel: turned off because --tensor-model-parallel-size is 1")


def _transformer_engine_flags(draft: Draft) -> None:
    if draft.get("transformer_impl", "local") == "local":
        for name, flag, reason in (
            ("tp_comm_overlap", "--tp-comm-overlap", "only TransformerEngine's layers overlap it"),
            (
                "apply_query_key_layer_scaling",
                "--apply-query-key-layer-scaling",
                "the local attention keeps scores in fp32, where the scale cancels out",
            ),
        ):
            if draft.get(name):
                draft.notes.append(f"{flag}: accepted, no effect because {reason}")


def _flags_not_built_yet(draft: Draft) -> None:
    for name, reason in NOT_YET.items():
        if name in draft.typed:
            draft.notes.append(f"{draft.typed[name]}: accepted, no effect because {reason}")


def _offload_flags(draft: Draft) -> None:
    """Map Megatron's offload flags; refuse our placement flags where nothing is offloaded."""
    fraction_words = draft.mapped.get("--optimizer-offload-fraction")
    fraction = _fraction(fraction_words[0]) if fraction_words else 1.0
    if "--optimizer-cpu-offload" in draft.mapped:
        for name, flag, value in (
            ("offload_gpu_share", "--offload-gpu-share", 0.0),
            ("offload_resident_fraction", "--offload-resident-fraction", 1.0 - fraction),
        ):
            given = draft.get(name, "auto")
            require(
                given == "auto" or abs(given - value) < 1e-9,
                f"--optimizer-cpu-offload with --optimizer-offload-fraction {fraction:g} means {flag} {value:g}, but "
                f"{flag} is {given}: drop Megatron's flags or ours",
            )
            draft.values[name] = given if given != "auto" else value
        require(
            draft.get("offload_stride", "auto") in ("auto", "none"),
            f"--optimizer-cpu-offload updates everything on the CPU, but --offload-stride is "
            f"{draft.get('offload_stride')}: drop one of them",
        )
        draft.values["interleaved_offload"] = True
        draft.notes.append(
            f"--optimizer-cpu-offload: mapped to --interleaved-offload --offload-gpu-share 0 "
            f"--offload-resident-fraction {1.0 - fraction:g} (ours is the part that stays on the GPU)"
        )
    elif fraction_words:
        draft.notes.append(
            "--optimizer-offload-fraction: accepted, no effect because --optimizer-cpu-offload is not given"
        )
    if not draft.get("interleaved_offload"):
        for name in OffloadConfig.__dataclass_fields__:
            flag = draft.typed.get(name)
            require(
                flag is None or not name.startswith("offload_"),
                f"{flag} has a meaning only with --interleaved-offload: add that or drop {flag}",
            )


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(0.0 <= value <= 1.0, f"--optimizer-offload-fraction is {text!r}, allowed are numbers from 0 to 1")
    return value


def _decay_flags(draft: Draft) -> None:
    if draft.get("weight_decay_incr_style", "constant") == "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            require(
                name not in draft.values,
                f"--{name.replace('_', '-')} needs --weight-decay-incr-style linear or cosine: add that or use "
                "--weight-decay",
            )


def _needed_flags(draft: Draft) -> None:
    """Require what no run can do without, so that it is missed before anything starts."""
    _require_given(draft, ("num_layers", "hidden_size", "num_attention_heads", "seq_length"), "the model's shape")
    _require_given(draft, ("micro_batch_size",), "the batch")
    if not draft.get("skip_train"):
        require(
            draft.get("train_iters") is not None or draft.get("train_samples") is not None,
            "the length of the run is missing: give --train-iters or --train-samples",
        )
        _require_given(draft, ("lr",), "the learning rate")
    paths = ("mock_data", "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")
    require(
        any(draft.get(name) for name in paths),
        "the data is missing: give --data-path PREFIX, or --mock-data for generated tokens",
    )
    has_gpt2_files = draft.get("vocab_file") and draft.get("merge_file")
    require(
        draft.get("tokenizer_type") is not None or bool(has_gpt2_files),
        "the tokenizer is missing: give --tokenizer-type, such as HuggingFaceTokenizer with --tokenizer-model, or "
        "NullTokenizer with --vocab-size",
    )
    require(
        draft.get("tokenizer_type") != "NullTokenizer" or draft.get("vocab_size") is not None,
        "--tokenizer-type NullTokenizer needs --vocab-size: add it",
    )


def _require_given(draft: Draft, names: Iterable[str], what: str) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if draft.get(name) is None]
    require(not missing, f"{what} is missing: give {' and '.join(missing)}")


_RULES: tuple[Callable[[Draft], None], ...] = (
    _position_flags,
    _attention_flags,
    _recompute_flags,
    _tokenizer_flags,
    _precision_flags,
    _parallel_flags,
    _transformer_engine_flags,
    _flags_not_built_yet,
    _offload_flags,
    _decay_flags,
    _needed_flags,
)
