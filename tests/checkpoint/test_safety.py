"""Nothing in a checkpoint executes: every pickle passes the allow-list before torch or megatron-core opens it."""

from __future__ import annotations

import io
import os
import pickle
from argparse import Namespace

import numpy as np
import pytest
import torch

from megatron.training import checkpointing_safety as safety
from megatron.training.checkpointing_format import BoxWriter, CheckpointReader, build_index


class _Evil:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def _torch_bytes(value) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_common_file_that_would_run_code_is_refused(tmp_path):
    """Beside good content, deep inside: the sentence names the file and the function, nothing ran."""
    path, mark = tmp_path / "common.pt", tmp_path / "ran"
    path.write_bytes(_torch_bytes({"args": Namespace(lr=1.0), "nested": [{"x": _Evil(mark)}]}))
    with pytest.raises(ValueError, match=r"common.pt names (posix|nt).system, which no checkpoint needs"):
        safety.load_checked(path, str(path))
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file was harmless: the test proves nothing"


def test_an_index_that_would_run_code_is_refused(tmp_path):
    """.metadata is a plain pickle that every loader opens."""
    path, mark = tmp_path / ".metadata", tmp_path / "ran"
    path.write_bytes(pickle.dumps({"state": _Evil(mark)}))
    with pytest.raises(ValueError, match=r"\.metadata names (posix|nt).system"):
        safety.load_index(path)
    assert not mark.exists()


def test_an_object_among_tensors_that_would_run_code_is_refused(tmp_path):
    """Random number states stand in the same files as tensors, as pickles of their own."""
    mark = tmp_path / "ran"
    with BoxWriter(tmp_path, "__0_0.distcp") as writer:
        writer.add_tensor("weight", (2, 2), (0, 0), (2, 2), torch.ones(4))
        writer.add_object("rng_state/shard_0_1", _Evil(mark))
        written = writer.finish()
    (tmp_path / ".metadata").write_bytes(build_index([written]))
    reader = CheckpointReader(tmp_path)
    with pytest.raises(ValueError, match=r"rng_state/shard_0_1.* names (posix|nt).system"):
        reader.read_object("rng_state/shard_0_1")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", ".."])
def test_an_index_that_leads_outside_is_refused(tmp_path, name):
    """File names in an index are names, not paths."""
    with BoxWriter(tmp_path, "__0_0.distcp") as writer:
        writer.add_tensor("weight", (2,), (0,), (2,), torch.ones(2))
        written = writer.finish()
    written.name = name
    (tmp_path / ".metadata").write_bytes(build_index([written]))
    with pytest.raises(ValueError, match="outside of its folder"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("function", ["builtins.eval", "builtins.getattr", "torch.hub.load", "subprocess.Popen"])
def test_no_name_that_calls_passes(tmp_path, function):
    """Names that reach anything are not on the list, in either file."""
    module, name = function.rsplit(".", 1)
    data = b"\x80\x02c" + module.encode() + b"\n" + name.encode() + b"\n)R."
    with pytest.raises(ValueError, match=f"names {function}"):
        safety._Checker(io.BytesIO(data), "common.pt").load()
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=f"names {function}"):
        safety.load_index(tmp_path / ".metadata")


@pytest.mark.parametrize("name", ["TORCH_CONTIGUOUS_FORMAT", "__class__", "mro"])
def test_only_members_of_enumerations_are_got_by_name(tmp_path, name):
    """Early Pythons 3.11 write a member as getattr(enumeration, name): read, where it is one, and nothing else."""
    module = b"torch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n"
    text = f"V{name}\n".encode()
    got = b"\x80\x02cbuiltins\ngetattr\n(c" + module + text + b"tR."
    reader = safety._IndexUnpickler(io.BytesIO(got), ".metadata")
    if name.isupper():
        assert reader.load().name == name
    else:
        with pytest.raises(ValueError, match="names builtins.getattr"):
            reader.load()


def test_what_megatron_writes_passes(tmp_path):
    """Arguments, numpy's random state, tensors of all types, sets and ordered dictionaries."""
    value = {
        "args": Namespace(a=1, b=None, c=(1, 2), dtype=torch.bfloat16),
        "rng": np.random.get_state(),
        "tensors": [torch.zeros(2, dtype=t) for t in (torch.float32, torch.bfloat16, torch.int16, torch.uint8)],
        "shape": torch.Size([1, 2]),
    }
    loaded = safety.load_checked(_torch_bytes(value), "common.pt")
    assert loaded["args"] == value["args"]
    assert np.array_equal(loaded["rng"][1], value["rng"][1])


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 torn", b"\x80\x02}q\x00."], ids=["empty", "torn", "old"])
def test_torn_files_are_one_sentence(data):
    """No traceback of a pickle machine."""
    with pytest.raises(ValueError, match="common.pt (is torn|cannot be read)"):
        safety.load_checked(data, "common.pt")
