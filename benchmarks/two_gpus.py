"""Two GPUs of one host: exactness, update rates of both ranks at once, and the sizes that users train.

    python -m benchmarks.two_gpus --output out/two_gpus [--parts digests,update,dp2,tp2,13b,20b] [--seconds 530]

Parts: digests (pytest tests/multi_gpu), update (the update phase alone, both ranks at once), dp2 and tp2 (3.48 B
parameters, all resident and offloaded), connections (tp2 with one hardware queue), 13b and 20b (11.3 B and 15.3 B
parameters in the method's published shapes, tensor parallel), peer (DeepSpeed ZeRO-2 with offload, data-parallel).

Started again with the same output folder, it goes on with what is missing; what would not end in --seconds is left out
and named. Ends with code 1 when something failed, and when digests or losses of one part differ. --smoke: small sizes,
two processes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shapes import SHAPES, Shape

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PEER = [*TORCHRUN, "-m", "benchmarks.peer_ranks", "ds_z2"]
TRAINING = (
    "--micro-batch-size 1 --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 "
    "--clip-grad 1.0 --bf16 --grad-reduce-in-bf16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --attention-dropout 0 --hidden-dropout 0 --deterministic-mode --mock-data "
    "--num-workers 1 --log-interval 1 --eval-interval 100000 --eval-iters 0 --split 100,0,0 --log-state-digest "
    "--interleaved-offload --overlap-grad-reduce"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 1"
DATA = "--overlap-param-gather --global-batch-size 2"
RESIDENT, OFFLOADED = "--offload-resident-fraction 1", "--offload-resident-fraction 0"
_PUBLISHED = SHAPES["paper-7b"].flags


@dataclass(frozen=True, slots=True)
class Part:
    """Trainings that must end in the same state. runs: name and flags of each; needs: seconds of one of them."""

    shape: Shape
    flags: str
    runs: tuple[tuple[str, str], ...]
    needs: float
    num_iterations: int
    environment: dict[str, str] = field(default_factory=dict)
    one_process: bool = True
    """Whether one start serves all runs; each of the largest ones gets clean processes."""


AUTO = ("auto", OFFLOADED)
SHARE_0 = ("share0", f"{OFFLOADED} --offload-gpu-share 0")
TRAININGS = {
    "dp2": Part(SHAPES["3.5b"], DATA, (("resident", RESIDENT), AUTO), 45, 6),
    "tp2": Part(SHAPES["3.5b"], TENSOR, (("resident", RESIDENT), AUTO), 45, 6),
    "connections": Part(SHAPES["3.5b"], TENSOR, (AUTO,), 45, 6, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "13b": Part(
        Shape(40, 5120, 13824, 40, 50304, 2048, _PUBLISHED),
        TENSOR,
        (AUTO, SHARE_0),
        110,
        20,
        one_process=False,
    ),
    "20b": Part(
        Shape(40, 5120, 20480, 64, 50304, 2048, _PUBLISHED),
        TENSOR,
        (AUTO, SHARE_0),
        150,
        20,
        one_process=False,
    ),
}
UPDATE = {
    "split off": "--splits off --shares 0.5,0.625,0.75,auto",
    "split on": "--splits on --shares 0.5,0.625,0.75,auto",
}
PARTS = ("digests", "update", "dp2", "tp2", "13b", "20b", "connections", "peer")
SMALL = Shape(2, 64, 128, 4, 512, 32, _PUBLISHED)


class Clock:
    """How much of the time is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


