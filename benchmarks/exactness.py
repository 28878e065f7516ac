"""One digest for every offload setting, on a GPT of 1 B parameters trained on real text.

    python -m benchmarks.exactness --output out/exactness [--iterations 50]
    python -m benchmarks.exactness --long --settings "all resident"     # then "share auto", in a call of its own

Trains the same model once for each setting through pretrain_gpt.py, in deterministic mode, and prints for each: digest,
losses, median milliseconds of an iteration, peak memory, bytes moved. --long is a model of 0.9 B parameters with short
sequences, 1,000 steps of two micro-batches, and an infinite gradient in step 500. A setting whose log is complete
under --output is not run again. Ends with code 1 when digests or losses differ.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.demo.run import prepare_data, tokenizer_flags

_LLAMA = (
    "--group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0 --hidden-dropout 0"
)
MODELS = {
    "1b": "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --seq-length 2048 "
    f"--max-position-embeddings 2048 {_LLAMA}",
    # Wide and short: at 1,000 steps the update is what takes the time, not the layers.
    "long": "--num-layers 5 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 512 "
    f"--max-position-embeddings 512 {_LLAMA}",
    "tiny": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --seq-length 32 "
    f"--max-position-embeddings 32 {_LLAMA}",
}
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 2 --lr 3e-4 --min-lr 3e-5 --weight-decay 0.1 "
    "--adam-beta2 0.95 --clip-grad 1.0 --bf16 --grad-reduce-in-bf16 --recompute-granularity full --recompute-method "
    "uniform --recompute-num-layers 1 --deterministic-mode --log-interval 1 --eval-interval 100000 --eval-iters 0 "
    "--split 100,0,0 --log-state-digest --interleaved-offload --offload-grad-wire fp32"
)
SETTINGS = {
    "all resident": "--offload-resident-fraction 1",
    "share 0": "--offload-resident-fraction 0 --offload-gpu-share 0",
    "share 1/2": "--offload-resident-fraction 0 --offload-gpu-share 0.5",
    "share 1": "--offload-resident-fraction 0 --offload-gpu-share 1",
    "share auto": "--offload-resident-fraction 0",
    "quarter resident": "--offload-resident-fraction 0.25",
}
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run printed."""

    losses: tuple[str, ...]
    num_clipped: int
    num_skipped: int
    digest: str
    milliseconds: float
    memory: str
    upcast_bytes: int
    placement: str


def train(program: list[str], arguments: list[str], log: Path) -> Run:
    """Run `program` with `arguments`, keep its output in `log`; a complete log of the same command is read instead.

    Raises RuntimeError with its last lines when it fails.
    """
    command = shlex.join([*program, *arguments])
    text = log.read_text() if log.exists() else ""
    if not (text.startswith(command + "\n") and "state digest: " in text):
        with log.open("w") as out:
            out.write(command + "\n")
            out.flush()
            code = subprocess.call([sys.executable, *program, *arguments], stdout=out, stderr=subprocess.STDOUT)
        text = log.read_text()
        if code != 0:
            raise RuntimeError(f"{program[-1]} ended with code {code}:\n" + "\n".join(text.splitlines()[-15:]))
    return read_run(text)


def read_run(text: str) -> Run:
    """Read a run's output. Raises LookupError for one that is not complete."""
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    norms = [float(n) for n in re.findall(r"grad norm: (\S+)", text)]
    return Run(
        losses=tuple(re.findall(r"lm loss: (\S+)", text)),
        num_clipped=sum(norm > CLIP for norm in norms),
        num_skipped=sum(int(n) for n in re.findall(r"number of skipped iterations:\s+(\d+)", text)),
        digest=re.findall(r"state digest: (\S+)", text)[-1],
        milliseconds=statistics.median(times[3:] or times),
        memory=re.findall(r"> memory: (.*)", text)[-1],
        upcast_bytes=int(([0] + re.findall(r"moved by lane upcast: .*\((\d+) bytes\)", text))[-1]),
        placement=re.findall(r"optimizer state: .*: (.*)", text)[0],
    )


def describe(name: str, run: Run) -> str:
    """Return one line on a run."""
    return (
        f"{name}: loss {run.losses[0]} -> {run.losses[-1]} in {len(run.losses)} steps ({run.num_clipped} clipped, "
        f"{run.num_skipped} skipped), {run.milliseconds:.1f} ms an iteration, {run.memory}, "
        f"upcast {run.upcast_bytes / 2**30:.2f} GiB, {run.placement}, {run.digest}"
    )


def file_stem(setting: str) -> str:
    """A setting's name as part of a file name."""
    return setting.replace("/", "_").replace(" ", "_")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/exactness"))
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--settings", help=f"of {', '.join(SETTINGS)}; a comma between")
    parser.add_argument("--inject-inf-at", type=int, help="step with an infinite gradient element; 0: none")
    parser.add_argument("--long", action="store_true", help="1,000 steps; see above")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, on generated tokens")
    options = parser.parse_args()
    defaults = {"iterations": 50, "model": "1b", "settings": "all resident,share 0,share 1/2,share 1,share auto"}
    if options.long:
        defaults = {"iterations": 1000, "model": "long", "settings": "all resident,share auto", "inject_inf_at": 500}
    if options.smoke:
        defaults = {"iterations": 4, "model": "tiny", "settings": "all resident,share 1/2", "inject_inf_at": 2}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def data_flags(options: argparse.Namespace) -> list[str]:
    """Return what the runs train on; prepares it where it is missing."""
    if options.smoke:
        words = "--mock-data --tokenizer-type NullTokenizer --vocab-size 511 --num-workers 0 --use-cpu"
        return [*words.split(), "--offload-subgroup-numel", "65536"]
    if not (options.output / "text_text_document.bin").exists():
        prepare_data(options.output)
    return [*tokenizer_flags(options.output), "--data-path", str(options.output / "text_text_document")]


def main() -> int:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    data = data_flags(options)
    inject = options.inject_inf_at or 0
    # The last of a step's two micro-batches is the poisoned one.
    program = ["-m", "benchmarks.inject_inf", str(2 * inject)] if inject else ["pretrain_gpt.py"]
    runs: dict[str, Run] = {}
    for name in options.settings.split(","):
        words = f"{MODELS[options.model]} {TRAINING} --train-iters {options.iterations} {SETTINGS[name]} "
        words += f"--lr-warmup-iters {min(10, options.iterations // 5)}"
        log = options.output / f"{options.model}_{file_stem(name)}.log"
        runs[name] = train(program, [*shlex.split(words), *data], log)
        print(describe(name, runs[name]), flush=True)
    first = next(iter(runs.values()))
    equal = all(run.digest == first.digest and run.losses == first.losses for run in runs.values())
    print("one digest, one loss curve" if equal else "DIGESTS OR LOSSES DIFFER")
    skipped = all(run.num_skipped == (1 if inject else 0) for run in runs.values())
    if not skipped:
        print(f"SKIPPED STEPS: expected {1 if inject else 0}, found {[run.num_skipped for run in runs.values()]}")
    return 0 if equal and skipped else 1


if __name__ == "__main__":
    sys.exit(main())
