"""Runs of one benchmark part: a process for each peer, one for all of ours; figures one JSON line a run, done once.

A part is a list of runs in a fixed order. A run that is in the results file and did not fail is not repeated, so a part
that was cut short goes on where it stopped. Lines name the machine's boot: only runs of one boot are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES

RESULTS_FILE = "results.jsonl"
Record = dict[str, Any]

TRAINING = (
    "--mock-data --num-workers 1 --lr 1e-4 --lr-decay-style constant --adam-beta2 0.95 --clip-grad 1.0 "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --log-interval 1"
)
NO_EVALUATION = "--eval-iters 0 --eval-interval 1000000 --split 100,0,0"
NUM_SETTLING = 4
"""First iterations that a median leaves out: compilation, and the placement that follows measured peaks."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process. ours: pretrain_gpt.py with `words`; otherwise the peer of this name, `words` for benchmarks.peers.

    expected_s: how long it takes, to know whether it fits into the time that is left.
    """

    name: str
    words: str = ""
    ours: bool = True
    shape: str = "3.5b"
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    iterations: int = 12
    fp32_grads: bool = False
    evaluation: str = NO_EVALUATION
    environment: dict[str, str] = field(default_factory=dict)
    expected_s: float = 60.0

    def command(self, folder: Path, use_cpu: bool) -> list[str]:
        """Return the command line; our run record goes into `folder`."""
        cpu = ["--use-cpu"] if use_cpu else []
        if not self.ours:
            sizes = f"--micro-batch-size {self.micro_batch_size} --num-micro-batches {self.num_micro_batches}"
            words = [self.name, "--shape", self.shape, *sizes.split(), *shlex.split(self.words), *cpu]
            return [sys.executable, "-m", "benchmarks.peers", *words]
        batch = f"--micro-batch-size {self.micro_batch_size} "
        batch += f"--global-batch-size {self.micro_batch_size * self.num_micro_batches} --train-iters {self.iterations}"
        precision = "" if self.fp32_grads else "--grad-reduce-in-bf16"
        text = " ".join([SHAPES[self.shape].command(), TRAINING, batch, precision, self.evaluation, self.words])
        return [sys.executable, "pretrain_gpt.py", *shlex.split(text), "--run-dir", str(folder), *cpu]


class Worker:
    """The process of `benchmarks.worker`, started when it is needed, anew after a run that failed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def train(self, arguments: Sequence[str], log: Path, limit_s: float) -> int:
        """Train, output appended to `log`; returns 0, or the process's exit code."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        killer = threading.Timer(limit_s, os.killpg, [process.pid, signal.SIGKILL])
        killer.start()
        try:
            process.stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:  # it ended between two runs
            answer = ""
        finally:
            killer.cancel()
        if answer:
            return 0
        self._process = None
        return process.wait() or -1

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


@dataclass(frozen=True, slots=True)
class Session:
    """Where results go, how long this call may take, and which runs it is for.

    only: names of runs to do, empty for all. deadline: time.monotonic() after which nothing more starts.
    """

    output: Path
    deadline: float
    only: tuple[str, ...] = ()
    use_cpu: bool = False
    worker: Worker = field(default_factory=lambda: Worker())

    @property
    def results(self) -> Path:
        return self.output / RESULTS_FILE

    @property
    def limit_s(self) -> float:
        """Seconds that a process may take from now on."""
        return max(30.0, self.deadline + 30.0 - time.monotonic())


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Options of every program that runs parts."""
    parser.add_argument("--only", default="", help="names of runs to do, a comma between; default all")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="results.jsonl and logs")
    parser.add_argument("--limit-seconds", type=float, default=520.0, help="start nothing that would end later")
    parser.add_argument("--report", action="store_true", help="run nothing, show what is there")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")


def run_parts(
    parts: Mapping[str, Sequence[Run]],
    options: argparse.Namespace,
    report: Callable[[str, Sequence[Record]], Sequence[str]],
) -> int:
    """Do and report these parts; returns the exit code: 1 where a run failed."""
    only = tuple(word for word in options.only.split(",") if word)
    session = Session(options.output, time.monotonic() + options.limit_seconds, only, options.smoke)
    records: list[Record] = []
    try:
        for name, runs in parts.items():
            mine = read_records(session.results, name) if options.report else run_part(name, runs, session)
            print("\n".join(report(name, mine)), flush=True)
            records += mine
    finally:
        session.worker.close()
    return 1 if any("failed" in record for record in records) else 0