class Runner:
    """Starts commands within the time that is left; collects what went wrong."""

    def __init__(self, output: Path, clock: Clock, is_small: bool) -> None:
        self.output, self.clock, self.is_small = output, clock, is_small
        self.problems: list[str] = []

    def call(self, command: list[str], log: Path, needs: float, environment: dict[str, str] | None = None) -> bool:
        """Run, with its output in `log`; returns whether it ended well. Left out if less than `needs` s are left."""
        name = log.stem
        if self.clock.left() < needs:
            self.problems.append(f"{name}: left out, it takes about {needs:.0f} s and {self.clock.left():.0f} are left")
            return False
        start = time.monotonic()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "DEEP_OFFLOAD_CACHE": str(self.output.resolve() / "profiles"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **({"CUDA_VISIBLE_DEVICES": ""} if self.is_small else {}),
            **(environment or {}),
        }
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | str = process.wait(max(1.0, self.clock.left()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = f"none, time was up after {process.wait() and time.monotonic() - start:.0f} s"
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        if code != 0:
            last = "\n    ".join(log.read_text(errors="replace").splitlines()[-12:])
            self.problems.append(f"{name}: exit code {code}:\n    {last}")
        return code == 0


def run_digests(runner: Runner) -> None:
    """The tests of two GPUs; small: those of the same cases on the CPU."""
    log = runner.output / "digests.log"
    if log.exists() and " passed" in log.read_text() and " failed" not in log.read_text():
        print("digests: done before", flush=True)
        return
    options = ["tests/parallel/test_layouts.py", "-k", "cover"] if runner.is_small else ["tests/multi_gpu"]
    if runner.call([sys.executable, "-m", "pytest", "-q", "--durations=8", *options], log, 60):
        print("    " + log.read_text().splitlines()[-1], flush=True)


def run_update(runner: Runner) -> None:
    """Update rates of both ranks at once: `benchmarks.update_phase` for each storage of the masters."""
    size = ["--num-subgroups", "4", "--numel", "100000", "--repeats", "2"] if runner.is_small else []
    for name, flags in UPDATE.items():
        log = runner.output / f"update {name}.log".replace(" ", "_")
        if not (log.exists() and log.read_text().count(" G/s") == 8):
            runner.call([*TORCHRUN, "-m", "benchmarks.update_phase", *flags.split(), *size], log, 50)
        for line in log.read_text().splitlines() if log.exists() else ():
            if " G/s" in line:
                print("    " + line, flush=True)


def run_training(runner: Runner, name: str, part: Part, num_iterations: int | None, is_digested: bool) -> None:
    """Train what is missing of a part, then print its table."""
    shape = SMALL if runner.is_small else part.shape
    count = 3 if runner.is_small else num_iterations or part.num_iterations
    flags = f"{shape.command()} {TRAINING} {part.flags} --train-iters {count}"
    if not is_digested:
        flags = flags.replace("--log-state-digest", "")
    if runner.is_small:
        flags += " --offload-cpu-threads 1 --distributed-timeout-minutes 2"
    missing = [(f"{name}_{run}", f"{flags} {more}") for run, more in part.runs if not read(runner.output, name, run)]
    for job in [missing] if part.one_process else [[run] for run in missing]:
        if job:
            label = name if part.one_process else job[0][0]
            path = runner.output / f"{label}.job.json"
            path.write_text(json.dumps({"folder": str(runner.output.resolve()), "runs": job}))
            needs = 5.0 if runner.is_small else part.needs * len(job)
            runner.call(
                [*TORCHRUN, "-m", "benchmarks.rank_job", str(path)],
                runner.output / f"{label}.log",
                needs,
                part.environment,
            )
    tokens = shape.seq_length * (2 if "--global-batch-size 2" in part.flags else 1)
    print_table(runner, name, part, tokens, is_digested)


def read(folder: Path, name: str, run: str) -> list[dict]:
    """What both ranks noted of a run; empty unless both completed it."""
    paths = [folder / f"{name}_{run}.rank{rank}.json" for rank in (0, 1)]
    return [json.loads(path.read_text()) for path in paths] if all(path.exists() for path in paths) else []


def print_table(runner: Runner, name: str, part: Part, tokens: int, is_digested: bool) -> None:
    """One row for each run, and whether they agree."""
    done = {run: ranks for run, _ in part.runs if (ranks := read(runner.output, name, run))}
    print(
        f"| {name} | placement | iterations | median ms | tokens/s | update ms by rank "
        "(in place: predicted / measured) | G parameters/s by rank "
        "| peak GPU GiB by rank | state on host GiB by rank | loss | whole run s (digest) | digest |"
    )
    print("|---" * 12 + "|")
    for run, ranks in done.items():
        last = ranks[-1]
        rates = [r["numel"] / r["update_ms"] / 1e6 if r["update_ms"] else 0.0 for r in ranks]
        print(
            f"| {run} | {ranks[0]['placement']} | {last['num_iterations']} "
            f"| {last['iteration_ms']:.0f} | {tokens / last['iteration_ms'] * 1e3:.0f} "
            f"| {_row(r['update_ms'] or 0.0 for r in ranks)} ({ranks[0]['predicted_ms']:.0f} / "
            f"{_row(r['in_place_ms'] or 0.0 for r in ranks)}) | {_row(rates, 2)} "
            f"| {_row((r['peak_device_bytes'] / GIB for r in ranks), 2)} "
            f"| {_row((r['state_bytes'][0] / GIB for r in ranks), 2)} | {last['losses'][0]} -> {last['losses'][-1]} "
            f"| {last['seconds']:.0f} ({ranks[0].get('digest_seconds', 0.0):.0f}) | {ranks[0]['digest'][:19]} |",
            flush=True,
        )
    outcomes = {(ranks[0]["digest"], tuple(ranks[-1]["losses"])) for ranks in done.values()}
    if len(outcomes) > 1:
        runner.problems.append(f"{name}: digests or losses differ")
    elif len(done) == len(part.runs) > 1:
        print(f"{name}: one {'digest, one ' if is_digested else ''}loss curve", flush=True)


def _row(values: object, digits: int = 0) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/two_gpus"))
    parser.add_argument("--parts", default="digests,update,dp2,tp2,13b,20b", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=530, help="time for all parts together")
    parser.add_argument("--iterations", type=int, help="of each training; default: 6, and 20 for 13b and 20b")
    parser.add_argument("--undigested", default="", help="trainings of which only losses are compared")
    parser.add_argument("--peer", default=shlex.join(PEER), help="command of the part `peer`; default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: known are {', '.join(PARTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.output, Clock(options.seconds), options.smoke)
    for name in parts:
        print(f"== {name} ({runner.clock.left():.0f} s left)", flush=True)
        if name == "digests":
            run_digests(runner)
        elif name == "update":
            run_update(runner)
        elif name == "peer":
            log = runner.output / "peer.log"
            if runner.call(shlex.split(options.peer), log, 60):
                print("    " + "\n    ".join(log.read_text().splitlines()[-3:]), flush=True)
        else:
            is_digested = name not in options.undigested.split(",")
            run_training(runner, name, TRAININGS[name], options.iterations, is_digested)
    for problem in runner.problems:
        print(f"PROBLEM {problem}", flush=True)
    return 1 if runner.problems else 0


if __name__ == "__main__":
    sys.exit(main())
