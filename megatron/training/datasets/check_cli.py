"""Command line of tools/data.py: says before any GPU is booked whether training can read its data."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.training.datasets.blend import (
    SPLIT_NAMES,
    Blend,
    parse_data_path,
    parse_split,
    samples_of_source,
    samples_per_epoch,
    split_ranges,
    suggest_split,
    whole_epochs,
)
from megatron.training.datasets.check import PrefixSummary, check_prefix, check_vocabulary, read_lengths

EXIT_PROBLEMS = 1
EXIT_USAGE = 2
_DEFAULT_SPLIT = "969,30,1"
_SECONDS_BETWEEN_NOTES = 10.0


@dataclass(slots=True)
class Report:
    """Lines about what is there, what is worth knowing, and one sentence for each reason why training would fail."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check_blend(
    blend: Blend,
    shares: Sequence[float],
    split_text: str,
    samples: Sequence[int | None],
    seq_length: int,
    vocab_size: int | None = None,
    on_note: Callable[[str], None] = print,
) -> Report:
    """Return the report on one blend.

    shares: of train, valid and test (0 is a split that is not built); split_text: how the user spelled them;
    samples: wanted of each split, None where unknown. Damaged sources become problems, not exceptions.
    """
    report = Report()
    num_sequences: list[int] = []
    empty: list[list[str]] = [[], [], []]
    split_samples = [0, 0, 0]
    for index, prefix in enumerate(blend.prefixes):
        try:
            summary = check_prefix(prefix)
            lengths = read_lengths(prefix)
        except (ValueError, OSError) as error:
            report.problems.append(str(error))
            continue
        num_sequences.append(summary.num_sequences)
        weight = "" if blend.weights is None else f", weight {blend.share(index):.4f}"
        report.lines.append(
            f"{prefix}: {summary.num_documents} documents, {summary.num_tokens} tokens, {summary.dtype.name}{weight}"
        )
        for name, part, wanted, i in zip(SPLIT_NAMES, split_ranges(shares, summary.num_sequences), samples, range(3)):
            if part is None:
                continue
            num_tokens = int(lengths[part[0] : part[1]].sum(dtype=np.int64))
            if num_tokens == 0:
                empty[i].append(f"{name} of {prefix} ({summary.num_sequences} documents)")
                report.lines.append(f"  {name}: no document")
                continue
            split_samples[i] += samples_per_epoch(num_tokens, seq_length)
            report.lines.append(_split_line(name, part, num_tokens, wanted, seq_length, blend, index))
        if vocab_size is not None:
            _check_ids(summary, vocab_size, report, on_note)
    _judge_empty(report, empty, samples, shares, split_text, num_sequences)
    report.problems += _too_few(blend, samples, split_samples)
    return report


def _split_line(
    name: str,
    part: tuple[int, int],
    num_tokens: int,
    wanted: int | None,
    seq_length: int,
    blend: Blend,
    index: int,
) -> str:
    line = (
        f"  {name}: {part[1] - part[0]} documents, {num_tokens} tokens, "
        f"{num_tokens / seq_length:.1f} samples of {seq_length} an epoch"
    )
    is_one_pass = blend.weights is None and len(blend.prefixes) > 1
    if wanted is None or is_one_pass:
        return line + (", 1 epoch" if is_one_pass else "")
    here = samples_of_source(wanted, blend, index)
    passes = whole_epochs(here, seq_length, num_tokens)
    return f"{line}, {here} samples wanted: {here * seq_length / num_tokens:.2f} epochs ({passes} laid out)"


def _check_ids(summary: PrefixSummary, vocab_size: int, report: Report, on_note: Callable[[str], None]) -> None:
    last_note = time.monotonic()

    def note(done_bytes: int) -> None:
        nonlocal last_note
        if time.monotonic() - last_note > _SECONDS_BETWEEN_NOTES:
            last_note = time.monotonic()
            on_note(f"reading {summary.prefix}.bin: {100 * done_bytes / summary.bin_bytes:.0f} %")

    try:
        smallest, largest = check_vocabulary(summary, vocab_size, note)
        report.lines.append(f"  ids from {smallest} to {largest}, vocabulary {vocab_size}")
    except (ValueError, OSError) as error:
        report.problems.append(str(error))


