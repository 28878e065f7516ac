"""What would become of each flag of a launch script: used, mapped, no effect, refused. Standard library only.

Reads bash scripts (arrays, variables, continuation lines, conditions) and Megatron's own YAML test configurations.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.training.arguments import Given, build_config, read_flags, split_words, unknown_message
from megatron.training.flags import SECTIONS, flags_by_name
from megatron.training.flags_accepted import MAPPED, NO_EFFECT, NOT_YET, ONLY
from megatron.training.flags_refused import refusal
from megatron.training.shell_values import has_unknown, is_unknown, shown
from megatron.training.shell_walk import find_commands

Verdict = Literal["used", "mapped", "no effect", "refused", "unknown"]
_SURPRISES: tuple[Verdict, ...] = ("refused", "unknown")
_YAML_FLAG = re.compile(r"\s+(--?[A-Za-z][\w-]*)\s*:\s*(.*?)\s*$")
_MIN_FLAGS = 3

# Fields that hold any text: an open value there cannot contradict anything.
_FREE_TEXTS = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "data_cache_path",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "save",
    "load",
    "pretrained_checkpoint",
    "tensorboard_dir",
    "wandb_project",
    "wandb_exp_name",
    "wandb_entity",
    "wandb_save_dir",
    "offload_profile",
)

# The shape of a checkpoint that --use-checkpoint-args would read.
_STAND_INS = {"num_layers": 64, "hidden_size": 8192, "num_attention_heads": 64, "seq_length": 1, "vocab_size": 2}


@dataclass(frozen=True, slots=True)
class FlagReport:
    """One flag as typed and what becomes of it; `reason` is empty for flags that are simply used."""

    name: str
    words: tuple[str, ...]
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All flags of one training command.

    program: the script that would be started. open_values: names of values that the script does not fix.
    num_ranks: ranks for which the flags were checked against each other, None where open values did not allow it.
    contradiction: why they do not fit together.
    """

    program: str
    flags: tuple[FlagReport, ...]
    open_values: tuple[str, ...] = ()
    num_ranks: int | None = None
    contradiction: str | None = None

    @property
    def num_surprises(self) -> int:
        """Refused and unknown flags, plus one for a contradiction."""
        return sum(flag.verdict in _SURPRISES for flag in self.flags) + (self.contradiction is not None)


def explain(
    text: str, arguments: Sequence[str] = (), *, folder: Path | None = None, is_yaml: bool = False
) -> Explanation:
    """Return what would become of the flags of a launch script, or of a YAML file with flags as keys.

    arguments: what the script would be started with, $1 and so on; without them such values are open. folder: where
    files that the script sources are looked for.
    Raises ValueError, one sentence, where no training command with flags can be found.
    """
    if is_yaml:
        program, words, world_size = "pretrain_gpt.py", _yaml_words(text), None
    else:
        program, words, world_size = _launch(text, arguments, folder)
    given = [_without_extra_unknowns(flag) for flag in split_words(_from_first_flag(words))]
    reports = tuple(_report(flag) for flag in given)
    open_values = sorted({name for word in words for name in re.findall("\0([^\0]*)\0", word)})
    num_ranks, contradiction = None, None
    if not any(report.verdict in _SURPRISES for report in reports):
        num_ranks, contradiction = _check(given, world_size)
        if contradiction is not None and " is missing" in contradiction and open_values:
            num_ranks, contradiction = None, None  # it may be in what the script leaves open
    return Explanation(program, reports, tuple(open_values), num_ranks, contradiction)


def _launch(text: str, arguments: Sequence[str], folder: Path | None) -> tuple[str, list[str], int | None]:
    """Return (program, its words, world size if the script fixes it) of the command with the most known flags."""
    known = {*flags_by_name(), *MAPPED, *NO_EFFECT, *ONLY}
    best: tuple[int, list[str], int] = (0, [], 0)
    for words in find_commands(text, arguments, folder):
        programs = [index for index, word in enumerate(words) if word.endswith(".py")]
        for index in programs:
            count = sum(word.partition("=")[0] in known for word in words[index + 1 :])
            if count >= max(best[0], 1):
                best = (count, words, index)
    count, words, index = best
    if count < _MIN_FLAGS:
        raise ValueError(
            "no training command was found in the script: expected a line that starts a .py file with flags such as "
            "--num-layers"
        )
    return words[index].rsplit("/", 1)[-1], words[index + 1 :], _world_size(words[:index])


def _world_size(launcher: list[str]) -> int | None:
    """Return processes x nodes where torchrun's words say both."""
    values = {}
    for index, word in enumerate(launcher):
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name in ("nproc_per_node", "nnodes"):
            values[name] = value or (launcher[index + 1] if index + 1 < len(launcher) else "")
    numbers = [int(value) for value in values.values() if value.isdigit()]
    return numbers[0] * numbers[1] if len(numbers) == 2 else None


def _yaml_words(text: str) -> list[str]:
    words: list[str] = []
    for line in text.splitlines():
        match = _YAML_FLAG.match(line)
        if match is None:
            continue
        name, value = match.group(1), match.group(2).split(" #")[0].strip()
        if value.lower() == "true":
            words.append(name)
        elif value.lower() not in ("false", "null", "~"):
            words += [name, *_yaml_value(value)]
    if not words:
        raise ValueError("no flags were found in the YAML file: expected indented lines such as `--num-layers: 12`")
    return words


def _yaml_value(value: str) -> list[str]:
    value = re.sub(r"\$\{?(\w+)\}?", "\0\\1\0", value)
    try:
        return [part for field in shlex.split(value) for part in field.strip("[]").split()]
    except ValueError:
        return value.split()


