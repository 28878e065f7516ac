"""check_prefix, the index writer and merge_datasets: every kind of damage is named with both numbers."""

from __future__ import annotations

import io
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.training.datasets.check import check_prefix, check_vocabulary, read_boundaries, read_lengths
from megatron.training.datasets.indexed_format import HEADER_BYTES
from megatron.training.datasets.indexed_writer import IndexedWriter, write_index
from megatron.training.datasets.merge import merge_datasets

SEQUENCES = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
NUM_SEQUENCES = len(SEQUENCES)
LENGTHS_AT, POINTERS_AT = HEADER_BYTES, HEADER_BYTES + 4 * NUM_SEQUENCES
BOUNDARIES_AT = POINTERS_AT + 8 * NUM_SEQUENCES


@pytest.fixture
def prefix(dataset, tmp_path):
    """A sound dataset of 4 sequences and 10 tokens of 2 bytes, for this test alone."""
    source = dataset(SEQUENCES)
    for suffix in (".bin", ".idx"):
        shutil.copyfile(source + suffix, tmp_path / f"set{suffix}")
    return str(tmp_path / "set")


def patch(path, offset, data):
    content = bytearray(Path(path).read_bytes())
    content[offset : offset + len(data)] = data
    Path(path).write_bytes(content)


def test_sound(prefix):
    """A sound dataset is summed up."""
    summary = check_prefix(prefix)
    assert (summary.num_sequences, summary.num_documents, summary.num_tokens) == (4, 4, 10)
    assert summary.dtype == np.uint16 and summary.bin_bytes == os.path.getsize(f"{prefix}.bin")
    assert read_lengths(prefix).tolist() == [3, 1, 2, 4]
    assert read_boundaries(prefix).tolist() == [0, 1, 2, 3, 4]


