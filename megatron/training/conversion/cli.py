"""The command line of tools/checkpoint/convert.py: import, export and verify."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EXIT_GOOD, EXIT_FAULT, EXIT_USAGE = 0, 1, 2
_GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 the two models differ, 2 input that cannot be used (one sentence on stderr)."""
    options = _parser().parse_args(argv)
    try:
        return {"import": _import, "export": _export, "verify": _verify}[options.command](options)
    except ValueError as error:
        print(f"convert.py: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"convert.py: error: {error.filename or 'a file'} cannot be used: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    except ImportError as error:
        print(f"convert.py: error: {error.name} is missing: pip install 'deep-offload[hf]'", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert.py",
        description="HuggingFace checkpoints to ours and back, on a CPU.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_ours = commands.add_parser("import", help="HuggingFace folder to a checkpoint that pretrain_gpt.py loads")
    to_ours.add_argument("--hf", type=Path, required=True, help="folder with config.json, weights and tokenizer")
    to_ours.add_argument("--save", type=Path, required=True, help="new folder for checkpoint, tokenizer and flags")
    for flag in ("--target-tensor-parallel-size", "--target-pipeline-parallel-size"):
        to_ours.add_argument(flag, type=int, default=1, metavar="N", help="goes into train_flags.sh; any layout loads")
    to_hf = commands.add_parser("export", help="a checkpoint to a folder that transformers opens")
    to_hf.add_argument("--load", type=Path, required=True, help="folder that --save wrote into")
    to_hf.add_argument("--hf-out", type=Path, required=True, help="new folder")
    to_hf.add_argument("--hf", type=Path, help="original model, for its config; by default the tokenizer's folder")
    to_hf.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file in 10^9 bytes (default 5)")
    same = commands.add_parser("verify", help="compare a checkpoint with a HuggingFace folder: tensors and logits")
    same.add_argument("--hf", type=Path, required=True, help="HuggingFace folder")
    same.add_argument("--load", type=Path, required=True, help="folder that --save wrote into")
    same.add_argument("--seq-length", type=int, metavar="N", help="tokens to compare logits on")
    for command in (to_ours, to_hf, same):
        command.allow_abbrev = False
    return parser


def _import(options: argparse.Namespace) -> int:
    from megatron.training.conversion.importer import import_checkpoint

    started = time.monotonic()
    done = import_checkpoint(
        options.hf,
        options.save,
        tensor_parallel_size=options.target_tensor_parallel_size,
        pipeline_parallel_size=options.target_pipeline_parallel_size,
    )
    _say(done.notes)
    print(
        f"imported {done.architecture}: {done.num_tensors} tensors, {done.num_bytes / _GIB:.2f} GiB of "
        f"{str(done.dtype).removeprefix('torch.')}, {time.monotonic() - started:.1f} s, into {options.save}"
    )
    print(f"check it with: convert.py verify --hf {options.hf} --load {options.save}")
    return EXIT_GOOD


def _export(options: argparse.Namespace) -> int:
    from megatron.training.conversion.exporter import export_checkpoint

    if not options.max_shard_gb > 0:
        raise ValueError(f"--max-shard-gb is {options.max_shard_gb:g}, it must be more than 0")
    started = time.monotonic()
    shard_bytes = max(int(options.max_shard_gb * 10**9), 1)
    done = export_checkpoint(options.load, options.hf_out, hf=options.hf, max_shard_bytes=shard_bytes)
    _say(done.notes)
    print(
        f"exported {done.architecture}: {done.num_tensors} tensors in {done.num_files} files, "
        f"{done.num_bytes / _GIB:.2f} GiB of {str(done.dtype).removeprefix('torch.')}, "
        f"{time.monotonic() - started:.1f} s, into {options.hf_out}"
    )
    return EXIT_GOOD


def _verify(options: argparse.Namespace) -> int:
    from megatron.training.conversion.verify import verify_checkpoint

    if options.seq_length is not None and options.seq_length < 2:
        raise ValueError(f"--seq-length is {options.seq_length}, at least 2 tokens are needed")
    done = verify_checkpoint(options.hf, options.load, seq_length=options.seq_length)
    for line in done.lines():
        print(line)
    return EXIT_GOOD if done.is_good else EXIT_FAULT


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}")