def _from_first_flag(words: list[str]) -> list[str]:
    """Drop what stands before the first flag: unknown words, or an argument of the program's own."""
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    return [word for word in words[first:] if word != "--"]


def _without_extra_unknowns(flag: Given) -> Given:
    """Drop unknown words that are too many: `--bf16 $MORE` says nothing about --bf16."""
    count = _count_of(flag.name)
    words = list(flag.words)
    while isinstance(count, int) and len(words) > count and is_unknown(words[-1]):
        words.pop()
    return Given(flag.name, words)


def _count_of(name: str) -> int | str | None:
    if name in flags_by_name():
        return flags_by_name()[name].num_values
    if name in ONLY:
        return 1
    return {**MAPPED, **NO_EFFECT}.get(name, (None,))[0]


def _report(flag: Given) -> FlagReport:
    words = tuple(shown(word) for word in flag.words)
    reason = refusal(flag.name)
    if reason is None and _count_of(flag.name) is None:
        return FlagReport(flag.name, words, "unknown", unknown_message(flag.name))
    if reason is None and not any(map(has_unknown, flag.words)):
        try:
            draft = read_flags([flag])
        except ValueError as error:
            reason = str(error)
        else:
            reason = _not_built(draft.values)
            notes = [note.partition(": ")[2] for note in draft.notes]
            if notes:
                return FlagReport(flag.name, words, "no effect", notes[0].removeprefix("accepted, no effect "))
    if reason is not None:
        return FlagReport(flag.name, words, "refused", reason.removeprefix(f"{flag.name} is refused, "))
    if flag.name in MAPPED:
        return FlagReport(flag.name, words, "mapped", MAPPED[flag.name][1])
    if flag.name in NO_EFFECT:
        return FlagReport(flag.name, words, "no effect", f"because {NO_EFFECT[flag.name][1]}")
    known = flags_by_name().get(flag.name)
    if known is not None and known.field in NOT_YET:
        return FlagReport(flag.name, words, "no effect", f"because {NOT_YET[known.field]}")
    return FlagReport(flag.name, words, "used")


def _not_built(values: dict[str, object]) -> str | None:
    """Return why a value by itself is refused as not built, None for other values."""
    for name, value in values.items():
        section = next(flag.section for flag in flags_by_name().values() if flag.field == name)
        if section not in ("model", "batch"):  # those cannot be built from one field
            try:
                SECTIONS[section][0](**{name: value})
            except ValueError as error:
                if "is not built here" in str(error):
                    return str(error)
    return None


def _check(given: list[Given], world_size: int | None) -> tuple[int | None, str | None]:
    """Return (ranks for which the flags were checked against each other, why they do not fit together).

    A script's number of ranks is often a placeholder: where it cannot hold the model's ranks, those are taken.
    """
    known = flags_by_name()
    argv: list[str] = []
    for flag in given:
        words = [shown(word) for word in flag.words]
        if words != flag.words and not (flag.name in known and known[flag.name].field in _FREE_TEXTS):
            return None, None
        argv += [flag.name, *words]
    values = read_flags(split_words(argv)).values
    model_ranks = values.get("tensor_model_parallel_size", 1) * values.get("pipeline_model_parallel_size", 1)
    num_ranks = world_size if world_size and world_size % model_ranks == 0 else model_ranks
    try:
        build_config(argv, world_size=num_ranks, read_checkpoint_args=lambda checkpoint: _STAND_INS)
    except ValueError as error:
        return num_ranks, str(error)
    return num_ranks, None


def report_lines(name: str, explanation: Explanation) -> list[str]:
    """Return the explanation of script `name` as lines: every flag, then a summary."""
    lines = [f"{name}: {explanation.program} with {len(explanation.flags)} flags"]
    for flag in explanation.flags:
        typed = " ".join([flag.name, *flag.words])
        lines.append(f"  {flag.verdict:<9}  {typed}" + (f": {flag.reason}" if flag.reason else ""))
    counts = Counter(flag.verdict for flag in explanation.flags)
    order: tuple[Verdict, ...] = ("used", "mapped", "no effect", "refused", "unknown")
    lines.append(", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict]))
    if explanation.open_values:
        lines.append(f"not fixed by the script: {', '.join('$' + value for value in explanation.open_values)}")
    if explanation.contradiction is not None:
        lines.append(f"the flags contradict each other: {explanation.contradiction}")
    elif explanation.num_ranks is not None:
        lines.append(
            f"the flags fit together (checked for {explanation.num_ranks} rank{'s' * (explanation.num_ranks > 1)})"
        )
    surprises = explanation.num_surprises
    lines.append("no surprises" if surprises == 0 else f"{surprises} surprise{'s' * (surprises > 1)}")
    return lines


def main(argv: Sequence[str], *, program: str = "explain") -> int:
    """Explain the script `argv[0]`, started with the arguments `argv[1:]`, and return 0, or 2 on any surprise."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {program} SCRIPT [ARGUMENTS OF THE SCRIPT]")
        print("Says for each flag of a Megatron launch script whether it is used, mapped, without effect or refused.")
        print("SCRIPT is read, never run; bash, or a YAML file with flags as keys. Exit code 2 on surprises.")
        return 0 if argv else 2
    path = argv[0]
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        is_yaml = path.endswith((".yaml", ".yml"))
        explanation = explain(text, argv[1:], folder=Path(path).parent, is_yaml=is_yaml)
    except OSError as error:
        print(f"{program}: error: {path} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{program}: error: {path}: {error}", file=sys.stderr)
        return 2
    print("\n".join(report_lines(path, explanation)))
    return 2 if explanation.num_surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
