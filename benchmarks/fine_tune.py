"""From a HuggingFace folder through fine-tuning with offload and back, stage by stage, with seconds and peaks.

    python -m benchmarks.fine_tune --shape 7b --work out/fine_tune [--scratch /dev/shm/fine_tune] [--minutes 9]

Stages: make (random weights), import, verify (tensors and logits against transformers), text (training data), tune
(pretrain_gpt.py with nothing resident), export, reload (transformers alone, whose loss on the validation samples must
be the one that training printed last). A stage that is done is not done again by a second call, so a run may be cut
short by --minutes and go on later. Folders are removed as soon as no later stage reads them (--keep keeps them).

Ends with code 0 when all chosen stages are done, 1 when one failed, 3 when the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

LOSS_BOUND = 1e-2
"""Largest difference of the two losses: both sides compute in bf16, with other kernels."""
OUT_OF_TIME = 3
_GIB = 1 << 30
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How a shape of tools/checkpoint/random_model.py is trained. gigabytes: of its weights, 10^9 bytes.

    tune_seconds: what the stage `tune` needs at least; with less time left it is not begun.
    """

    gigabytes: float
    batch: str
    tune_seconds: float
    has_text: bool = True


SHAPES = {
    "tiny": Shape(
        gigabytes=0.001,
        batch="--seq-length 64 --micro-batch-size 2 --global-batch-size 4",
        tune_seconds=0,
        has_text=False,
    ),
    "1b": Shape(gigabytes=2.3, batch="--seq-length 2048 --micro-batch-size 2 --global-batch-size 16", tune_seconds=60),
    "7b": Shape(
        gigabytes=13.5, batch="--seq-length 2048 --micro-batch-size 2 --global-batch-size 16", tune_seconds=180
    ),
}
TRAINING = (
    "--bf16 --grad-reduce-in-bf16 --lr 1e-4 --lr-decay-style constant --adam-beta2 0.95 --clip-grad 1 --log-interval 1 "
    "--eval-interval 1000000 --eval-iters 1 --eval-at-start --num-workers 1 --split 95,5,0"
)
OFFLOAD = "--interleaved-offload --offload-resident-fraction 0"
SAVING = "--finetune --save-interval 1000000 --no-save-optim --no-save-rng"


@dataclass(slots=True)
class Row:
    """What one stage took. Peaks in GiB: of its largest process, and of tensors on the GPU."""

    seconds: float
    peak_host: float
    peak_gpu: float | None = None
    note: str = ""


class StageError(Exception):
    """Why a stage failed, with the last lines that it printed."""


class OutOfTime(Exception):
    """The time of --minutes is over."""


class Run:
    """The folders, the time left, and what is already done."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises ValueError, one sentence, for a folder of another shape or a disk that is too small."""
        self.shape, self.settings = options.shape, SHAPES[options.shape]
        self.work, self.keep, self.extra = options.work, options.keep, shlex.split(options.extra)
        self.iterations = options.iterations
        scratch = options.scratch or options.work
        self.hf, self.exported = scratch / "hf", scratch / "exported"
        self.ours, self.tuned = self.work / "ours", self.work / "tuned"
        self.deadline = time.monotonic() + 60 * options.minutes
        for folder in (self.work, scratch):
            folder.mkdir(parents=True, exist_ok=True)
        self._record = self.work / "stages.json"
        self.rows: dict[str, Row] = {}
        if self._record.exists():
            kept = json.loads(self._record.read_text())
            if kept["shape"] != self.shape:
                raise ValueError(
                    f"{self.work} holds a run of --shape {kept['shape']}: remove it or name another --work"
                )
            self.rows = {name: Row(**row) for name, row in kept["rows"].items()}
        else:
            _check_disk({self.work: 1 + (scratch != self.work), scratch: 2}, self.settings.gigabytes)

    def done(self, stage: str, row: Row) -> None:
        """Remember a stage."""
        self.rows[stage] = row
        self._record.write_text(json.dumps({"shape": self.shape, "rows": {k: asdict(v) for k, v in self.rows.items()}}))

    def remove(self, *folders: Path) -> None:
        """Remove folders that no later stage reads."""
        if not self.keep:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def call(self, stage: str, command: list[str]) -> tuple[str, Row]:
        """Run a command; returns what it printed (kept in WORK/STAGE.log), seconds and peak.

        Raises StageError where it fails and OutOfTime where the time ends, with nothing left running.
        """
        log = self.work / f"{stage}.log"
        started = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status, used = _wait(process.pid, self.deadline)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            process.returncode = os.waitstatus_to_exitcode(status)
        text = log.read_text(errors="replace")
        if process.returncode != 0:
            last = "\n".join(text.splitlines()[-25:])
            raise StageError(f"{shlex.join(command)}\nended with code {process.returncode}, its last words:\n{last}")
        return text, Row(time.monotonic() - started, used.ru_maxrss * 1024 / _GIB)

    def training_words(self) -> list[str]:
        """Return the flags of model, batch and data, which training and the check after it share."""
        from megatron.training.conversion.model_args import read_flags_script

        data = ["--data-path", str(self.work / "text_text_document")] if self.settings.has_text else ["--mock-data"]
        words = [*read_flags_script(self.ours), *shlex.split(self.settings.batch), *shlex.split(TRAINING), *data]
        return [*words, "--train-iters", str(self.iterations), *self.extra]


