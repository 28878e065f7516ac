"""Files that a run is to write at its end and cannot: one sentence when it starts, on all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.outputs import why_not_writable
from tests.parallel.parallel_cases import free_ports
from tests.training.runs import TINY, run

ROOT = Path(__file__).resolve().parents[2]
TRACE = "--offload-trace {} cannot be written ({}): give a file in a folder that can be written"
RECORD = "--run-dir {} cannot be used (run.jsonl: {}): give a directory that can be written"


@pytest.mark.parametrize(
    ("flag", "path", "sentence", "reason"),
    [
        ("--offload-trace", "file/t.json", TRACE, "its folder is a file"),
        ("--offload-trace", "file/deeper/t.json", TRACE, "Not a directory"),
        ("--offload-trace", ".", TRACE, "it is a directory"),
        ("--run-dir", "file", RECORD, "its folder is a file"),
        ("--run-dir", "file/deeper", RECORD, "Not a directory"),
    ],
)
def test_said_before_the_model_is_built(monkeypatch, tmp_path, flag, path, sentence, reason):
    """The sentence names the flag, what was given and why it cannot be, and nothing large is there yet."""

    def build(*_):
        raise AssertionError("the model was built first")

    monkeypatch.setattr("megatron.training.training.build_model", build)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError) as caught:
        run(f"--train-iters 1 --interleaved-offload {flag} {tmp_path / path}")
    assert str(caught.value) == sentence.format(tmp_path / path, reason)


def test_what_is_there_stays(tmp_path):
    """Folders are made, no empty file is left behind, and one that is there keeps what is in it."""
    assert why_not_writable(tmp_path / "a" / "b" / "t.json") is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "old.json").write_text("{}")
    assert why_not_writable(tmp_path / "old.json") is None
    assert (tmp_path / "old.json").read_text() == "{}"
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a reader
    assert why_not_writable(tmp_path / "pipe") is None


def test_a_record_with_a_folder_for_its_trace(tmp_path):
    """Every file of --run-dir is looked at."""
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(ValueError, match=r"cannot be used \(trace.json: it is a directory\)"):
        run(f"--train-iters 1 --run-dir {tmp_path}")


@pytest.mark.parametrize("flag", ["--offload-trace", "--run-dir"])
def test_no_rank_waits_for_the_one_that_writes(tmp_path, flag):
    """Without a launcher that would end the other: both say the sentence, with code 2 and no post-mortem."""
    (tmp_path / "file").write_text("")
    flags = [*TINY.split(), *"--mock-data --train-iters 1 --micro-batch-size 1 --interleaved-offload".split(), flag]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, str(tmp_path / "file" / "deeper" / "x")],
            cwd=tmp_path,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 2, errors
        last = errors.splitlines()[-1]
        assert last.startswith(f"pretrain_gpt.py: error: {flag} ") and "Not a directory" in last
        assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
