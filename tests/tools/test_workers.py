"""Worker processes: order, death, signals. Nothing may hang, and nothing half-written may stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_pool(body):
    """Run a script around OrderedPool in a process of its own (it forks) and return the finished process."""
    script = f"""
import os, signal, time, sys
from megatron.training.datasets.workers import OrderedPool, WorkerError
def items(n, fail=False):
    yield from range(n)
    if fail:
        raise ValueError("the source broke")
try:
{body}
except (WorkerError, ValueError) as error:
    print(type(error).__name__, error)
"""
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)


def test_results_keep_the_order():
    """The first items are the slowest, and still their results come first."""
    result = run_pool("""
    def slow(i):
        time.sleep(0.1 if i < 2 else 0)
        return i * i
    with OrderedPool(4, slow) as pool:
        print(list(pool.map(items(50))) == [i * i for i in range(50)])
""")
    assert result.stdout == "True\n", result.stderr


def test_source_error_comes_after_the_results_before_it():
    """An error of the input is raised when all items before it are done, whatever the timing."""
    result = run_pool("""
    with OrderedPool(3, lambda i: time.sleep(0.05) or i) as pool:
        for value in pool.map(items(5, fail=True)):
            print(value)
""")
    assert result.stdout == "0\n1\n2\n3\n4\nValueError the source broke\n", result.stderr


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 (SIGKILL), often the system's answer"),
        ("os._exit(3)", "ended with exit code 3"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("sys.exit(0)", "failed: SystemExit: 0"),
    ],
)
def test_death_of_a_worker(what, said):
    """A worker that dies or raises ends the map with one sentence, at once."""
    start = time.monotonic()
    result = run_pool(f"""
    def work(i):
        if i == 7:
            {what}
        return i
    with OrderedPool(3, work) as pool:
        list(pool.map(items(1000)))
""")
    assert result.stdout.startswith("WorkerError worker "), result.stderr
    assert said in result.stdout
    assert time.monotonic() - start < 20


def test_death_of_an_idle_worker():
    """A worker killed while it waits is noticed as well: the others are not left alone with the work."""
    result = run_pool("""
    with OrderedPool(2, lambda i: time.sleep(1.0) or i) as pool:
        os.kill(pool.pids[1], signal.SIGKILL)
        time.sleep(0.2)
        list(pool.map(items(1)))
""")
    assert "was killed by signal 9" in result.stdout, result.stderr


def children(pid):
    """Process ids of the living children of `pid`."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def large_corpus(tmp_path_factory, corpus):
    """Enough text for many seconds of work."""
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    path.write_bytes(corpus.read_bytes() * 200)
    return path


@pytest.fixture
def running(tmp_path, large_corpus, bpe_folder):
    """The tool at work on the large corpus with two workers, and its output folder."""
    out = tmp_path / "out"
    out.mkdir()
    options = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", bpe_folder, "--workers", "2")
    command = [sys.executable, ROOT / "tools/preprocess_data.py", "--input", large_corpus, *options]
    process = subprocess.Popen(
        [*map(str, command), "--output-prefix", str(out / "a"), "--log-interval", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (out / "a_text_document.bin.partial").exists() and len(children(process.pid)) == 2)
    assert process.stderr.readline().startswith("Processed ")  # really at work
    yield process, out
    process.kill()
    process.wait()


def test_killed_worker_ends_the_tool(running):
    """kill -9 of a worker ends the tool within seconds: code 1, a sentence, no file, no process left."""
    process, out = running
    workers = children(process.pid)
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 1
    assert f"(process {workers[0]}) was killed by signal 9 (SIGKILL)" in errors and "nothing was written" in errors
    assert list(out.iterdir()) == []
    assert not any(map(is_alive, workers))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stop_cleans_up(running, number, code):
    """SIGTERM and Ctrl-C leave no file and no process; the code is 128 + signal, as shells expect."""
    process, out = running
    workers = children(process.pid)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == code
    assert f"stopped by {number.name}: nothing was written" in errors and "Traceback" not in errors
    assert list(out.iterdir()) == []
    assert not any(map(is_alive, workers))


def test_kill_leaves_nothing_that_looks_finished(running, corpus, preprocess):
    """After kill -9 of the tool its workers end by themselves, no final name exists, and the next run succeeds."""
    process, out = running
    workers = children(process.pid)
    process.kill()
    process.wait(10)
    wait_for(lambda: not any(map(is_alive, workers)))
    assert {path.name for path in out.iterdir()} == {"a_text_document.bin.partial"}
    assert preprocess("--input", corpus, "--output-prefix", out / "a").returncode == 0
    assert {path.name for path in out.iterdir()} == {"a_text_document.bin", "a_text_document.idx"}


def test_two_runs_to_one_prefix(running, corpus, preprocess):
    """A second run to the same prefix is refused while the first is at work."""
    _, out = running
    result = preprocess("--input", corpus, "--output-prefix", out / "a")
    assert result.returncode == 2
    assert "another process is writing" in result.stderr and "another --output-prefix" in result.stderr
    assert (out / "a_text_document.bin.partial").exists()
