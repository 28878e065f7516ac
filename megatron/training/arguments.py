"""The command line: words to a frozen TrainingConfig, `--help`, and the dump of all arguments.

Standard library only: a misspelled flag is reported before torch is imported. Words are split here, not by
argparse: its messages differ between Python versions, and one table of flags serves parsing, help and `explain`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron.training.config import CheckpointConfig, TrainingConfig
from megatron.training.flags import SECTIONS, all_flags, check_count, flags_by_name, nearest
from megatron.training.flags_accepted import MAPPED, NO_EFFECT, ONLY
from megatron.training.flags_checkpoint import take_from_checkpoint
from megatron.training.flags_help import help_text
from megatron.training.flags_refused import refusal
from megatron.training.flags_rules import Draft, apply_rules

PROGRAM = "pretrain_gpt.py"
USAGE_EXIT_CODE = 2

CheckpointReader = Callable[[CheckpointConfig], Mapping[str, object]]
"""Returns the arguments that the checkpoint of --load was written with, under Megatron's names."""

_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as it was typed, with the words that follow it."""

    name: str
    words: list[str]


def parse_args(
    argv: Sequence[str], *, world_size: int = 1, read_checkpoint_args: CheckpointReader | None = None
) -> TrainingConfig:
    """Return the settings that `argv` (without the program's name) asks for on `world_size` ranks.

    Prints one sentence and exits with code 2 for anything it does not understand or that contradicts itself, and
    prints the help and exits with code 0 for --help. read_checkpoint_args serves --use-checkpoint-args.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(help_text(PROGRAM))
        raise SystemExit(0)
    try:
        return build_config(argv, world_size=world_size, read_checkpoint_args=read_checkpoint_args)
    except ValueError as error:
        usage_error(str(error))


def usage_error(message: str) -> NoReturn:
    """Print `pretrain_gpt.py: error: message`, once per host, and exit with code 2."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(USAGE_EXIT_CODE)


def build_config(
    argv: Sequence[str], *, world_size: int = 1, read_checkpoint_args: CheckpointReader | None = None
) -> TrainingConfig:
    """Return the settings of `argv`. Raises ValueError, one sentence, where `parse_args` would exit with code 2."""
    draft = read_flags(split_words(argv))
    if draft.get("use_checkpoint_args"):
        checkpoint = CheckpointConfig(**_section_values(draft, "checkpoint"))
        if read_checkpoint_args is None:
            raise ValueError("--use-checkpoint-args is not possible here: give the model's shape as flags")
        take_from_checkpoint(draft, read_checkpoint_args(checkpoint))
    apply_rules(draft)
    sections = {name: cls(**_section_values(draft, name)) for name, (cls, _) in SECTIONS.items()}
    return TrainingConfig(**sections, world_size=world_size, notes=tuple(draft.notes))


def _section_values(draft: Draft, section: str) -> dict[str, object]:
    names = [flag.field for flag in all_flags() if flag.section == section]
    return {name: draft.values[name] for name in names if name in draft.values}


def split_words(argv: Sequence[str]) -> list[Given]:
    """Return each flag of `argv` with its words; `--flag=word` is the same as `--flag word`.

    Raises ValueError for words before the first flag and for a bare `--`.
    """
    given: list[Given] = []
    for word in argv:
        if word == "--":
            raise ValueError("'--' alone is not a flag: remove it")
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            given.append(Given(name, [value] if equals else []))
        elif given:
            given[-1].words.append(word)
        else:
            raise ValueError(f"{word!r} is not a flag: flags begin with --")
    return given


def read_flags(given: Sequence[Given]) -> Draft:
    """Return the values that the flags set; where a flag is repeated the last one counts, as in Megatron.

    Raises ValueError, one sentence, for unknown and refused flags and for values of the wrong kind.
    """
    draft = Draft()
    known = flags_by_name()
    for flag in given:
        name, words = _replaced(draft, flag)
        if name in known:
            draft.values[known[name].field] = known[name].value(name, words)
            draft.typed[known[name].field] = name
        elif name in MAPPED:
            check_count(name, MAPPED[name][0], words)
            draft.mapped[name] = words
        elif name in NO_EFFECT:
            count, reason = NO_EFFECT[name]
            check_count(name, count, words)
            _note(draft, f"{name}: accepted, no effect because {reason}")
        elif name in ONLY:
            _note(draft, _only(name, words))
        else:
            raise ValueError(refusal(name) or unknown_message(name))
    return draft


def _note(draft: Draft, note: str) -> None:
    if note not in draft.notes:
        draft.notes.append(note)


def _only(name: str, words: list[str]) -> str:
    check_count(name, 1, words)
    allowed, reason, instead = ONLY[name]
    if words[0] not in allowed:
        verb = "is" if len(allowed) == 1 else "are"
        raise ValueError(f"{name} is {words[0]!r}, allowed {verb} {', '.join(allowed)}: {instead}")
    return f"{name} {words[0]}: accepted, no effect because {reason}"


def _replaced(draft: Draft, flag: Given) -> tuple[str, list[str]]:
    """Replace values that Megatron or its relatives know under another name here."""
    if (flag.name, flag.words) == ("--tokenizer-type", ["PretrainedFromHF"]):
        return flag.name, ["HuggingFaceTokenizer"]
    if (flag.name, flag.words) == ("--ckpt-format", ["torch"]):
        _note(draft, "--ckpt-format torch: checkpoints are written as torch_dist, the only format written here")
        return flag.name, ["torch_dist"]
    return flag.name, flag.words


def unknown_message(name: str) -> str:
    """Return the sentence for a flag that nobody knows, with the nearest known one."""
    known = [*flags_by_name(), *MAPPED, *NO_EFFECT, *ONLY]
    plain = "-" + name if not name.startswith("--") else name
    guess = nearest(plain, known)
    return f"{name} is unknown, " + (f"did you mean {guess}?" if guess else "and no flag is like it: see --help")