def _judge_empty(
    report: Report,
    empty: Sequence[Sequence[str]],
    samples: Sequence[int | None],
    shares: Sequence[float],
    split_text: str,
    num_sequences: Sequence[int],
) -> None:
    """Say what empty splits mean: training gives up an empty test, the other two it cannot do without."""
    needed = [words for words, wanted in zip(empty[:2], samples) if wanted != 0]
    fatal = [place for words in needed for place in words]
    harmless = [place for words in empty for place in words if place not in fatal]
    better = suggest_split(shares, num_sequences) if num_sequences else None
    hint = f"use for example --split {better}" if better else "the source has too few documents to be split"
    for places, sentences, end in (
        (fatal, report.problems, hint),
        (harmless, report.notes, f"it is left out, and Megatron-LM would hang here; {hint}"),
    ):
        if places:
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            sentences.append(f"--split {split_text} leaves no token for {', '.join(places[:3])}{more}: {end}")
    if split_text and not shares[1] and samples[1] != 0:
        report.notes.append(f"--split {split_text} has no validation part: training needs --eval-iters 0")


def _too_few(blend: Blend, samples: Sequence[int | None], available: Sequence[int]) -> list[str]:
    if blend.weights is not None or len(blend.prefixes) == 1:
        return []  # such sources are repeated as often as needed
    return [
        f"{wanted} {name} samples are wanted, but prefixes without weights are read once and give {have}: "
        "give each prefix a weight, or ask for fewer"
        for name, wanted, have in zip(SPLIT_NAMES, samples, available)
        if wanted is not None and wanted > have > 0
    ]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data.py", allow_abbrev=False, description="Look after indexed datasets.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="say whether training can read its data",
        description="Check datasets as training would read them: damage, empty splits, epochs, ids.",
        epilog="Exit codes: 0 training can start, 1 it would fail, 2 the command line is wrong.",
    )
    check.add_argument("data_path", nargs="*", metavar="DATA", help="prefix, or weight prefix weight prefix ...")
    check.add_argument("--data-path", nargs="+", dest="data_path_flag", metavar="DATA", help="the same, as in training")
    for name in SPLIT_NAMES:
        check.add_argument(f"--{name}-data-path", nargs="+", metavar="DATA", help=f"data of {name} alone")
    check.add_argument("--split", metavar="A,B,C", help=f"shares of train, valid and test ({_DEFAULT_SPLIT})")
    check.add_argument("--seq-length", type=int, required=True, metavar="S", help="tokens of a sample")
    check.add_argument("--train-samples", type=int, metavar="N", help="samples of the whole training")
    check.add_argument("--train-iters", type=int, metavar="N", help="instead: iterations, with --global-batch-size")
    check.add_argument("--global-batch-size", type=int, metavar="N", help="samples of an iteration")
    check.add_argument("--valid-samples", type=int, metavar="N", help="samples of all evaluations; 0: --eval-iters 0")
    check.add_argument("--test-samples", type=int, metavar="N", help="samples of the final test")
    check.add_argument("--vocab-size", type=int, metavar="V", help="also read all tokens: ids must be below V")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code: 0, EXIT_PROBLEMS or EXIT_USAGE."""
    args = _build_parser().parse_args(argv)
    try:
        reports = _run_check(args)
    except ValueError as error:
        print(f"data.py: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    for report in reports:
        for line in report.lines:
            print(line)
    for note in dict.fromkeys(note for report in reports for note in report.notes):
        print(f"note: {note}")
    problems = list(dict.fromkeys(problem for report in reports for problem in report.problems))
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if problems:
        print(f"training would fail: {len(problems)} problem{'s' * (len(problems) > 1)}", file=sys.stderr)
        return EXIT_PROBLEMS
    print("training can read this data")
    return 0


def _run_check(args: argparse.Namespace) -> list[Report]:
    _check_numbers(args)
    samples = (_train_samples(args), args.valid_samples, args.test_samples)
    together = [*args.data_path, *(args.data_path_flag or [])]
    apart = [args.train_data_path, args.valid_data_path, args.test_data_path]

    def run(words: Sequence[str], shares: Sequence[float], split_text: str) -> Report:
        return check_blend(
            parse_data_path(words), shares, split_text, samples, args.seq_length, args.vocab_size, on_note=_note
        )

    if not any(apart):
        split_text = _DEFAULT_SPLIT if args.split is None else args.split
        return [run(together, parse_split(split_text), split_text)]
    if together or args.split is not None:
        raise ValueError("--train-data-path and its like exclude --data-path and --split: give one or the other")
    whole = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    return [run(words, shares, "") for words, shares in zip(apart, whole) if words]


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("seq_length", "train_samples", "train_iters", "global_batch_size", "vocab_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, allowed are whole numbers from 1")
    for name in ("valid_samples", "test_samples"):
        if getattr(args, name) is not None and getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, allowed are whole numbers from 0")


def _train_samples(args: argparse.Namespace) -> int | None:
    if args.train_iters is None:
        return args.train_samples
    if args.train_samples is not None:
        raise ValueError("--train-iters and --train-samples both say how long training is: give one of them")
    if args.global_batch_size is None:
        raise ValueError("--train-iters needs --global-batch-size to say how many samples are read")
    return args.train_iters * args.global_batch_size


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