def machine_id() -> str:
    """What stays the same until the machine starts anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def read_records(path: Path, part: str | None = None) -> list[Record]:
    """Return a results file's newest line for each position of each part, or of one part."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    newest = {(record["part"], record["position"]): record for record in records}
    return [record for record in newest.values() if part in (None, record["part"])]


def run_part(part: str, runs: Sequence[Run], session: Session) -> list[Record]:
    """Do what the part lacks, failed runs again; returns its records in order, which may be fewer when time is up."""
    session.output.mkdir(parents=True, exist_ok=True)
    done = {record["position"] for record in read_records(session.results, part) if "failed" not in record}
    for position, run in enumerate(runs):
        if position in done or (session.only and run.name not in session.only):
            continue
        left = session.deadline - time.monotonic()
        if left < _expected(part, run, session):
            print(f"part {part} stops before {run.name}: {left:.0f} s are left; run it again to go on", flush=True)
            break
        record = {"part": part, "position": position, "machine": machine_id(), **execute(part, position, run, session)}
        with session.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(one_line(record), flush=True)
    return sorted(read_records(session.results, part), key=lambda record: record["position"])


def _expected(part: str, run: Run, session: Session) -> float:
    """Seconds that the run will take: what it took in this part on this machine, or the guess that it brings."""
    records = read_records(session.results, part)
    same = [r for r in records if r["name"] == run.name and r["machine"] == machine_id() and "failed" not in r]
    return same[-1]["process_s"] * 1.1 if same else run.expected_s


def execute(part: str, position: int, run: Run, session: Session) -> Record:
    """Run one process to its end; returns its record. A failure is a record too, with the last lines in `failed`."""
    folder = session.output / "logs" / f"{part}-{position:02d}-{run.name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").unlink(missing_ok=True)
    command, log = run.command(folder, session.use_cpu), folder / "log.txt"
    begin = time.monotonic()
    plan = _plan(command, folder / "plan.txt", session) if run.ours else {}
    log.write_text(shlex.join(command) + "\n")
    if run.ours and not run.environment:
        code = session.worker.train(command[2:], log, session.limit_s)
    else:
        code = _call(command, log, {**os.environ, **run.environment}, session.limit_s)
    record: Record = {
        "name": run.name,
        "shape": run.shape,
        "micro_batch_size": run.micro_batch_size,
        "num_micro_batches": run.num_micro_batches,
        "command": shlex.join(["python", *command[1:]]),
        "process_s": round(time.monotonic() - begin, 1),
        **plan,
    }
    text = log.read_text(errors="replace")
    if code != 0:
        return {**record, "failed": f"code {code}: " + " / ".join(text.splitlines()[-4:])[-700:]}
    try:
        return {**record, **(read_ours(folder, text) if run.ours else read_peer(text))}
    except (LookupError, ValueError) as error:
        return {**record, "failed": f"its output was not understood: {error!r}"}


def _plan(command: Sequence[str], log: Path, session: Session) -> Record:
    """Ask for the plan of one of our runs, on the rates that are known before it; nothing where that fails."""
    log.unlink(missing_ok=True)
    code = session.worker.train([*command[2:], "--dry-run"], log, session.limit_s)
    return read_plan(log.read_text()) if code == 0 else {}


def _call(command: list[str], log: Path, environment: dict[str, str], limit_s: float) -> int:
    with log.open("a") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait() or -1


def read_peer(text: str) -> Record:
    """Return the figures of a peer's RESULT line. Raises LookupError where there is none."""
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT "))


