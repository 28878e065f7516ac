"""Files that a run is to write and cannot: one sentence when it starts, on all ranks; a line of the log later."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.outputs import why_not_writable
from megatron.training.run_record import RunRecord
from megatron.training.side_files import SideFiles
from tests.parallel.parallel_cases import free_ports
from tests.training.runs import TINY, digest, log_lines, run, settings

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


def test_a_disk_that_is_full_later_ends_no_run(tmp_path):
    """The files open and take nothing: one line for each, every step is done, and the run ends as it should."""
    (tmp_path / "run").mkdir()
    paths = [tmp_path / "run" / "run.jsonl", tmp_path / "run" / "trace.json", tmp_path / "trace.json"]
    for path in paths:
        path.symlink_to("/dev/full")
    offload = "--interleaved-offload --offload-resident-fraction 0"
    output = run(f"--train-iters 3 {offload} --run-dir {tmp_path / 'run'} --offload-trace {paths[-1]}")
    said = [line for line in output.splitlines() if "could not be written" in line]
    assert said == [
        f"WARNING: {path} could not be written (No space left on device); training goes on without it" for path in paths
    ]
    assert len(log_lines(output)) == 3 and digest(output)
    assert "> wrote" not in output


def test_a_record_goes_on_when_there_is_room_again(tmp_path):
    """What a full disk did not take is said once and lost at most; lines before and after it can be read."""
    said: list[str] = []
    record = RunRecord(settings(f"--train-iters 1 --run-dir {tmp_path}"), True, SideFiles(said.append))
    path, (soft, hard) = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        record.evaluation(1, "validation", {"lm loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
        for iteration in (2, 3, 4):
            record.evaluation(iteration, "validation", {"lm loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record.evaluation(5, "validation", {"lm loss": 1.0})
    record.close()
    found = [json.loads(line)["iteration"] for line in path.read_text().splitlines()]
    assert found[0] == 1 and found[-1] == 5
    assert said == [f"WARNING: {path} could not be written (File too large); training goes on without it"]


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