# name: (file, offset, bytes written there, what is said)
DAMAGE = {
    "magic": (".idx", 0, b"TAR", "set.idx starts with b'TARIDIDX"[:21]),
    "version": (".idx", 9, struct.pack("<Q", 2), "set.idx has version 2, only version 1"),
    "type": (".idx", 17, b"\x09", "set.idx has token type code 9, allowed are 1 to 8"),
    "count": (".idx", 18, struct.pack("<Q", 5), "set.idx has 122 bytes, its header says 134"),
    "negative length": (".idx", LENGTHS_AT + 4, struct.pack("<i", -1), "sequence 1 of 4 has -1 tokens"),
    "length": (
        ".idx",
        LENGTHS_AT,
        struct.pack("<i", 2),
        "sequence 1 of 4 starts at byte 6, the lengths before it say 4",
    ),
    "last length": (".idx", LENGTHS_AT + 12, struct.pack("<i", 5), "set.bin has 20 bytes, its index says 22"),
    "pointer": (".idx", POINTERS_AT + 16, struct.pack("<q", -8), "sequence 2 of 4 starts at byte -8, the lengths"),
    "first boundary": (".idx", BOUNDARIES_AT, struct.pack("<q", 1), "the first document starts at sequence 1, not 0"),
    "boundaries": (".idx", BOUNDARIES_AT + 16, struct.pack("<q", 0), "boundary 2 is 0, less than the one before it, 1"),
    "last boundary": (
        ".idx",
        BOUNDARIES_AT + 32,
        struct.pack("<q", 3),
        "the last document ends at sequence 3, but the index has 4 sequences",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(prefix, name):
    """Each damaged field is named, in one sentence with the file and both numbers."""
    suffix, offset, data, said = DAMAGE[name]
    patch(prefix + suffix, offset, data)
    with pytest.raises(ValueError) as caught:
        check_prefix(prefix)
    message = str(caught.value)
    assert said in message and prefix in message and "\n" not in message


@pytest.mark.parametrize(
    ("suffix", "size", "said"),
    [
        (".bin", 19, "set.bin has 19 bytes, its index says 20: it was cut short"),
        (".bin", 0, "set.bin has 0 bytes, its index says 20: it was cut short"),
        (".bin", 22, "set.bin has 22 bytes, its index says 20: it does not belong to this index"),
        (".idx", 121, "set.idx has 121 bytes, its header says 122: it was cut short"),
        (".idx", 130, "set.idx has 130 bytes, its header says 122: it is too long"),
        (".idx", 20, "set.idx has 20 bytes, its header alone takes 34"),
        (".idx", 0, "set.idx has 0 bytes, its header alone takes 34"),
    ],
)
def test_wrong_size(prefix, suffix, size, said):
    """A file that was cut, or got longer, is found by its size alone."""
    os.truncate(prefix + suffix, size)
    with pytest.raises(ValueError) as caught:
        check_prefix(prefix)
    assert said in str(caught.value)


def test_every_flipped_byte_of_the_index_is_found(prefix):
    """No byte of the index can change without being found, but for boundaries that shift inside their neighbors."""
    whole = Path(f"{prefix}.idx").read_bytes()
    positions = [*range(BOUNDARIES_AT + 8), *range(len(whole) - 8, len(whole))]
    for i in positions:
        patch(f"{prefix}.idx", i, bytes([whole[i] ^ 1]))
        with pytest.raises(ValueError):
            check_prefix(prefix)
        patch(f"{prefix}.idx", i, whole[i : i + 1])
    check_prefix(prefix)


def test_missing_files(prefix, tmp_path):
    """A missing file is named; a prefix with an ending or without its tail is answered with the right one."""
    with pytest.raises(ValueError, match=r"none.idx does not exist: check the path given by --data-path"):
        check_prefix(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"set.bin is a file: give the prefix without its ending, .*set$"):
        check_prefix(f"{prefix}.bin")
    with pytest.raises(ValueError, match=r"se.idx does not exist, did you mean .*/set\?"):
        check_prefix(str(tmp_path / "se"))
    os.unlink(f"{prefix}.bin")
    with pytest.raises(ValueError, match=r"set.bin does not exist"):
        check_prefix(prefix)


def test_no_token(dataset):
    """A dataset without a token is refused: core would fail on mapping an empty file."""
    with pytest.raises(ValueError, match="has 0 tokens in 2 sequences"):
        check_prefix(dataset([[], []]))


def test_pointers_beyond_two_gib(tmp_path):
    """Offsets beyond 2**31 and 2**32 are right, as core writes them, and checked against a sparse .bin of 5 GiB."""
    lengths = np.asarray([2**29 - 1, 2**30, 2**30, 7], dtype=np.int32)
    boundaries = np.arange(5)
    out = io.BytesIO()
    write_index(out, np.dtype(np.uint16), lengths, boundaries)
    prefix = str(tmp_path / "big")
    Path(f"{prefix}.idx").write_bytes(out.getvalue())
    num_tokens = int(lengths.sum(dtype=np.int64))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * num_tokens)  # sparse: takes no disk
    assert check_prefix(prefix).num_tokens == num_tokens > 2**31
    pointers = np.frombuffer(out.getvalue(), dtype=np.int64, count=4, offset=HEADER_BYTES + 16)
    assert pointers.tolist() == [0, 2 * (2**29 - 1), 2 * (2**29 - 1 + 2**30), 2 * (2**29 - 1 + 2**31)]
    with open(f"{prefix}.bin", "ab") as file:
        file.truncate(2 * num_tokens - 2)
    with pytest.raises(ValueError, match=f"has {2 * num_tokens - 2} bytes, its index says {2 * num_tokens}"):
        check_prefix(prefix)
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    with indexed_dataset._IndexWriter(f"{prefix}.core", np.uint16) as writer:
        writer.write(lengths, None, boundaries)
    assert Path(f"{prefix}.core").read_bytes() == out.getvalue()


def test_many_pointers_are_written_in_pieces(monkeypatch):
    """The pieces in which pointers are written join without a seam."""
    from megatron.training.datasets import indexed_writer

    lengths, boundaries = np.arange(1, 24, dtype=np.int32), np.arange(24)
    whole, pieces = io.BytesIO(), io.BytesIO()
    write_index(whole, np.dtype(np.int32), lengths, boundaries)
    monkeypatch.setattr(indexed_writer, "_POINTERS_PER_WRITE", 5)
    write_index(pieces, np.dtype(np.int32), lengths, boundaries)
    assert pieces.getvalue() == whole.getvalue()


def test_large_index_is_checked_in_pieces(prefix, monkeypatch):
    """The pieces in which an index is read join without a seam, and damage is placed right."""
    from megatron.training.datasets import check

    monkeypatch.setattr(check, "_CHUNK", 3)
    assert check_prefix(prefix).num_tokens == 10
    assert check_vocabulary(check_prefix(prefix), 11) == (1, 10)
    patch(f"{prefix}.idx", POINTERS_AT + 24, struct.pack("<q", 10))
    with pytest.raises(ValueError, match="sequence 3 of 4 starts at byte 10, the lengths before it say 12"):
        check_prefix(prefix)


def test_ids_outside_the_vocabulary(prefix, dataset, monkeypatch):
    """The first id outside the vocabulary is named with its place, in whatever piece it lies; negative ones too."""
    from megatron.training.datasets import check

    assert check_vocabulary(check_prefix(prefix), 11) == (1, 10)
    monkeypatch.setattr(check, "_CHUNK", 4)
    with pytest.raises(ValueError, match=r"set.bin: token 6 \(in sequence 3\) is 7, allowed are 0 to 6: "):
        check_vocabulary(check_prefix(prefix), 7)
    negative = dataset([[1, -1]], np.int32)
    with pytest.raises(ValueError, match="token 1 .in sequence 0. is -1, allowed are 0 to 9"):
        check_vocabulary(check_prefix(negative), 10)


def test_writer_leaves_nothing_after_an_error(tmp_path):
    """An exception before publish removes the temporary files and keeps what stood there."""
    prefix = str(tmp_path / "a")
    Path(f"{prefix}.bin").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.append_document([1, 2], [2])
        writer.finish()
        raise RuntimeError("stop")
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert Path(f"{prefix}.bin").read_bytes() == b"old"


def test_merge_as_core(tmp_path, dataset, run_tool):
    """merge_datasets.py writes what core's builder writes when it appends the same datasets."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    source = tmp_path / "in"
    source.mkdir()
    for name, sequences in (("b", SEQUENCES), ("a", [[11, 12], []]), ("c", [[13] * 100])):
        made = dataset(sequences)
        for suffix in (".bin", ".idx"):
            shutil.copyfile(made + suffix, source / f"{name}{suffix}")
    result = run_tool("merge_datasets", "--input", source, "--output-prefix", tmp_path / "all")
    assert result.returncode == 0, result.stderr
    assert "3 datasets, 7 documents, 112 tokens" in result.stdout
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "core.bin"), dtype=np.uint16)
    for name in "abc":
        builder.add_index(str(source / name))
    builder.finalize(str(tmp_path / "core.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"core{suffix}").read_bytes()


def test_merge_refuses(tmp_path, prefix, dataset, run_tool):
    """Damaged sources, mixed types, a folder without datasets and an output among the inputs are refused."""
    wide = dataset(SEQUENCES, np.int32)
    with pytest.raises(ValueError, match="holds int32, .* uint16: only datasets of one token type"):
        merge_datasets([prefix, wide], str(tmp_path / "out"))
    with pytest.raises(ValueError, match="is also an input"):
        merge_datasets([prefix], prefix)
    os.truncate(f"{prefix}.bin", 4)
    result = run_tool("merge_datasets", "--input", tmp_path, "--output-prefix", tmp_path / "out")
    assert result.returncode == 1 and "set.bin has 4 bytes, its index says 20" in result.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run_tool("merge_datasets", "--input", empty, "--output-prefix", tmp_path / "out")
    assert result.returncode == 1 and "holds no .bin and .idx files" in result.stderr
    assert not list(tmp_path.glob("out*"))