def _check_disk(copies: dict[Path, int], gigabytes: float) -> None:
    for folder, count in copies.items():
        free, needed = shutil.disk_usage(folder).free / 1e9, 1.05 * count * gigabytes
        if free < needed:
            raise ValueError(f"{folder} has {free:.1f} GB free, {needed:.1f} GB are needed there: name another folder")


def _wait(pid: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    while True:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            return status, used
        if time.monotonic() > deadline:
            raise OutOfTime
        time.sleep(_POLL_SECONDS)


# -- stages -----------------------------------------------------------------------------------------------------------


def make(run: Run) -> Row:
    """Random weights in HuggingFace's format."""
    text, row = run.call("make", [*_tool("random_model.py"), "--shape", run.shape, "--out", str(run.hf)])
    row.note = text.splitlines()[-1].split(" to ")[0]
    return row


def import_(run: Run) -> Row:
    """To our format."""
    command = [*_tool("convert.py"), "import", "--hf", str(run.hf), "--save", str(run.ours)]
    text, row = run.call("import", command)
    row.note = re.findall(r"imported (.*), [\d.]+ s,", text)[-1]
    return row


def verify(run: Run) -> Row:
    """Tensors bit by bit, logits in fp32 on the CPU."""
    text, row = run.call("verify", [*_tool("convert.py"), "verify", "--hf", str(run.hf), "--load", str(run.ours)])
    row.note = "; ".join(re.findall(r"(?:tensors: (.*)|(largest error \S+))", text)[i][i] for i in (0, 1))
    return row


def text(run: Run) -> Row:
    """Python's own documentation, as bytes."""
    if not run.settings.has_text:
        return Row(0.0, 0.0, note="generated tokens")
    started = time.monotonic()
    from examples.demo.corpus import build_corpus

    count, size = build_corpus(run.work / "text.jsonl")
    words = ["--input", str(run.work / "text.jsonl"), "--output-prefix", str(run.work / "text"), "--append-eod"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(run.ours / "tokenizer")]
    _, row = run.call("text", [sys.executable, "tools/preprocess_data.py", *words, "--workers", "2"])
    return Row(time.monotonic() - started, row.peak_host, note=f"{count} documents, {size / 1e6:.1f} MB")


def tune(run: Run) -> Row:
    """pretrain_gpt.py with offload."""
    run.remove(run.hf)
    shutil.rmtree(run.tuned, ignore_errors=True)
    if run.deadline - time.monotonic() < run.settings.tune_seconds:
        raise OutOfTime
    words = [*run.training_words(), *shlex.split(OFFLOAD), *shlex.split(SAVING)]
    command = [sys.executable, "pretrain_gpt.py", *words, "--load", str(run.ours), "--save", str(run.tuned)]
    text, row = run.call("tune", command)
    times = [float(word) for word in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    losses = re.findall(r"lm loss: (\S+)", text)
    milliseconds = statistics.median(times[3:] or times)
    tokens = _number_after(run.training_words(), "--seq-length") * _number_after(
        run.training_words(), "--global-batch-size"
    )
    if found := re.findall(r"peak device ([\d.]+)", text):
        row.peak_gpu = float(found[-1])
    row.note = (
        f"{len(times)} iterations of {tokens} tokens, median {milliseconds:.0f} ms, {1e3 * tokens / milliseconds:.0f} "
        f"tokens/s, loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}, validation {_valid_loss(text):.4f}"
    )
    for line in re.findall(r"(?:placement|> memory|optimizer state): .*", text):
        print("  " + line, flush=True)
    return row


def export(run: Run) -> Row:
    """Back to HuggingFace's format."""
    run.remove(run.ours / "release")
    command = [*_tool("convert.py"), "export", "--load", str(run.tuned), "--hf-out", str(run.exported)]
    text, row = run.call("export", command)
    row.note = re.findall(r"exported (.*), [\d.]+ s,", text)[-1]
    return row


def reload(run: Run) -> Row:
    """transformers opens the export and computes the validation loss."""
    run.remove(run.tuned)
    command = [sys.executable, "-m", "benchmarks.fine_tune_reload", str(run.exported), *run.training_words()]
    text, row = run.call("reload", command)
    found = json.loads(text.splitlines()[-1])
    row.peak_gpu = found["peak_gpu"]
    trained = _valid_loss((run.work / "tune.log").read_text())
    row.note = f"transformers' loss {found['loss']:.4f}, in training {trained:.4f}, on {found['tokens']} tokens"
    if not abs(found["loss"] - trained) <= LOSS_BOUND:
        raise StageError(f"{row.note}: they differ by more than {LOSS_BOUND}")
    run.remove(run.exported)
    return row


STAGES: dict[str, Callable[[Run], Row]] = {
    "make": make,
    "import": import_,
    "verify": verify,
    "text": text,
    "tune": tune,
    "export": export,
    "reload": reload,
}


def _tool(name: str) -> list[str]:
    return [sys.executable, f"tools/checkpoint/{name}"]


def _number_after(words: list[str], flag: str) -> int:
    return int(words[len(words) - words[::-1].index(flag)])


def _valid_loss(log: str) -> float:
    """Return the loss of the evaluation after the last iteration in a log."""
    return float(re.findall(r"on validation set \| lm loss value: (\S+)", log)[-1])


# -- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of tools/checkpoint/random_model.py")
    parser.add_argument("--work", type=Path, default=Path("out/fine_tune"), help="folder for checkpoints and logs")
    parser.add_argument("--scratch", type=Path, help="folder for HuggingFace's files, such as one in /dev/shm")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time; a later call goes on")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)}")
    parser.add_argument("--keep", action="store_true", help="remove no folder")
    parser.add_argument("--extra", default="", help="more flags for pretrain_gpt.py, in one word")
    options = parser.parse_args()
    chosen = options.stages.split(",")
    unknown = [name for name in chosen if name not in STAGES]
    if unknown:
        parser.error(f"--stages names {unknown[0]}, there are {','.join(STAGES)}")
    try:
        run = Run(options)
    except ValueError as error:
        parser.error(str(error))
    code = 0
    for name in STAGES:
        if name in chosen and name not in run.rows:
            code = _do(run, name)
            if code != 0:
                break
    print_table(run)
    return code


def _do(run: Run, name: str) -> int:
    try:
        run.done(name, STAGES[name](run))
    except StageError as error:
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        return 1
    except OutOfTime:
        print(f"out of time in {name}: the same command goes on there", file=sys.stderr, flush=True)
        return OUT_OF_TIME
    row = run.rows[name]
    print(f"{name}: {row.seconds:.1f} s, peak host {row.peak_host:.2f} GiB, {row.note}", flush=True)
    return 0


def print_table(run: Run) -> None:
    """Print a row of each stage that is done, as a table of Markdown."""
    print("| stage | seconds | peak host, GiB | peak GPU, GiB | |\n|---|---|---|---|---|")
    for name, row in run.rows.items():
        gpu = "" if row.peak_gpu is None else f"{row.peak_gpu:.2f}"
        print(f"| {name} | {row.seconds:.1f} | {row.peak_host:.2f} | {gpu} | {row.note} |")
    print(f"| all | {sum(row.seconds for row in run.rows.values()):.1f} | | | |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
