"""Flags generated from the settings: one flag per field of each config class, its help the field's docstring.

Standard library only. `flags_other.py` has the flags that have no field.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron.training import config

# Sections of TrainingConfig, in the order of --help: ours first.
SECTIONS: dict[str, tuple[type, str]] = {
    "offload": (config.OffloadConfig, "interleaved offload"),
    "lifecycle": (config.LifecycleConfig, "life cycle"),
    "model": (config.ModelConfig, "model"),
    "data": (config.DataConfig, "data and tokenizer"),
    "batch": (config.BatchConfig, "batches"),
    "optim": (config.OptimConfig, "optimizer"),
    "lr": (config.LRConfig, "learning rate"),
    "precision": (config.PrecisionConfig, "precision"),
    "parallel": (config.ParallelConfig, "parallelism"),
    "recompute": (config.RecomputeConfig, "recomputation"),
    "checkpoint": (config.CheckpointConfig, "checkpoints"),
    "logging": (config.LoggingConfig, "logging and evaluation"),
}

# Fields whose flags are not simply the name with dashes. Every spelling that Megatron has is listed.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "add_bias_linear": ("--disable-bias-linear",),
    "check_for_nan_in_loss_and_grad": ("--no-check-for-nan-in-loss-and-grad",),
    "microbatch_group_size_per_vp_stage": ("--microbatch-group-size-per-virtual-pipeline-stage",),
    "overlap_p2p_comm": ("--no-overlap-p2p-communication",),
    "override_opt_param_scheduler": ("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    "save_interval": ("--save-interval", "--persistent-save-interval"),
    "use_checkpoint_opt_param_scheduler": (
        "--use-checkpoint-opt_param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
    ),
}

_AT_LEAST_ONE = ("profile_ranks", "iterations_to_skip", "recompute_modules")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag that sets one field.

    names: all spellings, the first is the one shown. num_values: how many words follow, "*" any, "+" at least one.
    parse: turns those words into the field's value; its ValueError says what is allowed.
    """

    names: tuple[str, ...]
    section: str
    field: str
    num_values: int | str
    parse: Callable[[list[str]], object]
    shape: str
    help: str
    default: object

    def value(self, spelling: str, words: list[str]) -> object:
        """Return the field's value for what was typed. Raises ValueError, one sentence."""
        check_count(spelling, self.num_values, words)
        try:
            return self.parse(words)
        except ValueError as error:
            raise ValueError(f"{spelling} is {' '.join(words)!r}, allowed {error}") from None


def check_count(spelling: str, num_values: int | str, words: list[str]) -> None:
    """Raise ValueError unless `words` are as many as the flag takes."""
    if num_values == "*" or (num_values == "+" and words) or num_values == len(words):
        return
    wanted = {0: "no value", 1: "one value", "+": "at least one value"}.get(num_values, f"{num_values} values")
    verb = "was" if len(words) == 1 else "were"
    got = f"{len(words)} {verb} given: {' '.join(words)}" if words else "none was given"
    raise ValueError(f"{spelling} takes {wanted}, but {got}")


@lru_cache(maxsize=1)
def all_flags() -> tuple[Flag, ...]:
    """Return every flag that sets a field, by section."""
    return tuple(flag for section, (cls, _) in SECTIONS.items() for flag in _flags_of(section, cls))


@lru_cache(maxsize=1)
def flags_by_name() -> dict[str, Flag]:
    """Return the flags by each of their spellings."""
    return {name: flag for flag in all_flags() for name in flag.names}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known flag most like `name`, or None when none is like it."""
    plain = name.lower().replace("_", "-")
    matches = difflib.get_close_matches(plain, known, n=1, cutoff=0.7)
    return matches[0] if matches else None


def _flags_of(section: str, cls: type) -> list[Flag]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    flags = []
    for field in dataclasses.fields(cls):
        num_values, parse, shape = _parser(field.name, hints[field.name])
        name = field.name.replace("_", "-")
        names: tuple[str, ...] = (f"--{name}",)
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default is True:  # a switch that turns something off
            names, parse = (f"--no-{name}", f"--disable-{name}"), _constant(False)
        names = SPELLINGS.get(field.name, names)
        flags.append(Flag(names, section, field.name, num_values, parse, shape, docs[field.name], default))
    return flags


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a config class, white space joined."""
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    docs = {}
    for node, following in zip(body, body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs


def _constant(value: object) -> Callable[[list[str]], object]:
    return lambda words: value


def _parser(name: str, hint: object) -> tuple[int | str, Callable[[list[str]], object], str]:
    """Return (number of values, parser, value shape for --help) for a field's type."""
    options = _options(hint)
    first = options[0]
    if first is bool:
        return 0, _constant(True), ""
    if name == "step_batch_size_schedule":
        # A shell array that is expanded without quotes splits "0:16 2B:32" into words.
        return "+", " ".join, "TEXT"
    if name == "window_size":
        return 1, lambda words: _pair(words[0]), "LEFT,RIGHT"
    if typing.get_origin(first) is tuple:
        kinds = typing.get_args(first)
        item = _scalar([kinds[0]])
        shape = "N" if kinds[0] is int else "X"
        if kinds[-1] is Ellipsis:
            count: int | str = "+" if name in _AT_LEAST_ONE else "*"
            return count, lambda words: tuple(map(item, words)), f"{shape} ..."
        return len(kinds), lambda words: tuple(map(item, words)), " ".join([shape] * len(kinds))
    scalar = _scalar(options)
    return 1, lambda words: scalar(words[0]), _shape(options)


def _options(hint: object) -> list[object]:
    """Return the alternatives of a type, None left out."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [option for option in (typing.get_args(hint) if is_union else [hint]) if option is not type(None)]


def _words(options: list[object]) -> list[object]:
    return [
        word for option in options if typing.get_origin(option) is typing.Literal for word in typing.get_args(option)
    ]


def _shape(options: list[object]) -> str:
    shapes = [{int: "N", float: "X", str: "TEXT"}[option] for option in options if isinstance(option, type)]
    return "|".join([str(word) for word in _words(options)] + shapes)


def _scalar(options: list[object]) -> Callable[[str], object]:
    """Return a parser of one word that is one of the given types or literals."""
    words = _words(options)
    kinds = [option for option in options if isinstance(option, type)]

    def parse(text: str) -> object:
        for word in words:
            if text == str(word):
                return word
        for kind in kinds:
            try:
                return {int: _whole, float: _number, str: str}[kind](text)
            except ValueError:
                continue
        kind_names = {int: "whole numbers from 0", float: "numbers"}
        names = [str(word) for word in words] + [kind_names[kind] for kind in kinds]
        plural = len(names) > 1 or kinds
        raise ValueError(("are " if plural else "is ") + ", ".join(names) + _hint(text, kinds))

    return parse


def _hint(text: str, kinds: list[object]) -> str:
    """Return how to write a whole number that was written as a float."""
    try:
        value = float(text)
    except ValueError:
        return ""
    return f": write {int(value)}" if kinds == [int] and value.is_integer() and value >= 0 else ""


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or "_" in text:
        raise ValueError
    return value


def _pair(text: str) -> tuple[int, int]:
    try:
        left, right = (int(part) for part in text.strip("()").split(","))
    except ValueError:
        raise ValueError("are two whole numbers such as 4095,0") from None
    return left, right
