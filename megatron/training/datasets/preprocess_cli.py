"""Command line of tools/preprocess_data.py: Megatron's options, checked at the door."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from megatron.training.datasets.preprocess import (
    DataError,
    PreprocessJob,
    Totals,
    describe_os_error,
    format_kinds,
    run_job,
)
from megatron.training.datasets.progress import format_seconds
from megatron.training.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

EXIT_DATA = 1
EXIT_USAGE = 2
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_NO_EFFECT = {
    "partitions": "--partitions: no effect, the workers share all input files and the output keeps the input's order",
    "keep_sequential_samples": "--keep-sequential-samples: no effect, documents always keep the input's order",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by: no effect, padding is up to training",
}
_REFUSED = {
    "split_sentences": "--split-sentences is not offered: GPT training reads whole documents, so leave the flag out",
    "find_optimal_num_workers": (
        "--find-optimal-num-workers is not offered: set --workers to the number of CPU cores, which is the default"
    ),
}


class _Parser(argparse.ArgumentParser):
    """Names the nearest option for an unknown one."""

    def parse_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], options, n=1)
            self.error(f"unknown option {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
        return args


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="preprocess_data.py",
        allow_abbrev=False,
        description="Tokenize JSONL files into PREFIX_KEY_document.bin and .idx, which training reads by --data-path.",
        epilog="Exit codes: 0 done, 1 the data is at fault, 2 the command line is. After an error nothing is written.",
    )
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSONL files or globs, plain or .gz")
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize (text)")
    group.add_argument(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="a line that is no document: stop with its file, line and reason, or leave it out and count it (error)",
    )
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    group.add_argument("--tokenizer-model", metavar="PATH", help="local file or folder of the tokenizer")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, metavar="N", help="for NullTokenizer and TikTokenizer")
    group.add_argument("--tiktoken-pattern", metavar="V", help="splitting rule of TikTokenizer (v2)")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help="reserved ids (1000)")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without _KEY_document.bin")
    group = parser.add_argument_group("run time")
    group.add_argument("--workers", type=int, default=_num_cores(), metavar="N", help="processes (all cores)")
    group.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between lines (1000)")
    group = parser.add_argument_group("accepted for Megatron's sake, no effect")
    group.add_argument("--partitions", type=int, metavar="N")
    group.add_argument("--keep-sequential-samples", action="store_true")
    group.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N")
    for name in ("--split-sentences", "--find-optimal-num-workers"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code: 0, EXIT_DATA or EXIT_USAGE."""
    parser = _build_parser()
    args = parser.parse_all(argv)
    for name, sentence in _REFUSED.items():
        if getattr(args, name):
            parser.error(sentence)
    for flag, value in (("--workers", args.workers), ("--log-interval", args.log_interval)):
        if value < 1:
            parser.error(f"{flag} is {value}, allowed are whole numbers from 1")
    if len(set(args.json_keys)) != len(args.json_keys):
        parser.error(f"--json-keys {' '.join(args.json_keys)} names a key twice: each key makes one dataset")
    for name, sentence in _NO_EFFECT.items():
        if getattr(args, name):
            print(sentence, file=sys.stderr)
    job = PreprocessJob(
        inputs=args.input,
        output_prefix=args.output_prefix,
        json_keys=args.json_keys,
        append_eod=args.append_eod,
        num_workers=args.workers,
        on_bad_line=args.on_bad_line,
        log_interval=args.log_interval,
    )
    start = time.monotonic()
    try:
        with _stopping_on_signals():
            tokenizer = _tokenizer_of(args)
            totals = run_job(job, tokenizer)
    except ValueError as error:
        return _fail(str(error), EXIT_USAGE)
    except DataError as error:
        return _fail(str(error), EXIT_DATA)
    except OSError as error:
        return _fail(f"{describe_os_error(error)}: nothing was written", EXIT_DATA)
    except _Stopped as stop:
        return _fail(f"stopped by {signal.Signals(stop.number).name}: nothing was written", 128 + stop.number)
    _print_totals(job, tokenizer, totals, time.monotonic() - start)
    return 0


def _tokenizer_of(args: argparse.Namespace) -> Tokenizer:
    try:
        tokenizer = build_tokenizer(
            args.tokenizer_type,
            args.tokenizer_model,
            args.vocab_file,
            args.merge_file,
            args.vocab_size,
            tiktoken_pattern=args.tiktoken_pattern,
            tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        )
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - every tokenizer library has its own exceptions
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--tokenizer-type {args.tokenizer_type} cannot load its files: {reason}") from None
    if args.append_eod and getattr(tokenizer, "eod", None) is None:
        raise ValueError(f"--append-eod: {args.tokenizer_type} has no end-of-document id, leave the flag out")
    return tokenizer


def _print_totals(job: PreprocessJob, tokenizer: Tokenizer, totals: Totals, seconds: float) -> None:
    assert totals.dtype is not None
    for key, num_tokens in totals.tokens_of_key.items():
        print(
            f"wrote {job.prefix_of(key)}.bin and .idx: {totals.num_documents} documents, {num_tokens} tokens "
            f"({totals.dtype.name}, {num_tokens * totals.dtype.itemsize} bytes), vocabulary {tokenizer.vocab_size}"
        )
    if totals.num_empty:
        print(f"{totals.num_empty} of the documents gave no token")
    if totals.num_bad:
        lines = totals.num_bad + totals.num_documents
        print(f"skipped {totals.num_bad} of {lines} lines: {format_kinds(totals.bad_kinds)}")
    print(f"took {format_seconds(seconds)}")


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _stopping_on_signals() -> Iterator[None]:
    # An exception instead of the default death, so that temporary files are removed and workers ended.
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise _Stopped(number)

    before = {each: signal.signal(each, stop) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _fail(sentence: str, code: int) -> int:
    print(f"preprocess_data.py: error: {sentence}", file=sys.stderr, flush=True)
    return code


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