def read_ours(folder: Path, text: str) -> Record:
    """Return the figures of one of our runs from its run record and its output."""
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    start = next(event for event in events if event["event"] == "start")
    end = next(event for event in events if event["event"] == "end")
    settled = steps[min(NUM_SETTLING, len(steps) - 1) :]
    numel = int(re.findall(r"number of parameters on .*: (\d+)", text)[0])
    updates = [step["update"] for step in settled if step["update"]]
    memory = end["memory"]
    record: Record = {
        "numel": numel,
        "iterations_ms": [round(step["seconds"] * 1e3, 2) for step in steps],
        "iteration_ms": round(statistics.median(step["seconds"] for step in settled) * 1e3, 2),
        "losses": [round(next(iter(step["losses"].values()), float("nan")), 6) for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "wait_ms": round(statistics.median(step["wait_seconds"] for step in settled) * 1e3, 2),
        "host_gib": round(memory["host_peak"] / 2**30, 2),
        "placement": start["placement"],
        "state_gib": {k: round(v / 2**30, 2) for k, v in start["state_bytes"].items()},
        "traffic": end["traffic"],
        "train_s": round(end["seconds"], 2),
        "predicted_in_place_ms": round((start["predicted"] or {"update_seconds": 0})["update_seconds"] * 1e3, 2),
        "times_ms": _median_times(settled),
        "notes": [event["text"] for event in events if event["event"] == "note"][-5:],
    }
    if "device_peak" in memory:
        record["gpu_gib"] = round(memory["device_peak"] / 2**30, 2)
    if updates:
        seconds = statistics.median(update["seconds"] for update in updates)
        record["update_ms"] = round(seconds * 1e3, 2)
        in_place = statistics.median(update["in_place_seconds"] for update in updates)
        record["in_place_ms"] = round(in_place * 1e3, 2)
        record["update_g_per_s"] = round(numel / seconds / 1e9, 3)
        record["bound"] = {"lane": updates[-1]["lane"], "share": round(updates[-1]["share_of_bound"], 3)}
        record["busy"] = {lane: round(share, 3) for lane, share in updates[-1]["busy"].items()}
    digests = re.findall(r"state digest: (\S+)", text)
    return record if not digests else {**record, "digest": digests[-1]}


def read_plan(text: str) -> Record:
    """Return what --dry-run said about a command line, GiB and milliseconds."""
    record: Record = {}
    for kind, name in (("GPU", "predicted_gpu_gib"), ("host", "predicted_host_gib")):
        found = re.search(rf"^{kind} bytes of a rank: ([\d.]+) (GiB|MiB)", text, re.MULTILINE)
        if found:
            record[name] = float(found[1]) / (1.0 if found[2] == "GiB" else 1024.0)
    found = re.search(r"^predicted iteration: ([\d.]+) ms", text, re.MULTILINE)
    return record if found is None else {**record, "predicted_iteration_ms": float(found[1])}


def _median_times(steps: Sequence[Record]) -> dict[str, float]:
    names = steps[-1]["times"]
    return {name: round(statistics.median(step["times"].get(name, 0.0) for step in steps) * 1e3, 2) for name in names}


def spread(values: Sequence[float]) -> str:
    """Return a median with the least and the greatest value, as tables show it."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def one_line(record: Record) -> str:
    """Return what is worth seeing of a record while a part runs."""
    head = f"{record['part']} {record['position']:2d} {record['name']}"
    if "failed" in record:
        return f"{head}: FAILED after {record['process_s']} s, {record['failed']}"
    fields = [f"iteration {record['iteration_ms']} ms"]
    for key, unit in (("forward_ms", "ms"), ("backward_ms", "ms"), ("step_ms", "ms"), ("update_ms", "ms")):
        if key in record:
            fields.append(f"{key.removesuffix('_ms')} {record[key]} {unit}")
    if record.get("predicted_in_place_ms"):
        predicted, measured = record["predicted_in_place_ms"], record.get("in_place_ms", "?")
        fields.append(f"in place after {measured} ms (predicted {predicted})")
    fields += [f"{key.removesuffix('_gib')} {record[key]} GiB" for key in ("gpu_gib", "host_gib") if key in record]
    losses = record["losses"]
    fields.append("losses " + " ".join(f"{loss:.3f}" for loss in (losses if len(losses) < 13 else losses[-3:])))
    if "placement" in record:
        fields.append(next((line for line in record["placement"] if "GPU share" in line or "resident" in line), ""))
    return f"{head}: " + ", ".join(fields) + f", process {record['process_s']} s"
