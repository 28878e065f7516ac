"""`--help`: every flag by section, ours first, with units and defaults. Standard library only."""

from __future__ import annotations

import textwrap

from megatron.training.flags import SECTIONS, Flag, all_flags
from megatron.training.flags_accepted import MAPPED, NO_EFFECT, ONLY

_WIDTH = 118
_INDENT = " " * 8
_LONGEST_SHAPE = 60
OURS = ("dry_run", "use_cpu", "keep_last", "eval_at_start", "decoupled_weight_decay")
"""Fields outside of the offload section that Megatron does not have; shown with ours."""


def help_text(program: str) -> str:
    """Return the whole help."""
    lines = [
        f"usage: {program} --num-layers N --hidden-size N --num-attention-heads N --seq-length N --micro-batch-size N",
        "       --train-iters N --lr X --data-path PREFIX --tokenizer-type TYPE [flags]",
        "",
        "Trains a GPT with megatron-core. Flags, names and defaults are Megatron's but for the first group. Adam's",
        "state is kept in host memory and updated on CPU and GPU at once with --interleaved-offload. Note that",
        "--offload-resident-fraction is the part that STAYS on the GPU; DeepSpeed's ratio and Megatron's",
        "--optimizer-offload-fraction are the part that is offloaded.",
    ]
    ours = [flag for flag in all_flags() if flag.section == "offload" or flag.field in OURS]
    lines += ["", "ours:", *_entries(ours)]
    for section, (_, title) in SECTIONS.items():
        flags = [flag for flag in all_flags() if flag.section == section and flag not in ours]
        if flags:
            lines += ["", f"{title}:", *_entries(flags)]
    lines += ["", "other flags of Megatron that set one of these:"]
    for name, (count, what) in MAPPED.items():
        lines += _entry(name + (" X" if count else ""), what + ".")
    lines += ["", "accepted without effect (the reason is printed at start-up):"]
    names = ", ".join(sorted([*NO_EFFECT, *ONLY]))
    lines += textwrap.wrap(names, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _entries(flags: list[Flag]) -> list[str]:
    return [line for flag in flags for line in _entry(_head(flag), _describe(flag))]


def _entry(head: str, text: str) -> list[str]:
    body = textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
    return [f"  {head}", *body]


def _head(flag: Flag) -> str:
    return ", ".join(flag.names) + (f" {_short(flag.shape)}" if flag.shape else "")


def _short(shape: str) -> str:
    return shape if len(shape) <= _LONGEST_SHAPE else "NAME"


def _describe(flag: Flag) -> str:
    if flag.num_values == 0:
        return f"Turns off: {flag.help}" if flag.default is True else flag.help
    text = flag.help if len(flag.shape) <= _LONGEST_SHAPE else f"{flag.help} One of {flag.shape.replace('|', ', ')}."
    if flag.default is None or flag.default == () or flag.default == "":
        return text
    default = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    return f"{text} (default: {default})"
