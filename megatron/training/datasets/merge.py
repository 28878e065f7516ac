"""Joins indexed datasets into one: the job and the command line of tools/merge_datasets.py."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron.training.datasets.check import PrefixSummary, check_prefix, read_boundaries, read_lengths
from megatron.training.datasets.indexed_format import bin_path
from megatron.training.datasets.indexed_writer import IndexedWriter


def merge_datasets(prefixes: Sequence[str], output_prefix: str) -> PrefixSummary:
    """Write the documents of `prefixes`, in that order, to `output_prefix` and return what it holds.

    Raises ValueError for a damaged source, for different token types and for an output that is also a source.
    """
    summaries = [check_prefix(prefix) for prefix in prefixes]
    first = summaries[0]
    for summary in summaries:
        if summary.dtype != first.dtype:
            raise ValueError(
                f"{bin_path(summary.prefix)} holds {summary.dtype.name}, {bin_path(first.prefix)} {first.dtype.name}: "
                "only datasets of one token type can be joined"
            )
        if os.path.realpath(summary.prefix) == os.path.realpath(output_prefix):
            raise ValueError(f"--output-prefix {output_prefix} is also an input: choose another one")
    with IndexedWriter(output_prefix, first.dtype) as writer:
        for summary in summaries:
            with open(bin_path(summary.prefix), "rb") as source:
                lengths, boundaries = read_lengths(summary.prefix), read_boundaries(summary.prefix)
                writer.append_dataset(source, summary.num_tokens, lengths, boundaries)
        writer.finish()
        writer.publish()
    return check_prefix(output_prefix)


def find_prefixes(folder: str) -> list[str]:
    """Return the prefixes of all datasets in `folder`, sorted. Raises ValueError where a file lacks its partner."""
    if not os.path.isdir(folder):
        raise ValueError(f"--input {folder} is not a directory: give the folder that holds the .bin and .idx files")
    names = [name for name in os.listdir(folder) if name.endswith((".bin", ".idx"))]
    prefixes = sorted({os.path.join(folder, name[: -len(".bin")]) for name in names})
    if not prefixes:
        raise ValueError(f"--input {folder} holds no .bin and .idx files")
    return prefixes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code: 0, 1 for damaged data, 2 for the command line."""
    parser = argparse.ArgumentParser(
        prog="merge_datasets.py",
        allow_abbrev=False,
        description="Join all indexed datasets of a folder, in the order of their names.",
    )
    parser.add_argument("--input", required=True, metavar="DIR", help="folder with the .bin and .idx files")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without .bin")
    args = parser.parse_args(argv)
    folder = os.path.dirname(args.output_prefix) or "."
    if not os.path.isdir(folder):
        parser.error(f"the folder {folder} of --output-prefix {args.output_prefix} does not exist: create it first")
    try:
        prefixes = find_prefixes(args.input)
        summary = merge_datasets(prefixes, args.output_prefix)
    except (ValueError, OSError) as error:
        print(f"merge_datasets.py: error: {error}", file=sys.stderr)
        return 1
    print(
        f"wrote {args.output_prefix}.bin and .idx: {len(prefixes)} datasets, {summary.num_documents} documents, "
        f"{summary.num_tokens} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
