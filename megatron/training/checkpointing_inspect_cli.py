"""The command line of tools/checkpoint/inspect.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.training.checkpointing_inspect import (
    Checkpoint,
    differences,
    misfits,
    open_checkpoint,
    problems,
)
from megatron.training.checkpointing_safety import read_checksums

_OK, _FOUND, _USAGE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Run a command; returns 0 if all is well (or nothing differs), 1 if something was found, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="inspect.py", description="Look at checkpoints without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check files, pickles and completeness")
    look = commands.add_parser("inspect", help="sizes, parameters, norms, where it loads")
    compare = commands.add_parser("diff", help="which tensors differ, by how many units in the last place")
    for command in (verify, look):
        command.add_argument("path", type=Path, help="directory given to --save, or one iter_NNNNNNN in it")
        command.add_argument("--step", type=int, help="iteration instead of the newest")
    verify.add_argument("--digest", action="store_true", help="print the state digest, as --log-state-digest does")
    verify.add_argument("--vocab-size", type=int, help="rows of the vocabulary that count (default: as saved)")
    look.add_argument("--norms", action="store_true", help="also read every tensor and print its norm")
    for name, short in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp")):
        look.add_argument(f"--{short}", type=int, default=None, help=f"can it load at this {name} parallel size?")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "verify":
            return _verify(open_checkpoint(args.path, args.step), args.digest, args.vocab_size)
        if args.command == "inspect":
            return _inspect(open_checkpoint(args.path, args.step), args.norms, (args.tp, args.pp, args.dp))
        return _diff(open_checkpoint(args.first), open_checkpoint(args.second))
    except (ValueError, OSError) as error:
        print(f"inspect.py: error: {error}", file=sys.stderr)
        return _FOUND


def _verify(checkpoint: Checkpoint, with_digest: bool, vocab_size: int | None) -> int:
    found = problems(checkpoint)
    for sentence in found:
        print(f"inspect.py: error: {sentence}", file=sys.stderr)
    if found:
        return _FOUND
    sums = read_checksums(checkpoint.folder)
    how = f"{len(sums)} files match their checksums" if sums else "no checksums, sizes are right"
    print(f"{checkpoint.folder}: complete, {how}, pickles are plain")
    if with_digest:
        print(f"state digest: {checkpoint.digest(vocab_size)}")
    return _OK


def _inspect(checkpoint: Checkpoint, with_norms: bool, sizes: tuple[int | None, int | None, int | None]) -> int:
    tensors = list(checkpoint.tensors())
    args, total = checkpoint.args, sum(t.num_bytes for t in tensors)
    print(f"{checkpoint.folder}")
    print(f"iteration {checkpoint.common.get('iteration', 'unknown')}, optimizer steps {checkpoint.step}")
    layout = tuple(args.get(f"{n}_model_parallel_size", "?") for n in ("tensor", "pipeline"))
    print(f"saved at TP {layout[0]} x PP {layout[1]} x DP {args.get('data_parallel_size', '?')}, loads at any")
    numel = sum(t.num_bytes // t.dtype.itemsize for t in tensors if t.kind == "param")
    print(f"{numel:,} parameters, {total / 2**30:.3f} GiB of tensors in {len(checkpoint.reader.files())} files")
    for tensor in sorted(tensors, key=lambda t: (t.name, t.kind)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        norm = f"  norm {checkpoint.norm(tensor):.6e}" if with_norms else ""
        print(f"  {tensor.name}  {tensor.kind}  {dtype}  {list(tensor.shape)}{norm}")
    if any(size is not None for size in sizes):
        tensor_size, pipeline, data = (size or 1 for size in sizes)
        why = misfits(args, tensor_size, pipeline, data)
        name = f"TP {tensor_size} x PP {pipeline} x DP {data}"
        print(f"loads at {name}: " + ("yes" if not why else "no, " + "; ".join(why)))
        return _FOUND if why else _OK
    return _OK


def _diff(first: Checkpoint, second: Checkpoint) -> int:
    found = 0
    for d in differences(first, second):
        found += 1
        said = d.note or f"{d.num_different} of {d.numel} elements, at most {d.max_ulp} ULP"
        print(f"  {d.name}  {d.kind}: {said}")
    if first.step != second.step:
        print(f"  optimizer steps: {first.step} and {second.step}")
    same = found == 0 and first.step == second.step
    print("the same bit by bit" if same else f"{found} tensors differ")
    return _OK if same else _FOUND
